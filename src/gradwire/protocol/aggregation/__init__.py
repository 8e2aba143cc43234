"""Aggregation rounds of THC: a server that looks indices up and adds, and workers that send until they are answered."""
