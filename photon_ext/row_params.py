"""What a row is run with: one definition, from which checks, device words and flags follow.

A parameter is one field of `RowParams`, annotated with its `Field`: where the device keeps it and
what it may be. The device's side is csrc/common/row_state.h.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Annotated, Any, NamedTuple, get_type_hints

from photon_ext.checks import INT32_MAX, as_index, as_tuple
from photon_ext.errors import ConfigError, shown
from photon_ext.layout import MOST_LOGPROBS, RowColumn

# what other engines call it
SYNONYMS = {
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "random_seed": "seed",
    "stop": "stop_token_ids",
    "stop_ids": "stop_token_ids",
}
LOGPROBS_MODES = ("raw", "processed")
_SEEDS = random.Random()  # the system's own would release the interpreter for each request
os.register_at_fork(after_in_child=_SEEDS.seed)


class Field(NamedTuple):
    """How a parameter is checked and where the device keeps it.

    Attributes:
        column: its first column of row_state; None: the host or another table keeps it.
        expected: what a value has to be, as an error says it.
        least, most: bounds of a number, inclusive; `zero` is allowed besides.
        zero: 0 is allowed although it is below `least`.
        optional: None is allowed.
        help: for a command line; "": it has no flag.
    """

    column: RowColumn | None
    expected: str
    least: float = 0
    most: float = INT32_MAX
    zero: bool = False
    optional: bool = False
    help: str = ""


@dataclass(frozen=True)
class RowParams:
    """Parameters of one row, checked when made.

    Attributes:
        max_new_tokens: most tokens to sample, from 1 on.
        temperature: 0 is greedy, where ties go to the lowest id; otherwise 0.001 to 10000, sampled
            by the Gumbel-max method. Below, scaled logits would be so large that a float32 rounds
            them by more than the noise is.
        seed: 0 to 2**64 - 1. The noise depends on seed, position and token id alone. None: a new
            seed each time.
        stop_token_ids: ids that end the row when sampled; they are reported as its last token.
        constrained: each token waits for a mask from the host (`Pipeline.finalize`).
        top_k: above temperature 0, draws from the k likeliest ids, ties at the k-th included; 0:
            from all.
        top_p: draws from the fewest of the likeliest of these that have this share of their
            probability, ties included; 1: from all.
        min_p: draws from those of these that are at least this share as likely as the likeliest.
            These three have no effect at temperature 0.
        min_tokens: stop ids are not sampled before this many tokens; at most max_new_tokens.
        repetition_penalty: logits of ids in the prompt or the answer are divided by it where they
            are above 0, and multiplied by it where not; 1: off.
        presence_penalty: taken off the logits of ids in the answer.
        frequency_penalty: taken off for each time that they came.
        logit_bias: by id, what is added to logits before all that, from -100 to 100; -inf: the id
            is never sampled. Kept as (id, bias) pairs in the order of ids.
        logprobs: with each token its log-probability, and those of this many likeliest ids, up
            to 20. None: none.
        logprobs_mode: "raw": these are of the model's logits, before all that is above, but with
            the mask of a constraint; "processed": with biases, penalties and temperature, and
            without stop ids below min_tokens, but before top_k, top_p and min_p.
        prompt_logprobs: the same for each token of the prompt but the first, of the model's logits
            before it. Such a prompt is not taken from cached pages, and its steps are not captured.
        object_values: the answer is objects of this many values, of a forward that has them (see
            sampling.spatial): 2 are a point's x and y, 3 a box's, with its size; 0: it is text.

    Raises:
        ConfigError: (a ValueError) names the parameter, its value and what is allowed; or there is
            no such parameter.
    """

    max_new_tokens: Annotated[
        int,
        Field(
            RowColumn.REMAINING,
            "an integer from 1 to 2147483647",
            least=1,
            help="longest answer, in tokens",
        ),
    ] = 128
    temperature: Annotated[
        float,
        Field(
            RowColumn.TEMPERATURE,
            "0 for greedy decoding, or a number from 0.001 to 10000",
            1e-3,
            1e4,
            zero=True,
            help="0 always takes the likeliest token",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Field(
            RowColumn.SEED_LOW,
            "an integer from 0 to 2**64 - 1, or None for a new one each time",
            most=2**64 - 1,
            optional=True,
            help="repeats an answer at a temperature above 0",
        ),
    ] = None
    stop_token_ids: Annotated[Sequence[int], Field(None, "token ids, integers >= 0")] = ()
    constrained: Annotated[bool, Field(RowColumn.CONSTRAINT, "True or False")] = False
    top_k: Annotated[
        int,
        Field(
            RowColumn.TOP_K,
            "0 for all token ids, or an integer from 1 to 2147483647",
            help="draws from this many of the likeliest tokens; 0 from all",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Field(
            RowColumn.TOP_P,
            "a number from 0.000001 to 1",
            1e-6,
            1,
            help="draws from the likeliest tokens that together have this probability",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Field(
            RowColumn.MIN_P,
            "a number from 0 to 1",
            most=1,
            help="draws from tokens that are at least so likely, compared with the likeliest",
        ),
    ] = 0.0
    min_tokens: Annotated[
        int,
        Field(
            None,
            "an integer from 0 to max_new_tokens",
            help="shortest answer, in tokens",
        ),
    ] = 0

    repetition_penalty: Annotated[
        float,
        Field(
            RowColumn.REPETITION_PENALTY,
            "a number from 0.01 to 100",
            0.01,
            100,
            help="above 1, tokens of prompt and answer are less likely",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Field(
            RowColumn.PRESENCE_PENALTY,
            "a number from -2 to 2",
            -2,
            2,
            help="above 0, tokens of the answer are less likely",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(
            RowColumn.FREQUENCY_PENALTY,
            "a number from -2 to 2",
            -2,
            2,
            help="above 0, tokens are less likely for each time that they are in the answer",
        ),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | tuple[tuple[int, float], ...],
        Field(None, "token ids, integers >= 0, with numbers from -100 to 100 or -inf", -100, 100),
    ] = ()
    logprobs: Annotated[
        int | None,
        Field(
            None,
            f"None, or an integer from 0 to {MOST_LOGPROBS}",
            most=MOST_LOGPROBS,
            optional=True,
            help="log-probabilities of each token and of this many of the likeliest, with --json",
        ),
    ] = None
    logprobs_mode: Annotated[str, Field(None, " or ".join(LOGPROBS_MODES))] = "raw"
    prompt_logprobs: Annotated[
        int | None,
        Field(
            None,
            f"None, or an integer from 0 to {MOST_LOGPROBS}",
            most=MOST_LOGPROBS,
            optional=True,
            help="the same for the tokens of the prompt",
        ),
    ] = None

    object_values: Annotated[
        int,
        Field(RowColumn.OBJECT_VALUES, "0 for text, 2 for points, or 3 for boxes", 2, 3, zero=True),
    ] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name, kind, field, default in _NUMBERS:
            if (value := getattr(self, name)) is not default:  # most are, and each request has some
                object.__setattr__(self, name, _checked(name, value, kind, field))
        if not (isinstance(self.logprobs_mode, str) and self.logprobs_mode in LOGPROBS_MODES):
            expected = FIELDS["logprobs_mode"][1].expected
            raise ConfigError(f"logprobs_mode is {shown(self.logprobs_mode)}; give {expected}")
        if self.min_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens} and max_new_tokens {self.max_new_tokens}; make "
                "the one smaller or the other larger"
            )

    def settled(self) -> RowParams:
        """The same with a seed, where it has none."""
        return self if self.seed is not None else replace(self, seed=_SEEDS.getrandbits(64))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def counts_tokens(self) -> bool:
        """Whether the device keeps count of the answer's tokens, for a penalty."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)

    @property
    def forbids_ids(self) -> bool:
        """Whether ids are left out, which may have been all: by biases, or stop ids for a while."""
        banned = any(bias == -math.inf for _, bias in self.biases)
        return banned or bool(self.min_tokens and self.stop_token_ids)


