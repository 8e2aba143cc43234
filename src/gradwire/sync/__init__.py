"""CaSync: strategies, task graph, engine and plan."""
