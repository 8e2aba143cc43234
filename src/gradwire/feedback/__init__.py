"""Residual policies, and the only owner of residual state."""

from gradwire.feedback.policies import ErrorFeedback, NoFeedback, Policy, get
from gradwire.feedback.residuals import ResidualKey, Residuals, Role

__all__ = ["ErrorFeedback", "NoFeedback", "Policy", "ResidualKey", "Residuals", "Role", "get"]
