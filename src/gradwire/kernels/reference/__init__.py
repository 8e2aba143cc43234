"""The oracle: every kernel in plain NumPy, written to be read."""
