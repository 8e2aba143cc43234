"""Benchmarks that share one runner."""
