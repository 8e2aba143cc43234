"""What the decorator `compressor` knows of an algorithm: two functions in the language, and what they declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from gradwire.compressors.base import options as checks
from gradwire.compressors.base.contract import FeedbackName
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.lang.errors import TraceError
from gradwire.lang.ir import Program
from gradwire.lang.trace import signature_line, trace

Bound = Callable[..., float | None]
Feedback = FeedbackName | Callable[..., FeedbackName]
NextState = Callable[..., np.ndarray | float | None]
FEEDBACKS: tuple[FeedbackName, ...] = get_args(FeedbackName)
_ARGUMENTS = {"contraction": ("size",), "variance": ("size",), "next_state": ("body", "size", "step")}


@dataclass(frozen=True)
class Declarations:
    """Declared properties of an algorithm; see `compressor`."""

    feedback: Feedback = "error"
    unbiased: bool | Callable[..., bool] = False
    contraction: Bound | None = None
    variance: Bound | None = None
    encode_own_before_merge: bool = False
    next_state: NextState | None = None


@dataclass
class Definition:
    """An encoder and a decoder in the language.

    Attributes:
        name: Name of the compressor.
        encoder: Function of a symbolic gradient and options.
        declared: Declared properties.
        decoder: Function of a symbolic payload; None before it is known.
    """

    name: str
    encoder: Callable[..., Any]
    declared: Declarations
    decoder: Callable[..., Any] | None = None
    _programs: dict[tuple[Any, ...], Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.doc = inspect.getdoc(self.encoder) or ""
        self.parameters = list(inspect.signature(self.encoder).parameters.values())[1:]
        for parameter in self.parameters:
            if parameter.default is parameter.empty:
                raise TraceError(
                    f"The option {parameter.name!r} has no default", signature_line(self.encoder),
                    "give it one, so that the name alone makes a compressor",
                )  # fmt: skip
        self.defaults = {parameter.name: parameter.default for parameter in self.parameters}
        self._check()

    def _check(self) -> None:
        """Refuse wrong declarations while the line that makes them is on the stack."""
        self.feedback_of(self.defaults)
        self.is_unbiased(self.defaults)
        checks.flag("encode_own_before_merge", self.declared.encode_own_before_merge)
        for option, given in _ARGUMENTS.items():
            function = getattr(self.declared, option)
            if function is not None:
                self._check_call(option, function, given)
        if self.declared.variance is not None and self.declared.unbiased is False:
            raise OptionError(
                f"The variance of {self.name!r} would never be asked for, because it is declared biased. Pass "
                "unbiased=True, or leave variance out."
            )

    def _check_call(self, option: str, function: object, given: tuple[str, ...]) -> None:
        """Refuse a function that cannot be called with these arguments and the compressor's options."""
        if not callable(function):
            takes = ", ".join([*given, *self.defaults])
            raise OptionTypeError(f"{option} of {self.name!r} must be a function of {takes}, not {function!r}.")
        try:
            signature = inspect.signature(function)
        except ValueError:  # a built-in function without one
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
        """Residual policy with these options.

        Raises:
            UnknownNameError: There is no policy of that name.
        """
        found: FeedbackName = self._declared("feedback", options)
        if found not in FEEDBACKS:
            raise UnknownNameError(f"feedback of {self.name}", found, FEEDBACKS)
        return found

    def is_unbiased(self, options: dict[str, Any]) -> bool:
        """Whether the compressor is unbiased with these options.

        Raises:
            OptionTypeError: The declared value is not a bool.
        """
        return checks.flag(f"unbiased of {self.name}", self._declared("unbiased", options))

    def _declared(self, option: str, options: dict[str, Any]) -> Any:
        """A declared value, or what a declared function returns for these options."""
        declared = getattr(self.declared, option)
        if not callable(declared):
            return declared
        self._check_call(option, declared, ())
        return declared(**options)

    def trace(self, options: dict[str, Any]) -> Program:
        """Program with these options."""
        assert self.decoder is not None
        key = tuple(sorted(options.items()))
        if key not in self._programs:
            first_line = self.doc.split("\n")[0]
            self._programs[key] = trace(self.name, self.encoder, self.decoder, options, first_line)
        return self._programs[key]
