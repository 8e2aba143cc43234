"""A network on one machine: a namespace per host, shaped links, bytes counted at the interface."""

from gradwire.lab.counters import Drops, InterfaceCounters, interface_counters
from gradwire.lab.errors import LabError
from gradwire.lab.lab import Lab, available
from gradwire.lab.results import HostResult, LabResult
from gradwire.lab.units import format_rate, parse_loss, parse_rate

__all__ = [
    "Drops",
    "HostResult",
    "InterfaceCounters",
    "Lab",
    "LabError",
    "LabResult",
    "available",
    "format_rate",
    "interface_counters",
    "parse_loss",
    "parse_rate",
]
