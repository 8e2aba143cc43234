"""Shared by all layers: errors, tensor specs, the encode context, counter-based keys, events and threads."""
