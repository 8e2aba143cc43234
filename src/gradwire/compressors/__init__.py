"""One file an algorithm, a base class and a registry."""
