"""The planner: chooses compressor, strategy and partitions for each tensor from measured costs. It measures nothing."""

from gradwire.planner.choose import plan, uniform
from gradwire.planner.native import natives
from gradwire.planner.options import PlannedTensor, buckets_of, in_buckets
from gradwire.planner.table import PlanRow, PlanTable

__all__ = ["PlanRow", "PlanTable", "PlannedTensor", "buckets_of", "in_buckets", "natives", "plan", "uniform"]
