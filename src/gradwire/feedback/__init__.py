"""Residual policies, and the only owner of residual state."""

from gradwire.feedback.momentum import MomentumCorrection
from gradwire.feedback.policies import ErrorFeedback, NoFeedback, Policy, get
from gradwire.feedback.residuals import ResidualKey, Residuals, Role

__all__ = ["ErrorFeedback", "MomentumCorrection", "NoFeedback", "Policy", "ResidualKey", "Residuals", "Role", "get"]
