"""The adapter for DistributedDataParallel."""
