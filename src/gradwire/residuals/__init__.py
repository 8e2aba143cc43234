"""Residuals as a transaction, and the policies that use them."""

from gradwire.residuals.momentum import MomentumCorrection
from gradwire.residuals.policies import EncodeInput, ErrorFeedback, NoFeedback, Policy, get
from gradwire.residuals.slices import ResidualKey, Role
from gradwire.residuals.transaction import Residuals

__all__ = [
    "EncodeInput",
    "ErrorFeedback",
    "MomentumCorrection",
    "NoFeedback",
    "Policy",
    "ResidualKey",
    "Residuals",
    "Role",
    "get",
]
