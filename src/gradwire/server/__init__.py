"""Processes that run the server ends of the protocols. Empty until the servers arrive; the layer is reserved."""
