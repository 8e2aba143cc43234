"""Processes that run the server ends of the protocols."""
