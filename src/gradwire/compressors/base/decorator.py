"""The decorator that makes a compressor of two functions in the language.

    @compressor(feedback="none", unbiased=True)
    def minmax(g, bits: int = 2): ...

    @minmax.decode
    def _(p): ...

    codec = minmax(bits=4)          # or gradwire.make("minmax", bits=4), or the name in gradwire.attach

Source: HiPress (Bai et al. 2021), section 4.3: an algorithm in the language needs no line of integration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args, overload

from gradwire.compressors.base import FeedbackName
from gradwire.compressors.base import options as checks
from gradwire.compressors.base.registry import register
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.lang.errors import TraceError
from gradwire.lang.ir import Program
from gradwire.lang.trace import signature_line, trace

Bound = Callable[..., float | None]
Feedback = FeedbackName | Callable[..., FeedbackName]
Remember = Callable[..., float]
FEEDBACKS: tuple[FeedbackName, ...] = get_args(FeedbackName)


class Algorithm:
    """What `compressor` makes of a function: call it with options for a compressor of the whole contract."""

    def __init__(
        self, encode: Callable[..., Any], name: str, feedback: Feedback, unbiased: bool | Callable[..., bool],
        contraction: Bound | None, variance: Bound | None, votes: bool, remember: Remember | None,
    ) -> None:  # fmt: skip
        self.votes, self.remember = votes, remember
        self.encode_function, self.name = encode, name
        self.feedback, self.unbiased, self.contraction, self.variance = feedback, unbiased, contraction, variance
        self.doc = inspect.getdoc(encode) or ""
        parameters = list(inspect.signature(encode).parameters.values())
        for parameter in parameters[1:]:
            if parameter.default is parameter.empty:
                raise TraceError(
                    f"Expected a default for every option, got none for {parameter.name!r}", signature_line(encode),
                    "give it one, so that the name alone makes a compressor",
                )  # fmt: skip
        self.defaults = {parameter.name: parameter.default for parameter in parameters[1:]}
        self._signature = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters[1:]])
        self._check()
        self._class: type[TracedCompressor] | None = None
        self._decode_function: Callable[..., Any] | None = None
        self._programs: dict[tuple[Any, ...], Program] = {}

    def _check(self) -> None:
        """Refuse what the decorator cannot mean, while the line that says it is on the stack."""
        self.feedback_of(self.defaults)
        self.is_unbiased(self.defaults)
        checks.flag("votes", self.votes)
        arguments = {"contraction": ("size",), "variance": ("size",), "remember": ("body", "size", "step")}
        for option, given in arguments.items():
            function = getattr(self, option)
            if function is not None:
                self._check_call(option, function, given)
        if self.variance is not None and self.unbiased is False:
            raise OptionError(
                f"The variance of {self.name!r} would never be asked for, because it is declared biased. Pass "
                "unbiased=True, or leave variance out."
            )

    def _check_call(self, option: str, function: object, given: tuple[str, ...]) -> None:
        """Refuse what cannot be called with these arguments and the compressor's options."""
        if not callable(function):
            takes = ", ".join([*given, *self.defaults])
            raise OptionTypeError(f"{option} of {self.name!r} must be a function of {takes}, not {function!r}.")
        try:
            signature = inspect.signature(function)
        except ValueError:  # a built-in function that has none
            return
        try:
            signature.bind(*given, **self.defaults)
        except TypeError as error:
            options = "".join(f", {name}={value!r}" for name, value in self.defaults.items())
            raise OptionTypeError(
                f"{option} of {self.name!r} is called as {option}({', '.join(given)}{options}), but {error}. Give it "
                "these parameters, or **_ for the options that it does not need."
            ) from None

    def feedback_of(self, options: dict[str, Any]) -> FeedbackName:
        """Whether there are residuals with these options.

        Raises:
            UnknownNameError: the algorithm declares something else.
        """
        found: FeedbackName = self._declared("feedback", options)
        if found not in FEEDBACKS:
            raise UnknownNameError(f"feedback of {self.name}", found, FEEDBACKS)
        return found

    def is_unbiased(self, options: dict[str, Any]) -> bool:
        """Whether the mean of what is decoded is the gradient, with these options.

        Raises:
            OptionTypeError: the algorithm declares something else.
        """
        return checks.flag(f"unbiased of {self.name}", self._declared("unbiased", options))

    def _declared(self, option: str, options: dict[str, Any]) -> Any:
        """What the algorithm declares, itself or by a function of its options."""
        declared = getattr(self, option)
        if not callable(declared):
            return declared
        self._check_call(option, declared, ())
        return declared(**options)

    def decode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator of the decoder; registers the compressor.

        Raises:
            TraceError: encoder or decoder cannot be traced.
        """
        self._decode_function, self._programs = function, {}
        self.trace(self.defaults)
        made = type(
            self.name,
            (TracedCompressor,),
            {
                "name": self.name, "algorithm": self, "__doc__": self.doc or self.name,
                "__module__": self.encode_function.__module__, "__qualname__": self.encode_function.__qualname__,
                "__signature__": self._signature,
            },
        )  # fmt: skip
        self._class = register(made)
        return function

    def __call__(self, **options: Any) -> TracedCompressor:
        if self._class is None:
            raise TraceError(
                f"Expected a decoder for {self.name!r}, got none yet", signature_line(self.encode_function),
                f"decorate one with @{self.name}.decode",
            )  # fmt: skip
        return self._class(**options)

    def trace(self, options: dict[str, Any]) -> Program:
        """The program with these options."""
        assert self._decode_function is not None
        key = tuple(sorted(options.items()))
        if key not in self._programs:
            first_line = self.doc.split("\n")[0]
            self._programs[key] = trace(self.name, self.encode_function, self._decode_function, options, first_line)
        return self._programs[key]


@overload
def compressor(name: Callable[..., Any], /) -> Algorithm: ...


@overload
def compressor(
    name: str | None = None,
    *,
    feedback: Feedback = "error",
    unbiased: bool | Callable[..., bool] = False,
    contraction: Bound | None = None,
    variance: Bound | None = None,
    votes: bool = False,
    remember: Remember | None = None,
) -> Callable[[Callable[..., Any]], Algorithm]: ...


def compressor(
    name: str | Callable[..., Any] | None = None,
    *,
    feedback: Feedback = "error",
    unbiased: bool | Callable[..., bool] = False,
    contraction: Bound | None = None,
    variance: Bound | None = None,
    votes: bool = False,
    remember: Remember | None = None,
    **unknown: object,
) -> Any:
    """Decorator: make a compressor of an encoder written in the language, and of the decoder that follows.

    Args:
        name: for `gradwire.make` and `gradwire.attach`; the function's own where not given.
        feedback: ``"error"`` for error feedback, which biased algorithms need; ``"none"`` for unbiased ones; or a
            function of the options by name that says which.
        unbiased: whether the mean of what is decoded, over the random numbers, is the gradient; or a function of the
            options by name that says so.
        contraction: δ of ‖g − decode(encode(g))‖² ≤ (1 − δ)‖g‖², a function of the number of elements and of the
            options by name; or None. It may give None for options with which there is no such δ.
        variance: ω of E‖g − decode(encode(g))‖² ≤ ω‖g‖², likewise, where unbiased; see `Compressor.variance`.
        votes: see `Compressor`.
        remember: of the body, the number of elements, the step and the options by name: what `remembered` gives in the
            next step.

    Returns:
        An `Algorithm`, which is complete once its `decode` has decorated a second function.

    Raises:
        UnknownNameError: an option that there is not, or a feedback that there is not.
        OptionTypeError: an option of the wrong type, or a function that cannot be called with the options.
        OptionError: a variance of a biased algorithm.
    """
    if unknown:
        known = [*inspect.signature(compressor).parameters][:-1]
        raise UnknownNameError("option of gradwire.compressor", next(iter(unknown)), known)
    if not (name is None or callable(name) or isinstance(name, str)):
        raise OptionTypeError(
            f'The name of a compressor is a string, not {name!r}. Write @gradwire.compressor("name").'
        )

    def wrap(encode: Callable[..., Any]) -> Algorithm:
        chosen = name if isinstance(name, str) else encode.__name__
        return Algorithm(encode, chosen, feedback, unbiased, contraction, variance, votes, remember)

    return wrap(name) if callable(name) else wrap
