"""What every compressor is made of: the contract, the registry, and the classes that algorithms derive from."""

from gradwire.compressors.base.contract import Compressor, FeedbackName, Reduction, Stat

__all__ = ["Compressor", "FeedbackName", "Reduction", "Stat"]
