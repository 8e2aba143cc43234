"""The lab's network: a bridge, a cable to each host, shaping at both ends of each cable, and packet loss.

Host k has the interface `eth0` with the address 10.77.0.(k+1)/24. The other end of its cable is `port<k>` at the
bridge. A token bucket shapes the uplink where the host sends (egress of `eth0`), and another the downlink where the
bridge sends (egress of `port<k>`).

Queues and TCP are Linux's defaults, whatever the machine itself uses: 1,000 frames, or 50 ms if that is more, wait at
each end of a cable, and congestion control is CUBIC. With 256 KiB, several flows of a host overflow its queue at 10
Mbit/s, and retransmissions double the time of an all-gather between 8 hosts. With BBR, a ring of 4 hosts loses a sixth
of that rate.

The network is silent: link-layer addresses are written into every host and into the bridge, and there is no IPv6, so
that interface counters hold only the hosts' own traffic. Segmentation happens before the interface (`gso_max_segs 1`),
so that a counted packet is a frame of at most 1514 bytes, loss falls on frames, and headers are counted in full.

Measured on two cores, one flow or three into one host, one second each: 10.00, 100.0 and 1000 Mbit/s at the interface
for rates of 10, 100 and 1000; with three other busy processes 9.9, 99 and 970 in the worst of a few runs. Without
shaping, one flow reaches about 5 Gbit/s, which bounds the useful rates.

Packets are lost on arrival at a host, before its sockets: once per path, independently per packet. The interface has
counted the packet by then.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.lab.counters import Drops, InterfaceCounters, parse_net_dev
from gradwire.lab.namespaces import Namespaces
from gradwire.lab.napi import receive_by_napi
from gradwire.lab.rights import find_loss_tool

if TYPE_CHECKING:
    from gradwire.aggregator.xdp.system import Descriptor

INTERFACE = "eth0"
_PLAIN_SCRIPT = str(Path(__file__).with_name("plain.py"))
_FRAME_BYTES = 1514
_BURST_SECONDS = 0.001
_MIN_BURST_BYTES = 3 * _FRAME_BYTES
_QUEUE_SECONDS = 0.05
_MIN_QUEUE_BYTES = 1000 * _FRAME_BYTES
_CONGESTION_CONTROL = "cubic"
_LOSS_STEPS = 1 << 30


def address(host: int) -> str:
    """IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def burst_bytes(rate_bits: int) -> int:
    """Size of the token bucket: bytes that may pass at line speed after a silence.

    One millisecond of the rate, but at least three frames. Larger transfers are shaped; smaller buckets lose rate
    whenever the kernel wakes the queue late.
    """
    return max(_MIN_BURST_BYTES, int(rate_bits / 8 * _BURST_SECONDS))


def queue_bytes(rate_bits: int) -> int:
    """Bytes that may wait for tokens before packets are dropped: 50 ms of the rate, but at least 1,000 frames."""
    return burst_bytes(rate_bits) + max(_MIN_QUEUE_BYTES, int(rate_bits / 8 * _QUEUE_SECONDS))


