"""The decorator that makes a compressor from two functions in the language.

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
from dataclasses import fields
from typing import Any, overload

from gradwire.compressors.base.definition import Bound, Declarations, Definition, Feedback, NextState
from gradwire.compressors.base.registry import register
from gradwire.compressors.base.traced import StatefulTracedCompressor, TracedCompressor
from gradwire.core.errors import OptionTypeError, UnknownNameError
from gradwire.lang.errors import TraceError
from gradwire.lang.trace import signature_line


class Algorithm:
    """Result of `compressor`. Call it with options to make a compressor."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.__module__ = definition.encoder.__module__
        self._class: type[TracedCompressor] | None = None

    @property
    def name(self) -> str:
        """Name of the compressor."""
        return self.definition.name

    def decode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the decoder, and register the compressor.

        Raises:
            TraceError: The encoder or the decoder cannot be traced.
        """
        definition = self.definition
        definition.decoder = function
        definition._programs.clear()
        definition.trace(definition.defaults)
        options = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in definition.parameters]
        base = TracedCompressor if definition.declared.next_state is None else StatefulTracedCompressor
        made = type(
            self.name,
            (base,),
            {
                "name": self.name, "definition": definition, "__doc__": definition.doc or self.name,
                "__module__": definition.encoder.__module__, "__qualname__": definition.encoder.__qualname__,
                "__signature__": inspect.Signature(options),
            },
        )  # fmt: skip
        self._class = register(made)
        return function

    def __call__(self, **options: Any) -> TracedCompressor:
        if self._class is None:
            raise TraceError(
                f"{self.name!r} has no decoder yet", signature_line(self.definition.encoder),
                f"decorate one with @{self.name}.decode",
            )  # fmt: skip
        return self._class(**options)


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
    encode_own_before_merge: bool = False,
    next_state: NextState | None = None,
) -> Callable[[Callable[..., Any]], Algorithm]: ...


def compressor(name: str | Callable[..., Any] | None = None, **declared: Any) -> Any:
    """Make a compressor from an encoder in the language, which this decorates, and a decoder that follows.

    Args:
        name: Name for `gradwire.make` and `gradwire.attach`; by default the function's own.
        feedback: ``"error"`` for error feedback, which biased algorithms need, or ``"none"`` for unbiased ones; or a
            function of the options by name that returns one of them.
        unbiased: Whether the expected value of the decoded gradient, over the random numbers, is the gradient; or a
            function of the options by name.
        contraction: Function of the number of elements and the options by name that returns the δ of
            ‖g − decode(encode(g))‖² ≤ (1 − δ)‖g‖², or None if there is none with these options.
        variance: Function of the same arguments that returns the ω of E‖g − decode(encode(g))‖² ≤ ω‖g‖²; see
            `Compressor.variance`.
        encode_own_before_merge: See `Compressor`.
        next_state: Function of the body, the number of elements, the step and the options by name that returns one
            finite number, or an array with one, which `previous_state()` has in the next step as float32; None to
            keep the present one.

    Returns:
        An `Algorithm`, which is complete when its `decode` has decorated a second function.

    Raises:
        UnknownNameError: Unknown option, or unknown feedback.
        OptionTypeError: An option of the wrong type, or a function that cannot be called with the options.
        OptionError: A variance of a biased algorithm.
    """
    known = [each.name for each in fields(Declarations)]
    for option in declared:
        if option not in known:
            raise UnknownNameError("option of gradwire.compressor", option, ["name", *known])
    if not (name is None or callable(name) or isinstance(name, str)):
        raise OptionTypeError(
            f'The name of a compressor is a string, not {name!r}. Write @gradwire.compressor("name").'
        )

    def wrap(encode: Callable[..., Any]) -> Algorithm:
        chosen = name if isinstance(name, str) else encode.__name__
        return Algorithm(Definition(chosen, encode, Declarations(**declared)))

    return wrap(name) if callable(name) else wrap
