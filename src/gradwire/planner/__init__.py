"""The planner: what each tensor should travel by, from measured costs. Nothing is measured or sent here."""

from gradwire.planner.choose import plan, uniform
from gradwire.planner.options import PlannedTensor, is_small
from gradwire.planner.table import PlanRow, PlanTable

__all__ = ["PlanRow", "PlanTable", "PlannedTensor", "is_small", "plan", "uniform"]
