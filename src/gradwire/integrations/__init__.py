"""Adapters to what users already run; DDP first."""
