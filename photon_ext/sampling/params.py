"""What a caller may ask of one request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from photon_ext.errors import ConfigError, shown, surrogate_in
from photon_ext.runtime.admission import MAX_TEMPERATURE, MIN_TEMPERATURE
from photon_ext.sampling.constraints import Constraint, constraint_fault
from photon_ext.sampling.stop_automaton import StopAutomaton

MAX_SEED = 2**64 - 1
MAX_STOP_CHARACTERS = 2**14  # of all stop strings of a request: an automaton of 4 MB, made in 30 ms


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; checked when made, so that a bad value fails before
    anything is queued.

    Attributes:
        max_new_tokens: most tokens to generate, >= 1. The engine caps it at what the context leaves
            after the prompt.
        temperature: 0 is greedy (ties go to the lowest id); otherwise 0.001 .. 10000, sampled by
            the Gumbel-max method.
        seed: 0 .. 2**64 - 1; the noise of a request depends on its seed, position and token id
            alone. None: a new seed each time.
        stop_token_ids: ids that end the request, beside the model's own end tokens. They stay in
            token_ids and out of the text. An engine takes `max_stop_ids` of both together.
        stop: a string or several that end the request, up to 16384 characters in all; the text is
            cut before the first one to be complete. Needs a tokenizer.
        ignore_eos: go on after the model's end tokens (stop_token_ids still stop).
        constraint: asked by the host for the allowed tokens before each sampling; see
            sampling.constraints.

    Raises:
        ConfigError: (a ValueError) names the parameter, its value and what is allowed.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "stop",
            (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop),
        )
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        _check_max_new_tokens(self.max_new_tokens)
        _check_temperature(self.temperature)
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise ConfigError(
                f"seed is {shown(self.seed)}; give an integer from 0 to 2**64 - 1, or None for a "
                "new one each time"
            )
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ConfigError(
                    f"stop_token_ids holds {shown(token)}; give token ids of the model's "
                    "vocabulary, integers >= 0"
                )
        _check_stop(self.stop)
        fault = None if self.constraint is None else constraint_fault(self.constraint)
        if fault is not None:
            raise ConfigError(f"constraint is a {type(self.constraint).__name__}; {fault}")

    @cached_property
    def stop_automaton(self) -> StopAutomaton | None:
        """What finds the stop strings in a text, for all requests with these parameters; None
        where there are none.
        """
        return StopAutomaton(self.stop) if self.stop else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise ConfigError(f"{name} is {shown(value)}; give a list or a tuple")
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} is {shown(value)}; give a list or a tuple") from None


def _check_stop(stop: tuple[object, ...]) -> None:
    characters = 0
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop holds {shown(text)}; give non-empty strings")
        surrogate = surrogate_in(text)
        if surrogate is not None:
            raise ConfigError(f"stop holds {shown(text)} with {surrogate}; give valid Unicode text")
        characters += len(text)
    if characters > MAX_STOP_CHARACTERS:
        raise ConfigError(
            f"stop holds {len(stop)} strings of {characters} characters in all; give at most "
            f"{MAX_STOP_CHARACTERS}"
        )


def _check_max_new_tokens(value: object) -> None:
    if not _is_int(value) or value < 1:  # type: ignore[operator]
        raise ConfigError(f"max_new_tokens is {shown(value)}; give an integer >= 1")


def _check_temperature(value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):  # type: ignore[operator]
        raise ConfigError(
            f"temperature is {shown(value)}; give 0 for greedy decoding, or a number from "
            f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
        )
