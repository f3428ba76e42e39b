"""What a caller may ask of one request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any

from photon_ext import row_params
from photon_ext.checks import INT32_MAX, as_tuple, check_flag
from photon_ext.errors import ConfigError, shown, surrogate_in
from photon_ext.row_params import FIELDS, SIGNATURE, RowParams, check_names
from photon_ext.sampling.constraints import Constraint, constraint_fault
from photon_ext.sampling.grammar import Grammar, grammar_of, schema_text
from photon_ext.sampling.stop_automaton import StopAutomaton

MAX_STOP_CHARACTERS = (
    2**14
)  # of a request's stop strings: an automaton of 4 MB, made in 30 ms; and bad words
# what other engines call it
SYNONYMS = row_params.SYNONYMS | {
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "include_stop_str_in_output": "include_stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
# what other engines have
UNSUPPORTED = "best_of response_format"


@dataclass(frozen=True)
class SamplingParams(RowParams):
    """Sampling parameters of one request, checked when made.

    Those of `RowParams` are run by the device; the engine caps max_new_tokens at what the context
    leaves after the prompt (None, which is kept as 2147483647: up to there), and adds
    the model's end tokens to stop_token_ids; a request has `max_stop_ids` of them at most. Stop
    tokens stay in token_ids, and out of the text unless include_stop. Stop strings and constraints
    do not wait for min_tokens.

    Attributes:
        stop: a string or several that end the request, up to 16384 characters in all; the text is
            cut before the first one to be complete. Needs a tokenizer.
        include_stop: the text ends with the stop string or the text of the stop token; special
            tokens have none.
        bad_words: texts that are not sampled, as the tokenizer writes them alone or behind a space.
            Those of one token count as logit biases of -inf; a request has 300 biases at most;
            those of several are kept by the host, so that a request with one waits for masks.
        ignore_eos: go on after the model's end tokens (stop_token_ids still stop).
        constraint: asked by the host for the allowed tokens before each sampling; see
            sampling.constraints. It sets `constrained`, as do the next four; one of the five may be
            given. They need a tokenizer and the extra `grammar`. An answer that is complete ends
            with "stop"; one that is cut by its caps or stop strings need not match. Up to 65536
            characters each; what llguidance cannot do is refused when the request is submitted.
        json_schema: the answer is JSON of this schema, a dict, JSON text or a class of pydantic,
            with properties in the order of the schema; kept as JSON text. Integers are exact from
            -2**53 to 2**53; what is beyond and would become another number is refused.
        regex: the answer is matched by it, from its begin to its end; Rust's syntax, where \\d is
            0 to 9 here.
        choice: the answer is one of these texts.
        grammar: the answer is of this grammar, in Lark's or llama.cpp's (GBNF) notation.
        whitespace: the JSON of `json_schema` may hold spaces and line ends; else it has none.
        additional_properties: objects of `json_schema` may have properties that it does not name,
            as the standard has it where a schema says nothing of them. False: such objects have
            none, so that small models end them; those that name no properties, and those that
            several schemas describe together (as in allOf), stay open.

    Raises:
        ConfigError: (a ValueError) a value is not allowed, or there is no such parameter.
    """

    stop: Sequence[str] = ()
    include_stop: bool = False
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    json_schema: str | Mapping[str, Any] | type[Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace: bool = False
    additional_properties: bool = False
    constrained: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", INT32_MAX)
        super().__post_init__()
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _checked_texts(name, getattr(self, name)))
        for name in ("include_stop", "ignore_eos"):
            check_flag(name, getattr(self, name))
        if self.constraint is not None and (fault := constraint_fault(self.constraint)):
            raise ConfigError(f"constraint is a {type(self.constraint).__name__}; {fault}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        form = self.answer_grammar
        if form is not None and self.constraint is not None:
            raise ConfigError(f"constraint and {form.kind.value} are given; give one of them")
        constrained = form is not None or self.constraint is not None
        object.__setattr__(self, "constrained", constrained)
        if self.choice is not None and form is not None:
            object.__setattr__(self, "choice", tuple(json.loads(form.text)))

    @cached_property
    def stop_automaton(self) -> StopAutomaton | None:
        """What finds the stop strings, for all requests with these parameters; None: no strings."""
        return StopAutomaton(self.stop) if self.stop else None

    @cached_property
    def answer_grammar(self) -> Grammar | None:
        """The form that the answer has to have; None: any."""
        forms = self.json_schema, self.regex, self.choice, self.grammar
        return grammar_of(*forms, self.whitespace, self.additional_properties)

    def sample(self, index: int) -> SamplingParams:
        """The same for one of several answers to a prompt: with a seed of its own, and no
        prompt_logprobs, which the first has.
        """
        if index == 0 or (self.seed is None and self.prompt_logprobs is None):
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return replace(self, seed=seed, prompt_logprobs=None)

    def row_params(
        self, max_new_tokens: int, stop_token_ids: tuple[int, ...], bad_ids: Iterable[int] = ()
    ) -> RowParams:
        """What the row is run with, with the engine's cap and end tokens, and the ids of bad
        words.
        """
        own = {name: getattr(self, name) for name in FIELDS}
        own["logit_bias"] = {**dict(self.logit_bias), **dict.fromkeys(bad_ids, -math.inf)}
        own |= {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids}
        own["min_tokens"] = min(self.min_tokens, max_new_tokens)
        return RowParams(**own)


_init = SamplingParams.__init__
_init.__annotations__ |= SIGNATURE | {"max_new_tokens": int | None}


@wraps(_init)
def _checked_init(self: SamplingParams, *values: Any, **named: Any) -> None:
    _check_names(named)
    _init(self, *values, **named)


SamplingParams.__init__ = _checked_init  # type: ignore[method-assign]  # for editors a dataclass


def _check_names(names: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(SamplingParams) if one.init]
    for name in names:
        if name in UNSUPPORTED.split():
            there = ", ".join(known)
            raise ConfigError(f"{name} is not supported yet; leave it out: there are {there}")
        if name == "n":
            raise ConfigError(
                "n is a keyword of Engine.generate, submit and chat; give it there: "
                "generate(..., n=2)"
            )
    check_names("sampling", SamplingParams, names, SYNONYMS)


def _checked_texts(name: str, given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else as_tuple(given)
    if texts is None:
        raise ConfigError(f"{name} is {shown(given)}; give a string, a list or a tuple")
    characters = 0
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name} holds {shown(text)}; give non-empty strings")
        if (surrogate := surrogate_in(text)) is not None:
            raise ConfigError(
                f"{name} holds {shown(text)} with {surrogate}; give valid Unicode text"
            )
        characters += len(text)
    if characters > MAX_STOP_CHARACTERS:
        found = f"{len(texts)} strings of {characters} characters in all"
        raise ConfigError(f"{name} holds {found}; give at most {MAX_STOP_CHARACTERS}")
    return texts
