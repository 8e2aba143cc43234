"""The aggregation server's part in Python when a program adds up: attaches it, and does the rest.

The program forms the sums of full packets. `KernelStateMachine` forms all others, tells the program who has joined,
and sees in its maps what is late.

On failure: the kernel detaches all programs when this process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import functools
import socket
import struct

import numpy as np

from gradwire.aggregator.datagram_keys import WorkerDatagrams
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, Packet, PacketCounters, PacketKey
from gradwire.aggregator.server import AggregatorStateMachine, PacketToSend, UnansweredPacket
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.xdp import loader
from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.copies import CONTINUE
from gradwire.aggregator.xdp.driver import sends_redirected
from gradwire.aggregator.xdp.frames import HEADER_BYTES
from gradwire.aggregator.xdp.guard import SipHashGuard
from gradwire.aggregator.xdp.kernel_slots import KernelSlots, SlotState
from gradwire.aggregator.xdp.layout import WIDTHS
from gradwire.aggregator.xdp.program import PASS
from gradwire.aggregator.xdp.seals import Keys, ends
from gradwire.aggregator.xdp.system import ProgramType
from gradwire.core.errors import DisagreementError, OptionError, SyncError

_ETHERNET_BYTES = 14
_SIOCGIFMTU = 0x8921
_MOST_QUESTIONS = 4096
"""Slots that a worker is asked for at a time, which takes a tenth of a second."""


class XdpInterface:
    """An interface with programs attached, which let everything pass until a session begins.

    Args:
        interface: Name of the interface.
        mode: Name of a mode in `gradwire.aggregator.xdp.loader.MODES`.

    Raises:
        RightsError: This process may not attach programs.
        OptionError: The kernel or the interface lacks something.
    """

    def __init__(self, interface: str, mode: str) -> None:
        self.name = interface
        index = loader.interface_index(interface)
        if mode == loader.BROADCAST and not sends_redirected(index):
            raise OptionError(
                f"The driver of {interface} does not send what XDP programs redirect to it. Pass --xdp-mode native. A "
                "cable (veth) does while its other end has an XDP program, too."
            )
        idle, idle_control = Assembler("xdp"), Assembler("tc")
        idle.leave(PASS)
        idle_control.leave(CONTINUE)
        with loader.load(idle, ProgramType.XDP, ()) as program:
            self._link = loader.attach_xdp(program, interface, mode)
        with loader.load(idle_control, ProgramType.TRAFFIC_CONTROL, ()) as program:
            self._copier_link = loader.attach_ingress(program, interface)
            self._signer_link = loader.attach_egress(program, interface)

    @property
    def mtu(self) -> int:
        """Largest IP packet of the interface, in bytes."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("16si8x", self.name.encode(), 0))
        found: int = struct.unpack_from("i", answer, 16)[0]
        return found

    def run(self, slots: KernelSlots) -> None:
        """Run the programs of a session from now on."""
        slots.send_through(loader.interface_index(self.name))
        loader.replace(self._signer_link, slots.signer)
        loader.replace(self._copier_link, slots.copier)
        loader.replace(self._link, slots.program)

    def close(self) -> None:
        """Detach. Idempotent."""
        self._link.close()
        self._copier_link.close()
        self._signer_link.close()


