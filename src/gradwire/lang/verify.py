"""Checks of a whole program at the end of a trace, beyond the shape rules of its operators."""

from __future__ import annotations

from gradwire.lang.errors import TraceError
from gradwire.lang.ir import BOOL, Node, Program, closure
from gradwire.lang.operators.base import Coding, Sink, Statement, lookup

# Operators for encoders only: a decoder computes each element independently.
_OF_ENCODERS = ("sample", "sort", "top", "item", "length", "over_ranks", "previous_state")

# Operators that are neither collective nor arithmetic: the parts of a list.
_LISTS = ("value", "index")


def verify(program: Program) -> None:
    """Check a program.

    Raises:
        TraceError: The program is invalid. The message has the line of the algorithm.
    """
    for node in (*program.encode_nodes(), *program.decode_nodes()):
        assert all(each.number < node.number for each in node.inputs), f"{node!r} is older than its inputs"
    _verify_encode(program)
    _verify_lists(program)
    _verify_coding(program)
    _verify_blocks(program)
    _verify_decode(program)
    for each in program.fields:
        assert each.is_array or each.node.op == "narrow", f"{each.name} enters the payload without being rounded"


def _verify_encode(program: Program) -> None:
    nodes, place = program.encode_nodes(), program.fields[-1].node.where
    for node in nodes:
        if node.op == "extract":
            raise TraceError(
                "encode cannot read a field of the payload", node.where, "use the gradient and the options"
            )
        if node.op == "scatter":
            raise TraceError("encode cannot use scatter", node.where, "send index and value, and scatter in decode")
        if node.op == "over_ranks" and any(each.op == "over_ranks" for each in closure(list(node.inputs))):
            raise TraceError(
                "over_ranks cannot depend on another over_ranks: all statistics are exchanged in one round", node.where,
                "reduce something else over ranks, or compute from both afterwards",
            )  # fmt: skip
    if all(node.op != "gradient" for node in nodes):
        raise TraceError("Nothing that encode sends depends on the gradient", place, "use the argument of encode")
    spaces = {each.node.space for each in program.fields if each.node.space.kind == "items"}
    if len(spaces) > 1 or sum(each.is_positions for each in program.fields) > 1:
        raise TraceError(
            "A payload cannot hold lists of different lengths", place, "send the index and value of one filter"
        )


def _verify_lists(program: Program) -> None:
    for node in program.encode_nodes():
        for each in node.inputs:
            mapped = each.space.kind == "items" and each.op not in _LISTS and not lookup(each.op).is_collective
            if mapped and isinstance(lookup(node.op), Statement):
                raise TraceError(
                    f"Cannot {node.op} a map of a list: it is not in memory", node.where,
                    "map the gradient, before sample or filter",
                )  # fmt: skip


def _verify_coding(program: Program) -> None:
    """At most one field is shortened, and no other length is unknown to the receiver."""
    for node in program.encode_nodes():
        for each in node.inputs:
            if isinstance(lookup(each.op), Coding):
                raise TraceError(
                    f"Cannot {node.op} the result of {each.op}: it is bytes of the payload", node.where,
                    f"compute first, and pass the result to concat: concat(q=q.{each.op}())",
                )  # fmt: skip
    coded = {each.name: each.coding for each in program.fields if each.coding is not None}
    for coding in coded.values():
        if len(coded) > 1:
            raise TraceError(
                f"Cannot send {' and '.join(coded)} with {coding.op}: their ends would be unknown", coding.where,
                f"use {coding.op} for one of them",
            )  # fmt: skip
        if program.items is not None:
            raise TraceError(
                f"Cannot send {coding.op} together with lists: their ends would be unknown", coding.where,
                "send either trits of all elements or the lists",
            )  # fmt: skip


def _verify_blocks(program: Program) -> None:
    nodes = program.encode_nodes()
    sizes = {node.space.block: node for node in nodes if node.space.kind == "blocks"}
    if len(sizes) > 1:
        raise TraceError(
            f"Expected one block size, got {sorted(sizes)}", list(sizes.values())[-1].where,
            "use one size in an algorithm",
        )  # fmt: skip
    for node in nodes:
        if isinstance(lookup(node.op), Sink) and any(
            each.space.kind == "blocks" for each in closure(list(node.inputs))
        ):
            raise TraceError(
                f"Cannot {node.op} what depends on blocks: their values are known only while packing", node.where,
                f"{node.op} what depends on the gradient and on scalars only",
            )  # fmt: skip


def _verify_decode(program: Program) -> None:
    _verify_reads(program)
    for node in program.decode_nodes():
        if isinstance(lookup(node.op), (Sink, Coding)) or node.op in _OF_ENCODERS:
            raise TraceError(
                f"decode computes element by element and cannot use {node.op}", node.where,
                "do that in encode, and send the result in concat",
            )  # fmt: skip
        if node.op == "random" and not node.attrs["shared"]:
            raise TraceError(
                "decode must give the same result on every rank and cannot use private random numbers", node.where,
                "use random(low, high, shared=True)",
            )  # fmt: skip
        if any(each.op == "scatter" for each in node.inputs):
            raise TraceError(
                f"scatter must be the last step of decode, but {node.op} follows", node.where,
                "compute with the list and scatter the result",
            )  # fmt: skip
    output = program.output
    if output.op == "scatter" and not _is_positions(program, output.inputs[1]):
        raise TraceError(
            "scatter needs the positions of a list as they were sent", output.where,
            "use p.value.scatter(p.index), with index=kept.index in concat",
        )  # fmt: skip
    if output.space.kind != "elements" or output.dtype == BOOL:
        got = "conditions" if output.dtype == BOOL else f"{output.dtype} of {output.space}"
        raise TraceError(
            f"decode must return one number per element, got {got}", output.where,
            "map a packed field, scatter a list, or use where",
        )  # fmt: skip


def _is_positions(program: Program, node: Node) -> bool:
    return node.op == "extract" and program.field_of(node).is_positions


def _verify_reads(program: Program) -> None:
    """A decoder knows only the payload."""
    for node in program.decode_nodes():
        if node.op == "gradient":
            reader = _reader(program, node)
            raise TraceError(
                "decode cannot read the gradient of encode", reader.where,
                "send what decode needs in concat, and read it from the payload",
            )  # fmt: skip


def _reader(program: Program, gradient: Node) -> Node:
    """The node of the decoder that reads the gradient: the first that the decoder itself created."""
    last = max(node.number for node in program.encode_nodes())
    readers = [node for node in program.decode_nodes() if gradient in closure([node])]
    return next((node for node in readers if node.number > last), readers[-1])
