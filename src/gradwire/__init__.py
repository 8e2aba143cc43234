"""gradwire: data-parallel PyTorch over slow networks."""

__version__ = "0.1.0"
