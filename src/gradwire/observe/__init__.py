"""Consumers of the event stream: metrics and reports, notices, traces, and the flight recorder."""
