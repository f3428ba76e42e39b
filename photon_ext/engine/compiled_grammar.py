"""A grammar that is compiled once, for all requests that ask for the same."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from photon_ext.engine.deep_thread import DeepThread
from photon_ext.engine.vocabulary import Vocabulary
from photon_ext.errors import CompilerBusy, RequestError, describe, shown
from photon_ext.sampling.byte_automaton import AutomatonLimits, byte_automaton
from photon_ext.sampling.grammar import Grammar, GrammarKind, grammar_pattern
from photon_ext.sampling.grammar_constraint import GrammarConstraint, library_text
from photon_ext.sampling.lark import is_lark, with_names
from photon_ext.sampling.pattern import NotRegular, TooSlow
from photon_ext.sampling.token_automaton import TokenAutomaton

if TYPE_CHECKING:
    from llguidance import LLMatcher

# What passes the bounds of sampling/grammar_bounds.py takes 0.3 s.
_DEADLINE_S = 3.0
# An automaton that was not made in time because others were at work is tried again after this.
_RETRY_S = 30.0
# States of an automaton, of all answers that share it, about 0.5 kB each. An answer of 1,500 random
# tokens to a regular expression that was made to have many has 100,000.
_MOST_STATES = 100_000
# Of one mask, for which all rows of a step wait: it takes 5 ms at the most. A tenth of the
# library's own bounds would refuse answers to schemas in use, a quarter refuses none of 231.
_MASK_FUEL = 50_000
_MASK_ITEMS = 20_000
# Of the compilation, 0.1 s. A fourth of it would refuse no more of 288 schemas.
_LEXER_FUEL = 200_000
# What the library says of it, with its own options.
_TOO_LARGE = ("lexer precomputation failed", "too many expressions", "initial lexer configuration")
# Then it is compiled anew, which lets go of the states that long answers have left behind.
_MOST_STARTS = 1000
# Without a bound a small model fills its answer with line ends.
_WHITESPACE = r"[ \t\r\n]{1,16}"


class CompiledGrammar:
    """Compiled by the first thread that needs it; others that ask meanwhile wait for this one.

    Its requests share the automaton, which grows with the answers, and each has a state of its own.
    Where it grows beyond its bound, the answers that share it end with an error.

    Attributes:
        spent: to be replaced for the next request.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.spent = False
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._what = f"{grammar.kind.value} {shown(grammar.text)}"
        self._mask_bytes = -(-vocabulary.library.vocab_size // 32) * 4
        self._lock = threading.Lock()
        self._thread: DeepThread[LLMatcher | str] | None = None
        self._starts = 0
        self._automaton: TokenAutomaton | str | None = None
        self._retry_at = math.inf  # on time.monotonic

    def start(self) -> GrammarConstraint:
        """The constraint of one request, at its start. Raises RequestError: it was refused;
        CompilerBusy: it was not compiled this time.
        """
        with self._lock:
            matcher = self._matcher()
            self._starts += 1
            self.spent = self.spent or self._starts >= _MOST_STARTS
            return self._constraint(matcher)

    def automaton(self, limits: AutomatonLimits) -> TokenAutomaton:
        """The grammar as an automaton for the device. Raises as `start`, and NotRegular: the device
        does not take it, and why.
        """
        with self._lock:
            matcher = self._matcher()
            if self._automaton is None or time.monotonic() > self._retry_at:
                self._automaton = self._made_automaton(matcher, limits)
            if isinstance(self._automaton, str):
                raise NotRegular(self._automaton)
            return self._automaton

    def _matcher(self) -> LLMatcher:
        """The grammar's, at the start of an answer."""
        if self._thread is None:
            self._thread, seconds = self._started(), _DEADLINE_S
        else:
            seconds = 0.0  # those that ask again do not wait again
        if not self._thread.ended(seconds):
            raise CompilerBusy(
                f"{self._what} is refused: it takes more than {_DEADLINE_S:.0f} s to compile; ask "
                "again later, or make it simpler"
            )
        made = self._thread.made
        if made is None or isinstance(made, str):
            why = made or "its compilation failed"
            raise RequestError(f"{self._what} is refused: {why}; change what is named there")
        return made.deep_copy()

    def _started(self) -> DeepThread[LLMatcher | str]:
        try:
            return DeepThread(partial(_compiled, self._grammar, self._vocabulary))
        except CompilerBusy as error:
            raise CompilerBusy(f"{self._what} cannot be compiled now: {error}") from error

    def _made_automaton(self, matcher: LLMatcher, limits: AutomatonLimits) -> TokenAutomaton | str:
        tokens, folder = self._vocabulary.tokens, self._vocabulary.folder
        self._retry_at, begin = math.inf, time.thread_time()
        try:
            kept = None if folder is None else folder.load(self._grammar, tokens, limits)
            if kept is not None:
                return kept
            deadline = time.monotonic() + limits.seconds
            automaton = byte_automaton(grammar_pattern(self._grammar), limits, deadline)
            made = TokenAutomaton(automaton, tokens, limits, matcher)
        except TooSlow as error:
            if time.thread_time() - begin < limits.seconds / 2:
                self._retry_at = time.monotonic() + _RETRY_S
            return str(error)
        except NotRegular as error:
            return str(error)
        except RecursionError:
            return "it is nested too deeply"
        if folder is not None:
            folder.save(self._grammar, made)
        return made

    def _constraint(self, matcher: LLMatcher) -> GrammarConstraint:
        return GrammarConstraint(matcher, self._mask_bytes, self._what, self._retire)

    def _retire(self) -> None:
        self.spent = True


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher | str:
    """The matcher, tried on one token because that shows some faults; or why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        max_lexer_states=_MOST_STATES,
        step_lexer_fuel=_MASK_FUEL,
        step_max_items=_MASK_ITEMS,
        verbose_errors=False,  # which would repeat the grammar and the answer
    )
    library = vocabulary.library
    try:
        text = _library_grammar(grammar, vocabulary)
        matcher = LLMatcher(library, text, log_level=0, limits=limits)
        fault = matcher.get_error() or _first_fault(matcher)
    except BaseException as error:  # the library's panics are BaseExceptions
        return describe(error)
    return _plain(library_text(fault)) if fault else matcher


def _first_fault(matcher: LLMatcher) -> str:
    """What the library says against the first mask, and the one after its first token; or ""."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error() and allowed:
        matcher = matcher.deep_copy()
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
        if not matcher.is_stopped():
            matcher.compute_bitmask()
    return matcher.get_error()


def _plain(why: str) -> str:
    """What the library says, where it speaks of itself in words of ours."""
    if why == "NoExtensionBias":
        return "no text matches it"
    if "unknown special token" in why:
        return why.partition(";")[0]  # the others have names that mean nothing
    if "coerce_one_of" in why:
        return "oneOf is served where no value fits two of its schemas; anyOf, where it may"
    if any(sign in why for sign in _TOO_LARGE):
        return "its regular expressions make too large an automaton"
    return why


def _library_grammar(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """The grammar as llguidance writes it. Raises ValueError for what it cannot be."""
    from llguidance import LLMatcher, regex_to_lark

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        # all of them are given: a schema could bring others along, under "x-guidance"
        options: Any = {
            "item_separator": ",",
            "key_separator": ":",
            "whitespace_flexible": grammar.whitespace,
            "whitespace_pattern": _WHITESPACE if grammar.whitespace else None,
            "coerce_one_of": False,
            "lenient": False,
        }
        return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=options))
    if grammar.kind is GrammarKind.GRAMMAR:
        if is_lark(grammar.text):
            return str(LLMatcher.grammar_from_lark(with_names(grammar.text, vocabulary.by_id)))
        return str(LLMatcher.grammar_from_lark(_gbnf_as_lark(grammar.text)))
    regex = grammar.text
    if grammar.kind is GrammarKind.CHOICE:
        regex = "|".join(map(re.escape, json.loads(grammar.text)))
    return f"start: /{regex_to_lark(regex, use_ascii='d')}/"


def _gbnf_as_lark(text: str) -> str:
    """A grammar in llama.cpp's notation in Lark's. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # IndexError and RecursionError are among them
        raise ValueError(f"it is not read as llama.cpp's notation ({describe(error)})") from error
