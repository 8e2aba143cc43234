"""The plan: compressor, strategy and partition count of each tensor.

Rules are shell patterns of parameter names. The first rule that matches a name counts. Under the blanket rule ``*``,
vectors and small tensors stay dense: they have few bytes, and compression hurts biases and normalization most. A
sparsifier that keeps a thousandth has nothing to choose from in a tensor of two thousand elements. All other rules
apply to tensors of every size.

A rule that applies to no tensor is not an error, so that different models can share rules. The plan mentions it in its
`notes`, which are logged and part of every report.

Differences: Deep Gradient Compression (Lin et al. 2018) says nothing of small tensors, and implementations sparsify
every matrix, of which they keep at least one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.compressors.base.registry import DENSE_NAME, compressor_of, make, spec_of
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError, nearest
from gradwire.core.spec import TensorSpec
from gradwire.residuals import policies
from gradwire.sync.fusion import can_be_fused
from gradwire.sync.plan_entry import MAX_PARTITIONS, PlanEntry, is_small, min_elements_of
from gradwire.sync.strategies import STRATEGIES

Method = str | Compressor
AUTO = "auto"
ENCODED_ONCE = ("allgather", "sparse_reduce")  # strategies that encode no sum again
WHOLE_ELEMENTS = 1 << 17  # half a megabyte: above this, encoding a tensor takes longer than sending a frame


class Plan:
    """Plan entries by parameter name.

    Under ``"auto"``, `gradwire.attach` chooses compressor, strategy and partitions while the model trains. Of feedback,
    it takes momentum correction, which then applies to all tensors.

    Args:
        rules: One method for all tensors, or a mapping from name patterns to methods. A method is a compressor, its
            name as `gradwire.make` takes it, with options as in ``"topk:ratio=0.01"``, or ``"auto"``.
        strategy: How tensors travel: ``"scatter_reduce"``, ``"ring"``, ``"allgather"``, ``"sparse_reduce"`` (an
            exact sum, for compressors that list positions and values), ``"hierarchical"`` (dense within nodes,
            compressed between them) or ``"server"`` (an aggregator, for ``"thc"`` and ``"uthc"``). None means the ring,
            which fills each link, for tensors that travel without loss by choice, and scatter-reduce for all others.
            Under ``"server"`` and ``"sparse_reduce"``, dense tensors travel as under None.
        partitions: Number of ranges that each tensor is cut into, from 1 to 65,536. Owners of ranges rotate from tensor
            to tensor. Compressed tensors with one range share messages, except on a ring and between nodes. There, None
            means one range for tensors of up to 131,072 elements, and for those that are never cut. For all others, it
            means one range per rank for every 16 million elements, so that several threads can work on a large tensor.
        min_elements: Size below which tensors stay dense under the blanket rule. Vectors always do. None means 1,024
            elements, or 16 / `ratio` for sparsifiers that keep a `ratio`, if that is more.
        feedback: Residual policy of all compressors: ``"error"``, ``"none"``, ``"momentum"`` or a `MomentumCorrection`.
            None means the default of each compressor. Momentum correction applies to dense tensors too, and compressed
            tensors then travel by all-gather, or by sparse-reduce if asked for.

    Raises:
        UnknownNameError: A compressor, strategy or feedback does not exist.
        OptionTypeError: The rules have a wrong type, or an option of a compressor was passed as an argument.
        OptionError: A number is out of range, there are no rules, a strategy cannot carry a compressor or momentum
            correction, or ``"auto"`` was combined with what it chooses.
    """

    @names_unknown_arguments
    def __init__(
        self,
        rules: Method | Mapping[str, Method],
        *,
        strategy: str | None = None,
        partitions: int | None = None,
        min_elements: int | None = None,
        feedback: str | policies.Policy | None = None,
    ) -> None:
        if strategy is not None and strategy not in STRATEGIES:
            raise UnknownNameError("strategy", strategy, STRATEGIES)
        policy = None if feedback is None else policies.get(str(feedback))
        self.has_velocity = policy is not None and policy.has_velocity
        if self.has_velocity and strategy not in (None, *ENCODED_ONCE):
            raise _needs_allgather(strategy)
        if partitions is not None and not 1 <= partitions <= MAX_PARTITIONS:
            raise OptionError(
                f"partitions must be at least 1 and at most {MAX_PARTITIONS:,}, but it is {partitions}. "
                "Pass 1 to leave tensors whole."
            )
        if min_elements is not None and min_elements < 0:
            raise OptionError(f"min_elements must not be negative, but it is {min_elements}. Pass 0 to compress all.")
        if isinstance(rules, Mapping) and not rules:
            raise OptionError('The plan has no rules. Pass for example {"*": "threelc"}.')
        named = rules if isinstance(rules, Mapping) else {"*": rules}
        for pattern in named:
            if not isinstance(pattern, str):
                raise OptionTypeError(
                    f'The key of a rule is a pattern of parameter names like "*.bias", not {pattern!r}.'
                )
        self.rules: dict[str, Compressor | str] = {
            pattern: AUTO if method == AUTO else compressor_of(method) for pattern, method in named.items()
        }
        self.is_auto = AUTO in self.rules.values()
        is_chosen = feedback is not None and not self.has_velocity
        if self.is_auto and (strategy is not None or partitions is not None or is_chosen):
            raise OptionError(
                f'"auto" chooses strategy, partitions and feedback itself, but they are {strategy!r}, {partitions} '
                f"and {feedback!r}. Leave them out, or name a compressor. Of feedback, it takes momentum correction."
            )
        for pattern, compressor in self.rules.items():
            # Exact ones travel by a strategy that carries them.
            if strategy is not None and isinstance(compressor, Compressor) and not compressor.exact:
                STRATEGIES[strategy].check(compressor, pattern)
        self.strategy = strategy
        self.partitions = partitions
        self.min_elements = min_elements
        self.feedback = None if policy is None else str(policy)
        self.entries: dict[str, PlanEntry] | None = None
        self.otherwise: Plan | None = None

    @classmethod
    def of_entries(cls, entries: Mapping[str, PlanEntry], otherwise: Plan | None = None) -> Plan:
        """Create a plan from an entry for each tensor, without patterns and without a rule for small tensors.

        Args:
            entries: Entries by name.
            otherwise: Plan of other tensors, which come later. None means that they are an error.

        Raises:
            UnknownNameError: A strategy or feedback does not exist.
            OptionError: There are no entries, a number of partitions is out of range, or an entry is batched that
                cannot be.
        """
        for name, entry in entries.items():
            if entry.strategy not in STRATEGIES:
                raise UnknownNameError(f"strategy of {name!r}", entry.strategy, STRATEGIES)
            STRATEGIES[entry.strategy].check(entry.compressor, name)
            has_velocity = policies.get(entry.feedback).has_velocity
            if has_velocity and not entry.compressor.exact and entry.strategy not in ENCODED_ONCE:
                raise _needs_allgather(entry.strategy)
            # A batch has no residuals, and its compressor sees elements of many tensors.
            may_be_batched = entry.feedback == "none" and entry.compressor.elementwise
            may_be_cut = entry.partitions is None or 1 <= entry.partitions <= MAX_PARTITIONS
            if not may_be_cut or (entry.batched and not may_be_batched):
                raise OptionError(
                    f"The plan has {entry} for {name!r}. Partitions must be at least 1 and at most {MAX_PARTITIONS:,}, "
                    "and batched entries must have none, fp16 or bf16 without feedback. Create the plan again, or "
                    "correct its file."
                )
        if not entries:
            raise OptionError("The plan has no entries. Create it again for this model.")
        plan = cls(DENSE_NAME)
        plan.entries, plan.otherwise = dict(entries), otherwise
        plan.has_velocity = any(policies.get(entry.feedback).has_velocity for entry in entries.values())
        return plan

    def __str__(self) -> str:
        if self.entries is not None:
            specs = sorted({spec_of(entry.compressor) for entry in self.entries.values()})
            return f"a plan of {len(self.entries)} tensors by {', '.join(specs)}"
        named = {pattern: rule if isinstance(rule, str) else spec_of(rule) for pattern, rule in self.rules.items()}
        if list(named) == ["*"]:
            return named["*"]
        return ", ".join(f"{pattern}: {method}" for pattern, method in named.items())

    def check_world_size(self, world_size: int) -> None:
        """Raise `OptionError` with momentum correction and one rank, which would train without momentum."""
        if self.has_velocity and world_size == 1:
            raise OptionError(
                "Momentum correction needs at least two ranks, but this group has one. Keep the momentum in the "
                "optimizer, and leave feedback out."
            )

    def without_auto(self) -> Plan:
        """Return the plan with dense tensors where the rule is ``"auto"``."""
        if not self.is_auto:
            return self
        rules = {pattern: DENSE_NAME if isinstance(rule, str) else rule for pattern, rule in self.rules.items()}
        return Plan(rules, min_elements=self.min_elements, feedback=self.feedback)

    def given_entries(self, specs: Mapping[str, TensorSpec]) -> dict[str, PlanEntry]:
        """Return the entries of the tensors whose rule is not ``"auto"``."""
        return {
            name: self.entry(name, spec)
            for name, spec in specs.items()
            if self.entries is not None or not isinstance(self._match(name)[1], str)
        }

    def entry(self, name: str, spec: TensorSpec) -> PlanEntry:
        """The plan entry of one tensor.

        Raises:
            OptionError: No rule matches, a plan of entries lacks the name, or the rule is ``"auto"``.
        """
        if self.entries is not None:
            if name not in self.entries:
                if self.otherwise is not None:
                    return self.otherwise.entry(name, spec)
                raise OptionError(
                    f"The plan has no entry for {name!r} among its {len(self.entries)}. Create it again for this model."
                )
            return self.entries[name]
        pattern, compressor = self._match(name)
        if isinstance(compressor, str):
            raise OptionError(
                'A rule "auto" has no entries of its own: gradwire.attach chooses them while a DDP module trains. '
                "Name a compressor here."
            )
        small = is_small(spec.shape, self._min_elements(compressor))
        # Dense by choice: the ring fills each link. Dense because they are small: latency counts.
        usual = "ring" if compressor.dense or (compressor.exact and not small) else "scatter_reduce"
        # Sums of payloads are float32, so that exact ones would not be exact.
        if (small and pattern == "*") or (compressor.exact and spec.dtype == torch.float64):
            compressor = make(DENSE_NAME)
        feedback = self.feedback or compressor.default_feedback
        if self.has_velocity:
            strategy = ("scatter_reduce" if small else "ring") if compressor.exact else self.strategy or "allgather"
            return self._cut(PlanEntry(compressor, strategy, self.partitions, feedback), spec.numel)
        batched = compressor.dense or (small and compressor.exact and compressor.elementwise)
        given = self.strategy
        if given is not None and compressor.exact and not STRATEGIES[given].carries(compressor):
            given = None
        entry = PlanEntry(
            compressor,
            given or usual,
            self.partitions,
            feedback="none" if compressor.exact else feedback,
            batched=batched,
        )
        return self._cut(entry, spec.numel)

    def _min_elements(self, compressor: Compressor) -> int:
        return min_elements_of(compressor) if self.min_elements is None else self.min_elements

    def _cut(self, entry: PlanEntry, numel: int) -> PlanEntry:
        """Return the entry with one range, if none were asked for, and a small or uncut tensor can be fused."""
        is_whole = numel <= WHOLE_ELEMENTS or entry.compressor.requires_full_tensor
        return replace(entry, partitions=1) if self.partitions is None and is_whole and can_be_fused(entry) else entry

    def notes(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Sentences about what a user may not expect of this plan with these tensors, with advice."""
        if self.entries is not None or not specs:
            return []
        if self.is_auto:  # its tensors are dense until it has chosen
            return self.without_auto().notes(specs)
        matched = {name: self._match(name)[0] for name in specs}
        unused = [pattern for pattern in self.rules if pattern != "*" and pattern not in matched.values()]
        found = [_unused_note(pattern, specs, matched) for pattern in unused]
        given = self.rules.get("*")
        if (
            isinstance(given, Compressor)
            and given.name != DENSE_NAME
            and all(self.entry(name, spec).compressor.name == "none" for name, spec in specs.items())
        ):
            largest = max(specs, key=lambda name: (len(specs[name].shape) > 1, specs[name].numel))
            limit = self._min_elements(given)
            found.append(
                f"{given.name} compresses nothing: all {len(specs)} tensors are vectors or smaller than "
                f"min_elements={limit:,}. The largest, {largest!r}, has {specs[largest].numel:,} elements. "
                "Pass min_elements=0 to compress all but vectors, or name the tensors: "
                f'{{"{largest}": "{given.name}", "*": "none"}}.'
            )
        return found

    def _match(self, name: str) -> tuple[str, Compressor | str]:
        for pattern, rule in self.rules.items():
            if _matches(name, pattern):
                return pattern, rule
        raise OptionError(
            f'No rule matches {name!r}: {", ".join(self.rules)}. Add a rule "*", for example {{"*": "none"}}.'
        )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # names may have brackets


def _unused_note(pattern: str, specs: Mapping[str, TensorSpec], matched: Mapping[str, str]) -> str:
    """Why a rule applies to no tensor. `matched` is the rule of each tensor."""
    earlier = sorted({matched[name] for name in specs if _matches(name, pattern)})
    if earlier:
        return f"The rule {pattern!r} has no effect: earlier rules match all its tensors ({', '.join(earlier)})."
    prefixes = {".".join(name.split(".")[:depth]) + ".*" for name in specs for depth in range(1, name.count(".") + 1)}
    close = nearest(pattern, [*specs, *prefixes, *(f"*.{name.split('.')[-1]}" for name in specs)])
    hint = f" Did you mean {close!r}?" if close else ""
    return f"The rule {pattern!r} matches no parameter.{hint} A name of this model is {next(iter(specs))!r}."


def _needs_allgather(strategy: str | None) -> OptionError:
    return OptionError(
        f"Momentum correction needs all-gather or sparse-reduce, but the strategy is {strategy!r}. Where sums are "
        "encoded again, no rank knows what was sent of its own gradient. Leave strategy out, or pass "
        'strategy="allgather" or "sparse_reduce".'
    )
