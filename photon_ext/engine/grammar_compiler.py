"""From what a request asks of its answer's form to a constraint, on the caller's thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from photon_ext.engine.automaton_folder import AutomatonFolder
from photon_ext.engine.compiled_grammar import CompiledGrammar
from photon_ext.engine.given_forms import MOST_KEPT, GivenForms
from photon_ext.engine.vocabulary import Vocabulary
from photon_ext.errors import RequestError
from photon_ext.sampling.automaton_file import automaton_bytes, read_automaton
from photon_ext.sampling.byte_automaton import AutomatonLimits
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.grammar_constraint import GrammarConstraint
from photon_ext.sampling.pattern import NotRegular
from photon_ext.sampling.token_automaton import TokenAutomaton

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer


class GrammarCompiler:
    """Keeps what was compiled last, for all requests of an engine; usable from any thread.

    Attributes:
        automaton_words: what the device has for automata.
        given: forms that another process compiles, which may crash in it; None: they are compiled
            here. Then a form that was not given is refused, and the matchers of the host are made
            of those alone that were.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_ids: Iterable[int],
        automaton_words: int = 0,
        pinned: bool = False,
        automata_dir: Path | None = None,
    ) -> None:
        """`vocab_size`: width of the logits; `eos_ids`: what ends an answer; `automaton_words`:
        what the device has for automata, and `pinned`: it copies them from pinned memory;
        `automata_dir`: a folder where they are kept.
        """
        self.automaton_words = automaton_words
        self.given: GivenForms | None = None
        self._pinned = pinned
        self._automata_dir = automata_dir
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # least recent first

    def start(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint of one request. A grammar that is new takes 1 ms for most schemas, 0.3 s
        for the worst; other threads go on meanwhile.

        Raises:
            RequestError: this engine has no tokenizer, or one of unknown bytes, or the grammar is
                refused; why, and what to do.
            ConfigError: the package llguidance is missing.
        """
        if self.given is not None:
            with suppress(NotRegular):
                self.given.automaton(grammar)
        return self._compiled(grammar).start()

    def automaton(self, grammar: Grammar) -> TokenAutomaton:
        """The constraint of any number of requests, for the device. One that is new takes 0.1 s
        for most schemas, and a few seconds at the most.

        Raises: as `start`; NotRegular: the host has to keep it, and why.
        """
        if self.given is not None:
            return self.given.automaton(grammar)
        if not self.automaton_words:
            raise NotRegular("the engine has no memory for automata (automata_mib)")
        compiled = self._compiled(grammar)
        assert self._vocabulary is not None
        return compiled.automaton(self._limits(self._vocabulary))

    def prepare(self) -> None:
        """Makes what the first form would wait for: about half a second. Raises as `start`."""
        with self._lock:
            _ = self._known("a form").tokens

    def read(self, grammar: Grammar, data: bytes) -> TokenAutomaton:
        """The automaton that the compiler of another process has made (`write`). Raises ValueError:
        these are no such bytes; NotRegular: the device has no place for it.
        """
        with self._lock:
            vocabulary = self._known(grammar.kind.value)
        return read_automaton(data, grammar.key, vocabulary.tokens, self._limits(vocabulary))

    def write(self, grammar: Grammar) -> bytes:
        """An automaton for the engine of another process. Raises as `automaton`."""
        return automaton_bytes(self.automaton(grammar), grammar.key)

    def _limits(self, vocabulary: Vocabulary) -> AutomatonLimits:
        limits, left = AutomatonLimits(), self.automaton_words - len(vocabulary.tokens.words)
        return limits._replace(size=min(limits.size, 4 * left))

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            compiled = self._kept.pop(grammar, None)
            if compiled is None or compiled.spent:
                compiled = CompiledGrammar(grammar, self._known(grammar.kind.value))
            self._kept[grammar] = compiled
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _known(self, what: str) -> Vocabulary:
        """The vocabulary, made for the first grammar. `what`: is given, for an error."""
        if self._tokenizer is None:
            raise RequestError(
                f"{what} is given, and this engine has no tokenizer; give a "
                "constraint of your own, or make the engine with a tokenizer"
            )
        if self._vocabulary is None:
            # the package tokenizers is needed for this alone
            from photon_ext.models.text.grammar_vocabulary import grammar_vocabulary

            library = grammar_vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            names = self._tokenizer.token_id
            size, ends = self._vocab_size, self._eos_ids
            folder = None
            if self._automata_dir is not None:
                told = f"{self._tokenizer.to_json()}\0{size}\0{ends}"
                folder = AutomatonFolder(self._automata_dir, told)
            self._vocabulary = Vocabulary(library, size, ends, self._pinned, names, folder)
        return self._vocabulary
