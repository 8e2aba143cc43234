"""A laptop-sized network: a namespace a host, each link shaped, bytes counted at the interface."""

from gradwire.lab.counters import Counters, Drops, interface_counters
from gradwire.lab.errors import LabError
from gradwire.lab.lab import Lab, available
from gradwire.lab.results import HostResult, LabResult
from gradwire.lab.units import format_rate, parse_loss, parse_rate

__all__ = [
    "Counters",
    "Drops",
    "HostResult",
    "Lab",
    "LabError",
    "LabResult",
    "available",
    "format_rate",
    "interface_counters",
    "parse_loss",
    "parse_rate",
]
