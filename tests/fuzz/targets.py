"""All targets of the fuzz campaign."""

from __future__ import annotations

from gradwire.compressors.base import registry
from tests.fuzz.aggregation import aggregation_targets
from tests.fuzz.decoders import DecoderTarget, DerivedLevelsTarget, PackedFloatsTarget
from tests.fuzz.parameters import ServerTarget, UpdateTarget, words_target
from tests.fuzz.target import Target
from tests.fuzz.wire import CodeTarget, FrameTarget, HandshakeTarget, PairListTarget, StreamTarget, TaggedStreamTarget


def targets() -> dict[str, Target]:
    """All targets by name: the readers of the wire, and the decoder of every registered compressor with its defaults.

    Zero runs of the language, which no default has, have a decoder target of their own.
    """
    made: list[Target] = [FrameTarget(), StreamTarget(), HandshakeTarget(), DecoderTarget("ternary", zero_run=True)]
    made += [
        TaggedStreamTarget(),
        CodeTarget(),
        PairListTarget(),
        PackedFloatsTarget("lossless"),
        PackedFloatsTarget("lossless", code="fixed"),
        DerivedLevelsTarget(),
        words_target(),
        ServerTarget(),
        UpdateTarget(),
    ]
    made += aggregation_targets()
    for name in registry.names():
        made.append(DecoderTarget(name))
        if registry.make(name).needs_stats:
            made.append(DecoderTarget(name, shared=True))
    return {target.name: target for target in made}
