"""Residual policies and the only owner of residual state."""
