"""The plan: which compressor, strategy and partition count each tensor gets.

Rules are shell patterns on parameter names; the first that matches counts. A rule that names a tensor on purpose
(any pattern but ``*``) is honored for every size; under a blanket rule, vectors and small tensors stay dense,
because their bytes are few and their values (biases, normalization) are the ones that compression hurts most.

A rule that comes to nothing, because nothing has such a name or earlier rules have it all, is no error, so that models
that differ can share their rules; a plan says so in its `notes`, which are logged and stand in every report.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.compressors.base.registry import DENSE_NAME, compressor_of, make, spec_of
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError, nearest
from gradwire.core.spec import TensorSpec
from gradwire.residuals import policies
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES

Method = str | Compressor
AUTO = "auto"


class Plan:
    """Plan entries by parameter name.

    Args:
        rules: One method for all tensors (a compressor, or its name as `gradwire.make` takes it, with options as in
            ``"topk:ratio=0.01"``), a mapping from name patterns to methods, or ``"auto"``: `gradwire.attach` then
            chooses while the model trains.
        strategy: how tensors travel; None takes the ring for large dense tensors, which fills each link with one
            flow and loses nothing at its hops, and scatter-reduce for all others. Dense tensors never travel by
            ``"server"``: they take what None would.
        partitions: ranges a rank's share of a tensor is cut into.
        min_elements: under a blanket rule, tensors of fewer elements, and all vectors, stay dense.
        feedback: ``"error"``, ``"none"`` or ``"momentum"`` (a text or a `MomentumCorrection`) for all compressors; None
            leaves it to each one's default. With momentum correction all tensors have it, dense ones too, and those
            that are not dense travel by all-gather.

    Raises:
        UnknownNameError: a compressor, strategy or feedback that does not exist.
        OptionTypeError: rules that are neither; or an option of a compressor that was passed as an argument.
        OptionError: a number out of range, rules that match nothing, momentum correction by another strategy, or a
            compressor whose payloads a server cannot add.
    """

    @names_unknown_arguments
    def __init__(
        self,
        rules: Method | Mapping[str, Method],
        *,
        strategy: str | None = None,
        partitions: int = 1,
        min_elements: int = 16_384,
        feedback: str | policies.Policy | None = None,
    ) -> None:
        if strategy is not None and strategy not in STRATEGIES:
            raise UnknownNameError("strategy", strategy, STRATEGIES)
        policy = None if feedback is None else policies.get(str(feedback))
        self.has_velocity = policy is not None and policy.has_velocity
        if self.has_velocity and strategy not in (None, "allgather"):
            raise _needs_allgather(strategy)
        if partitions < 1:
            raise OptionError(f"Expected partitions of at least 1, got {partitions}. Do: pass 1 or more.")
        if min_elements < 0:
            raise OptionError(f"Expected min_elements of at least 0, got {min_elements}. Do: pass 0 to compress all.")
        if isinstance(rules, Mapping) and not rules:
            raise OptionError('Expected at least one rule, got none. Do: pass for example {"*": "threelc"}.')
        named = rules if isinstance(rules, Mapping) else {"*": rules}
        for pattern in named:
            if not isinstance(pattern, str):
                raise OptionTypeError(f'A rule goes by a pattern of parameter names, as "*.bias", not by {pattern!r}.')
        self.is_auto = rules == AUTO
        if self.is_auto:
            if strategy is not None or partitions != 1 or feedback is not None:
                raise OptionError(
                    f'"auto" chooses strategy, partitions and feedback itself, but they are {strategy!r}, {partitions} '
                    f"and {feedback!r}. Leave them out, or name a compressor."
                )
            named = {}
        self.rules = {pattern: compressor_of(method) for pattern, method in named.items()}
        for pattern, compressor in self.rules.items():
            if strategy is not None and not compressor.exact:  # exact ones take a strategy that carries them
                STRATEGIES[strategy].check(compressor, pattern)
        self.strategy = strategy
        self.partitions = partitions
        self.min_elements = min_elements
        self.feedback = None if policy is None else str(policy)
        self.entries: dict[str, PlanEntry] | None = None

    @classmethod
    def of_entries(cls, entries: Mapping[str, PlanEntry]) -> Plan:
        """A plan that names every tensor, as the planner makes it: no patterns, no rules for small ones.

        Raises:
            UnknownNameError: a strategy or feedback that does not exist.
            OptionError: no entries, partitions below 1, or a batched entry that no batch can take.
        """
        for name, entry in entries.items():
            if entry.strategy not in STRATEGIES:
                raise UnknownNameError(f"strategy of {name!r}", entry.strategy, STRATEGIES)
            STRATEGIES[entry.strategy].check(entry.compressor, name)
            has_velocity = policies.get(entry.feedback).has_velocity
            if has_velocity and not entry.compressor.exact and entry.strategy != "allgather":
                raise _needs_allgather(entry.strategy)
            if entry.partitions < 1 or (entry.batched and not _may_be_batched(entry)):
                raise OptionError(
                    "Expected partitions of at least 1, and in a batch only tensors by none, fp16 or bf16 without "
                    f"feedback, got {entry} for {name!r}. Do: plan anew, or correct the plan's file."
                )
        if not entries:
            raise OptionError("Expected an entry for every tensor, got none. Do: plan anew for this model.")
        plan = cls(DENSE_NAME)
        plan.entries = dict(entries)
        plan.has_velocity = any(policies.get(entry.feedback).has_velocity for entry in entries.values())
        return plan

    def __str__(self) -> str:
        if self.entries is not None:
            specs = sorted({spec_of(entry.compressor) for entry in self.entries.values()})
            return f"a plan of {len(self.entries)} tensors by {', '.join(specs)}"
        if self.is_auto:
            return AUTO
        if list(self.rules) == ["*"]:
            return spec_of(self.rules["*"])
        return ", ".join(f"{pattern}: {spec_of(compressor)}" for pattern, compressor in self.rules.items())

    @property
    def strategies(self) -> set[str]:
        """The strategies that the plan names."""
        if self.entries is not None:
            return {entry.strategy for entry in self.entries.values()}
        return set() if self.strategy is None else {self.strategy}

    def entry(self, name: str, spec: TensorSpec) -> PlanEntry:
        """The plan entry of one tensor.

        Raises:
            OptionError: no rule matches, a plan of entries lacks the name, or the plan is ``"auto"``.
        """
        if self.is_auto:
            raise OptionError(
                'Plan("auto") has no entries of its own: gradwire.attach chooses them while a DDP module trains. '
                "Name a compressor here."
            )
        if self.entries is not None:
            if name not in self.entries:
                raise OptionError(
                    f"Expected a plan that has every parameter, got none for {name!r} (of {len(self.entries)}). "
                    "Do: plan anew for this model."
                )
            return self.entries[name]
        pattern, compressor = self._match(name)
        small = len(spec.shape) <= 1 or spec.numel < self.min_elements
        if small and pattern == "*":
            compressor = make(DENSE_NAME)
        feedback = self.feedback or compressor.default_feedback
        if self.has_velocity:
            strategy = ("scatter_reduce" if small else "ring") if compressor.exact else "allgather"
            return PlanEntry(compressor, strategy, self.partitions, feedback)
        batched = small and compressor.exact and compressor.elementwise
        given = self.strategy
        if given is not None and compressor.exact and not STRATEGIES[given].carries(compressor):
            given = None
        return PlanEntry(
            compressor,
            given or ("ring" if compressor.exact and not batched else "scatter_reduce"),
            self.partitions,
            feedback="none" if compressor.exact else feedback,
            batched=batched,
        )

    def notes(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """What a user may not expect of this plan with these tensors, as sentences that say what to do."""
        if self.entries is not None or not specs:
            return []
        matched = {name: self._match(name)[0] for name in specs}
        idle = [pattern for pattern in self.rules if pattern != "*" and pattern not in matched.values()]
        found = [_idle_note(pattern, specs, matched) for pattern in idle]
        blanket = self.rules["*"].name if "*" in self.rules else "none"
        if blanket != "none" and all(self.entry(name, spec).compressor.name == "none" for name, spec in specs.items()):
            largest = max(specs, key=lambda name: (len(specs[name].shape) > 1, specs[name].numel))
            found.append(
                f"Nothing is compressed by {blanket}: all {len(specs)} tensors are vectors or below "
                f"min_elements={self.min_elements:,} elements; the largest is {largest!r} of {specs[largest].numel:,}. "
                "Pass min_elements=0 to compress all but vectors, or name the tensors: "
                f'{{"{largest}": "{blanket}", "*": "none"}}.'
            )
        return found

    def _match(self, name: str) -> tuple[str, Compressor]:
        for pattern, compressor in self.rules.items():
            if fnmatchcase(name, pattern):
                return pattern, compressor
        raise OptionError(
            f"Expected a rule for every parameter, got none that matches {name!r} (in {', '.join(self.rules)}). "
            'Do: add a rule "*", for example {"*": "none"}.'
        )


def _idle_note(pattern: str, specs: Mapping[str, TensorSpec], matched: Mapping[str, str]) -> str:
    """Why a rule has nothing to do, where `matched` is the rule of each tensor."""
    earlier = sorted({matched[name] for name in specs if fnmatchcase(name, pattern)})
    if earlier:
        return f"The rule {pattern!r} comes to nothing: earlier rules have all that it matches ({', '.join(earlier)})."
    prefixes = {".".join(name.split(".")[:depth]) + ".*" for name in specs for depth in range(1, name.count(".") + 1)}
    close = nearest(pattern, [*specs, *prefixes, *(f"*.{name.split('.')[-1]}" for name in specs)])
    hint = f" Did you mean {close!r}?" if close else ""
    return f"The rule {pattern!r} matches no parameter.{hint} They are named as {next(iter(specs))!r} is."


def _may_be_batched(entry: PlanEntry) -> bool:
    """A batch's compressor sees elements of many tensors, whose residuals it does not have."""
    compressor = entry.compressor
    return entry.feedback == "none" and compressor.elementwise


def _needs_allgather(strategy: str | None) -> OptionError:
    return OptionError(
        f"Expected all-gather with momentum correction, got {strategy!r}: where sums are encoded anew, no rank knows "
        'what of its own was sent. Do: leave strategy out, or pass strategy="allgather".'
    )