class KernelStateMachine(AggregatorStateMachine):
    """The state machine of a session whose full packets the kernel adds up.

    Args:
        config: Session configuration.
        epoch: Random number of this incarnation of the server.
        slots: The session's maps and programs.

    Attributes:
        strayed: Worker whose packet should have gone to the program and has not; None if there is none.
    """

    def __init__(self, config: SessionConfig, epoch: int, slots: KernelSlots) -> None:
        self._slots_in_kernel = slots
        self._asked: dict[int, np.ndarray] = {}  # for each worker to ask, the times of slots for which it was asked
        self.strayed: int | None = None
        slots.begin(epoch)
        super().__init__(config, epoch)

    @property
    def resumed(self) -> bool:
        """If true, an earlier incarnation of the server has answered some of the workers."""
        return self._resumed

    @resumed.setter
    def resumed(self, value: bool) -> None:
        self._resumed = value
        if value:
            self._slots_in_kernel.resume()

    def take_worker(self, datagrams: WorkerDatagrams, keys: Keys, guard: str) -> None:
        """Take packets of a worker that has joined, in kernel and Python."""
        datagrams.sender, datagrams.receiver = ends(guard, keys.from_server, keys.from_worker)
        self._slots_in_kernel.join(datagrams.worker, datagrams.address, keys.from_worker, keys.from_server)
        self._asked[datagrams.worker] = np.zeros_like(self._slots_in_kernel.times())

    def questions(self) -> list[PacketToSend]:
        """Return questions as `rejoined` does, for workers that the program did not reach when a round began.

        Call it from time to time, with the lock of `take_worker`, and send them another way. A worker that goes on to
        send nothing is asked for the first of these rounds again.
        """
        if not self.resumed or not self._asked:
            return []
        slots, messages = self._slots_in_kernel, []
        silent = [worker for worker in self._asked if not slots.reaches(worker)]
        began = slots.times()  # after that: whoever is reached when a round begins is asked by the program
        waiting, state = np.flatnonzero(began), functools.cache(slots.state)
        waiting = waiting[began[waiting].argsort()]
        for worker, asked in list(self._asked.items()):
            new = waiting[began[waiting] != asked[waiting]]
            due = new[:_MOST_QUESTIONS]
            lacking = [slot for slot in due.tolist() if state(slot).may_lack(worker)]
            messages += [self._wanted(worker, self._key(slot, state(slot))) for slot in lacking]
            asked[due] = began[due]
            if worker in silent:
                asked[lacking[:1]] = 0
            elif due.size == new.size:
                del self._asked[worker]
        self.counters.sent += len(messages)
        return messages

    def check(self, interface: str | None) -> None:
        """Raise `SyncError` if a packet has reached Python that was the program's, or answers cannot be sent."""
        num_stuck = self._slots_in_kernel.num_stuck()
        if num_stuck:
            raise SyncError(
                f"Answers to workers are lost ({num_stuck} so far), because the driver of {interface} keeps no "
                "metadata with a packet. Start the server with --xdp-mode generic."
            )
        if self.strayed is not None:
            raise SyncError(
                f"Packets of worker {self.strayed} reach the server, but not through {interface}, or as fragments. "
                "Pass the interface that faces the workers to --xdp, or serve without it.",
                rank=self.strayed,
            )

    def total_counters(self) -> PacketCounters:
        return PacketCounters.total((self._slots_in_kernel.counted(), self.counters))

    def oldest_open(self) -> UnansweredPacket | None:
        kernel, rest = self._oldest_in_kernel(), super().oldest_open()
        return min((one for one in (kernel, rest) if one is not None), key=lambda one: one.since, default=None)

    def _oldest_in_kernel(self) -> UnansweredPacket | None:
        slots = self._slots_in_kernel
        began = slots.times()
        waiting = np.flatnonzero(began)
        if not waiting.size:
            return None
        slot = int(waiting[began[waiting].argmin()])
        state = slots.state(slot)
        missing = [worker for worker in range(self.config.world_size) if not state.heard >> worker & 1]
        if not state.is_open:  # answered in the meantime
            return None
        return UnansweredPacket(int(began[slot]) / 1e9, self._key(slot, state), missing)

    def _key(self, slot: int, state: SlotState) -> PacketKey:
        return PacketKey(state.expected_round, *self._slots_in_kernel.place(slot))

    def _misfit(self, packet: Packet, sender: int | None) -> tuple[str, object] | None:
        misfit = super()._misfit(packet, sender)
        if misfit is None and packet.key.packet < self._slots_in_kernel.streams[packet.key.stream]:
            self.strayed = packet.worker
            return "packets that the program in the kernel does not take", "one that it should have taken"
        return misfit


def check_waits(config: SessionConfig) -> None:
    """Raise `DisagreementError` if workers do not wait for all sums: the program keeps a sum until it is complete."""
    if config.fill_seconds:
        raise DisagreementError(
            f"The program in the kernel waits for every sum, but workers go on after {config.fill_seconds:g} s. Start "
            "the server with --udp and without --xdp, or leave fill_after out."
        )


def check_frames(config: SessionConfig, interface: XdpInterface) -> None:
    """Raise `DisagreementError` if results, or contributions, do not fit a frame of the interface."""
    sizes = [
        HEADER_BYTES
        - _ETHERNET_BYTES
        + PACKET_HEADER_BYTES
        + SipHashGuard.trailer_bytes
        + config.result_bytes(stream, 0)
        for stream in range(len(config.streams))
        if config.result_dtype(stream).itemsize * 8 in WIDTHS
    ]
    largest = max(sizes, default=0)
    if largest > interface.mtu:
        raise DisagreementError(
            f"Results of {largest} bytes do not fit the frames of {interface.name}, whose mtu is {interface.mtu}. Pass "
            f"mtu={interface.mtu} to gradwire.Aggregator on all workers, raise the mtu of all links to {largest}, or "
            "start the server without --xdp."
        )
