"""A network on one machine: a namespace per host, shaped links, bytes counted at the interface.

- `lab`: the public class. `rights`: what it needs from the system. `units`: rates, losses and delays as text.
- `keeper`, `namespaces`: the process that holds the namespaces, and the lab's end of it.
- `network`, `plain`, `counters`: bridge and shaped cables, frames of their real size, counts of bytes.
- `runner`, `results`, `errors`: runs commands on hosts; exit codes, output and traffic; the lab's error.
"""

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
