"""Bytes in and out for the protocols."""
