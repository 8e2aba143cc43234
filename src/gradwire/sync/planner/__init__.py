"""The planner: what each tensor should travel by, from measured costs. Nothing is measured or sent here."""

from gradwire.sync.planner.choose import plan, uniform
from gradwire.sync.planner.options import Gradient, is_small
from gradwire.sync.planner.table import PlanTable, Row

__all__ = ["Gradient", "PlanTable", "Row", "is_small", "plan", "uniform"]