def _fields() -> dict[str, tuple[Any, Field]]:
    hints = get_type_hints(RowParams, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def _stop_ids(given: Any) -> tuple[int, ...]:
    entries = as_tuple(given)
    if entries is None:
        raise ConfigError(f"stop_token_ids is {shown(given)}; give a list or a tuple")
    ids = []
    for entry in entries:
        token = as_index(entry)
        if token is None or token < 0:
            expected = FIELDS["stop_token_ids"][1].expected
            raise ConfigError(f"stop_token_ids holds {shown(entry)}; give {expected}")
        ids.append(token)
    return tuple(ids)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    field = FIELDS["logit_bias"][1]
    try:
        found = dict(given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"logit_bias is {shown(given)}; give a dict of {field.expected}"
        ) from None
    checked = {}
    for key, bias in found.items():
        token = as_index(key)
        known = _is_number(bias, float) and (field.least <= bias <= field.most or bias == -math.inf)
        if token is None or token < 0 or not known:
            raise ConfigError(
                f"logit_bias holds {shown(key)}: {shown(bias)}; give {field.expected}"
            )
        checked[token] = float(bias)
    return tuple(sorted(checked.items()))


def _checked(name: str, value: Any, kind: Any, field: Field) -> Any:
    """The value as a plain number or bool: other kinds of integers overflow. Raises ConfigError."""
    number: Any = value if kind in (bool, float) else as_index(value)
    if value is None:
        fits = field.optional
    elif kind is bool:
        fits = isinstance(value, bool)
    else:
        known = _is_number(number, kind)
        fits = known and (field.least <= number <= field.most or (field.zero and number == 0))
    if not fits:
        raise ConfigError(f"{name} is {shown(value)}; give {field.expected}")
    if kind is not float:
        return number
    # the bound as a float32 may be just below it, and is taken for it
    return max(float(value), field.least) if value else 0.0


def _is_number(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return as_index(value) is not None


FIELDS: dict[str, tuple[Any, Field]] = _fields()
"""The table: by name, the type and the `Field` of each parameter."""

_NUMBERS = [
    (name, kind, field, getattr(RowParams, name))
    for name, (kind, field) in FIELDS.items()
    if name not in ("stop_token_ids", "logit_bias", "logprobs_mode")
]

SIGNATURE: dict[str, Any] = {name: kind for name, (kind, _) in FIELDS.items()}
"""What `help` and editors show of a parameter: its type without its `Field`."""


def check_names(owner: str, kind: type, given: Iterable[str], synonyms: Mapping[str, str]) -> None:
    """Raises ConfigError where a name is no parameter of the dataclass `kind`, with the nearest
    that is; `owner` has the parameters, in words.
    """
    known = [one.name for one in fields(kind) if one.init]
    for name in given:
        if name not in known:
            nearest = [synonyms[name]] if name in synonyms else get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]}? There are" if nearest else "there are"
            there = ", ".join(known)
            raise ConfigError(f"{owner} has no parameter {shown(name)}; {remedy} {there}")


_init = RowParams.__init__
_init.__annotations__ |= SIGNATURE


@wraps(_init)
def _checked_init(self: RowParams, *values: Any, **named: Any) -> None:
    if not FIELDS.keys() >= named.keys():
        check_names("a row", RowParams, named, SYNONYMS)
    _init(self, *values, **named)


RowParams.__init__ = _checked_init  # type: ignore[method-assign]  # for editors a dataclass


def flags(**defaults: Any) -> dict[str, tuple[Any, str, Any]]:
    """What a command line can set: by name, the type, the help and the default, which `defaults`
    may replace.
    """
    found = {}
    for name, (kind, field) in FIELDS.items():
        if field.help:
            default = defaults.get(name, getattr(RowParams, name))
            shows = "" if default is None else f" (default {default})"
            found[name] = (float if kind is float else int, field.help + shows, default)
    return found
