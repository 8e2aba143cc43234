"""Consumers of the event stream: metrics, reports, flight recorder files."""