class Network:
    """Cables, shaping and loss inside a set of namespaces.

    Args:
        namespaces: Namespaces of the hosts and the bridge.
        num_hosts: Number of hosts.
        delay: One-way delay of each uplink, or None.
        loss: Fraction of packets that each host drops on arrival.
        queue: Bytes that may wait at the bridge for each host; None for `queue_bytes`. The host's own queue is always
            of that size.

    Raises:
        LabError: The kernel lacks a feature, which the message names.
        RightsError: A tool is missing.
    """

    def __init__(
        self, namespaces: Namespaces, num_hosts: int, *, delay: timedelta | None, loss: float, queue: int | None
    ) -> None:
        self._namespaces = namespaces
        self._num_hosts = num_hosts
        self._delay = delay
        self._queue = queue
        self._loss_tool = find_loss_tool() if loss else None
        self._rates: list[int | None] = [None] * num_hosts
        self._programs: dict[int, Descriptor] = {}  # attached to the bridge's end of a host's cable
        self._connect()
        if delay is not None:
            for host in range(num_hosts):
                self._shape_uplink(host)
        if loss:
            for host in range(num_hosts):
                self._drop(host, loss)

    @property
    def rates(self) -> tuple[int | None, ...]:
        """Rate of each host's links in bits per second; None if not shaped."""
        return tuple(self._rates)

    def set_rate(self, rate_bits: int | None, hosts: range) -> None:
        """Change the rate of these hosts' links in both directions. Packets in the queues stay there."""
        batch = []
        for host in hosts:
            if self._rates[host] == rate_bits:
                continue
            was_shaped = self._rates[host] is not None
            self._rates[host] = rate_bits
            self._shape_uplink(host, was_shaped=was_shaped)
            batch.append(_qdisc(f"port{host}", rate_bits, self._queue, was_shaped=was_shaped))
        if batch:
            self._namespaces.tool(None, ["tc", "-batch", "-"], "\n".join(batch))

    def receive_by_napi(self, host: int) -> None:
        """Let the bridge receive a host's frames by NAPI; see `napi.py`."""
        self._programs[host] = receive_by_napi(self._namespaces.path(None), f"port{host}")

    def counters(self) -> tuple[InterfaceCounters, ...]:
        """Traffic of each host's interface, read at the bridge's ends of the cables in one go."""
        table = parse_net_dev(self._namespaces.net_dev())
        return tuple(table[f"port{host}"].mirrored() for host in range(self._num_hosts))

    def drops(self) -> tuple[Drops, ...]:
        """Packets that each host has lost so far. Switching the shaping on or off resets the counts of the queues."""
        ports = _queue_drops(self._namespaces.tool(None, ["tc", "-s", "-j", "qdisc", "show"]))
        return tuple(
            Drops(
                uplink=_queue_drops(self._namespaces.tool(host, ["tc", "-s", "-j", "qdisc", "show"])).get(INTERFACE, 0),
                downlink=ports.get(f"port{host}", 0),
                loss=self._lost(host),
            )
            for host in range(self._num_hosts)
        )

    def _connect(self) -> None:
        hosts = range(self._num_hosts)
        tool = self._namespaces.tool
        tool(None, ["ip", "-batch", "-"], "\n".join(self._bridge_script()))
        tool(None, [sys.executable, "-I", "-S", _PLAIN_SCRIPT, *(f"host{host}" for host in hosts)])
        moves = [f"link set host{host} name {INTERFACE} netns {self._namespaces.path(host)}" for host in hosts]
        tool(None, ["ip", "-batch", "-"], "\n".join(moves))
        fdb = [f"fdb add {_hardware_address(host)} dev port{host} master static" for host in hosts]
        tool(None, ["bridge", "-batch", "-"], "\n".join(fdb))
        for host in hosts:
            tool(host, ["ip", "-batch", "-"], "\n".join(self._host_script(host)))

    def _bridge_script(self) -> Iterator[str]:
        yield "link add br0 type bridge mcast_snooping 0 stp_state 0"
        yield "link set br0 addrgenmode none up"
        for host in range(self._num_hosts):
            cable = f"type veth peer name host{host} address {_hardware_address(host)}"
            yield f"link add name port{host} {cable}"
            yield f"link set port{host} master br0 addrgenmode none gso_max_segs 1 up"

    def _host_script(self, host: int) -> Iterator[str]:
        yield "link set lo up"
        yield f"link set {INTERFACE} addrgenmode none up"
        yield f"addr add {address(host)}/24 dev {INTERFACE} noprefixroute"
        yield f"route add 10.77.0.0/24 dev {INTERFACE} src {address(host)} congctl {_CONGESTION_CONTROL}"
        for other in range(self._num_hosts):
            if other != host:
                known = f"{address(other)} lladdr {_hardware_address(other)} dev {INTERFACE}"
                yield f"neigh add {known} nud permanent"

    def _shape_uplink(self, host: int, *, was_shaped: bool = False) -> None:
        rate_bits = self._rates[host]
        batch = [_qdisc(INTERFACE, rate_bits, None, was_shaped=was_shaped)] if rate_bits or was_shaped else []
        if self._delay is not None and (rate_bits is None or not was_shaped):
            # Below the token bucket, if there is one, so that a packet is first delayed and then paced.
            place = "parent 1:1 handle 10:" if rate_bits else "root handle 10:"
            micros = round(self._delay.total_seconds() * 1e6)
            batch.append(f"qdisc replace dev {INTERFACE} {place} netem delay {micros}us limit 100000")
        self._namespaces.tool(host, ["tc", "-batch", "-"], "\n".join(batch))

    def _drop(self, host: int, loss: float) -> None:
        assert self._loss_tool is not None, "loss without a tool to drop with"
        if self._loss_tool.endswith("nft"):
            threshold = round(loss * _LOSS_STEPS)
            draw = f'iifname "{INTERFACE}" numgen random mod {_LOSS_STEPS} < {threshold}'
            script = "\n".join(
                [
                    "add table ip lab",
                    "add counter ip lab lost",
                    "add chain ip lab arrival { type filter hook input priority 0; policy accept; }",
                    f'add rule ip lab arrival {draw} counter name "lost" drop',
                ]
            )
            self._namespaces.tool(host, [self._loss_tool, "-f", "-"], script)
        else:
            rule = f"-A INPUT -i {INTERFACE} -m statistic --mode random --probability {loss:.9f} -j DROP"
            self._namespaces.tool(host, [self._loss_tool, *rule.split()])

    def _lost(self, host: int) -> int:
        if self._loss_tool is None:
            return 0
        if self._loss_tool.endswith("nft"):
            listing = self._namespaces.tool(host, [self._loss_tool, "list", "counter", "ip", "lab", "lost"])
            found = re.search(r"packets (\d+)", listing)
        else:
            listing = self._namespaces.tool(host, [self._loss_tool, "-nvxL", "INPUT"])
            found = re.search(r"^\s*(\d+)\s+\d+\s+DROP", listing, re.MULTILINE)
        assert found, f"{self._loss_tool} lists no count of drops: {listing}"
        return int(found[1])


def _qdisc(interface: str, rate_bits: int | None, queue: int | None, *, was_shaped: bool) -> str:
    if rate_bits is None:
        return f"qdisc del dev {interface} root"
    verb = "change" if was_shaped else "replace"
    return (
        f"qdisc {verb} dev {interface} root handle 1: tbf rate {rate_bits}bit "
        f"burst {burst_bytes(rate_bits)} limit {queue or queue_bytes(rate_bits)}"
    )


def _queue_drops(listing: str) -> dict[str, int]:
    roots = [qdisc for qdisc in json.loads(listing) if qdisc.get("root")]
    return {qdisc["dev"]: int(qdisc.get("drops", 0)) for qdisc in roots}


def _hardware_address(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"
