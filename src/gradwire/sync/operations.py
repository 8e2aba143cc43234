"""Operations: CaSync's five primitives as data, with the order between them.

A strategy makes the operations of a job once per plan (`gradwire.sync.strategies`). The engine runs them in every step
(`gradwire.sync.run` holds what a step fills in), the simulator prices them, and `gradwire.sync.drawing` prints them.

Source: HiPress (SOSP 2021), section 3.1: encode, decode, merge, send and recv as composable primitives with a
dependency graph between them.
"""

# Shapes: N = operations

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from gradwire.sync.chunk import Chunk
from gradwire.wire.frame import FrameKind

Primitive = Literal["encode", "decode", "merge", "send", "recv"]


class Op(NamedTuple):
    """One operation of a rank.

    Attributes:
        kind: Primitive.
        phase: Name for messages and traces, for example ``"recv scatter"``.
        chunk: Range of the job.
        call: Method of the job's codec that does it. Empty for a `recv`, and for a `send` of a frame to `peer`.
        inputs: Operations whose results it takes, in this order.
        after: Further operations that must have ended.
        stage: Index of the encode on the path, or of the frame.
        peer: Other rank of a `send` or `recv`.
        frame: Kind of the payload that it makes, sends or receives; None if there is none.
        dense: Whether a frame is not compressed, whatever the job's compressor is.
    """

    kind: Primitive
    phase: str
    chunk: Chunk
    call: str = ""
    inputs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    stage: int = 0
    peer: int | None = None
    frame: FrameKind | None = None
    dense: bool = False


class FrameFields(NamedTuple):
    """Header fields that all frames of a job have in common, in every step.

    Attributes:
        tensor: Index of the tensor in the agreed order of names.
        offset: Global element index of the job's first value.
        compressor: Id of the compressor in the registry; 0 if there is none.
        dtype: Code of the element type; 0 if there is none.
        members: Hash of the members of a group; 0 for a single tensor.
    """

    tensor: int
    offset: int = 0
    compressor: int = 0
    dtype: int = 0
    members: int = 0


class FrameKey(NamedTuple):
    """The frame that a `recv` waits for. Unique within a job.

    Attributes:
        peer: Rank that sends it.
        kind: Kind of the payload.
        stage: Stage that it leaves.
        tensor: See `FrameFields`.
        members: See `FrameFields`.
        partition: Index of the chunk.
        offset: First element of the chunk in the full tensor.
        numel: Number of its elements.
    """

    peer: int
    kind: FrameKind
    stage: int
    tensor: int
    members: int
    partition: int
    offset: int
    numel: int


class Operations:
    """The operations of one job on one rank. They never change.

    Args: See the attributes of the same names.

    Attributes:
        ops: Operations; one comes after all that it waits for.
        pending: For each operation, how much it waits for: other operations or, if it is a `recv`, its frame (N).
        successors: Operations that wait for each (N).
        num_users: How many operations take the result of each (N).
        overwrites: Whether the result of each is a payload that is only decoded, to overwrite the gradient (N).
        roots: Operations that wait for nothing.
        recvs: Each `recv` by its frame.
        senders: Ranks that send those frames.
        details: Event details of each (N).
        first_stage: Stage of the first compressed encode. Earlier stages are dense.
        num_encoders: Number of ranks that encode each chunk; 0 for all.
        fields: Header fields of its frames.
    """

    def __init__(self, ops: Sequence[Op], fields: FrameFields, first_stage: int = 0, num_encoders: int = 0) -> None:
        self.ops = tuple(ops)
        self.fields = fields
        self.first_stage = first_stage
        self.num_encoders = num_encoders
        self.overwrites = [False] * len(ops)
        self.pending = [0] * len(ops)
        self.num_users = [0] * len(ops)
        self.recvs: dict[FrameKey, int] = {}
        successors: list[list[int]] = [[] for _ in ops]
        for index, op in enumerate(ops):
            for before in predecessors(op):
                successors[before].append(index)
            for used in op.inputs:
                self.num_users[used] += 1
            self.pending[index] = len(predecessors(op))
            if op.kind == "recv":
                assert op.peer is not None and op.frame is not None and not self.pending[index]
                self.pending[index] = 1
                self.recvs[_key(op, op.peer, op.frame, fields)] = index
        for op in ops:
            if op.call == "decode":
                self.overwrites[op.inputs[0]] = self.num_users[op.inputs[0]] == 1
        assert len(self.recvs) == sum(op.kind == "recv" for op in ops), "each frame has one recv"
        self.successors = [tuple(each) for each in successors]
        self.roots = [index for index, count in enumerate(self.pending) if count == 0]
        self.senders = {key.peer for key in self.recvs}
        self.details = [{"phase": op.phase} for op in ops]


def _key(op: Op, peer: int, frame: FrameKind, fields: FrameFields) -> FrameKey:
    chunk = op.chunk
    where = chunk.index, fields.offset + chunk.offset, chunk.count
    return FrameKey(peer, frame, op.stage, fields.tensor, fields.members, *where)


def predecessors(op: Op) -> tuple[int, ...]:
    """Return the operations that `op` waits for, each once."""
    return tuple(dict.fromkeys(op.inputs + op.after))


class Draft:
    """A list of operations that grows.

    Attributes:
        ops: Operations so far. Methods return their indices.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(
        self,
        kind: Primitive,
        call: str,
        phase: str,
        chunk: Chunk,
        inputs: Iterable[int] = (),
        after: Iterable[int] = (),
        stage: int = 0,
        frame: FrameKind | None = None,
    ) -> int:
        """Add an operation of the codec."""
        return self._append(Op(kind, phase, chunk, call, tuple(inputs), tuple(after), stage, frame=frame))

    def send_frame(
        self, payload: int, peer: int, kind: FrameKind, chunk: Chunk, stage: int, phase: str,
        after: Iterable[int] = (), dense: bool = False,
    ) -> int:  # fmt: skip
        """Send the result of `payload` to `peer`."""
        return self._append(Op("send", phase, chunk, "", (payload,), tuple(after), stage, peer, kind, dense))

    def recv_frame(self, peer: int, kind: FrameKind, chunk: Chunk, stage: int, phase: str, dense: bool = False) -> int:
        """Wait for a frame."""
        return self._append(Op("recv", phase, chunk, "", (), (), stage, peer, kind, dense))

    def _append(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1
