"""Connections between ranks, and between workers and servers."""
