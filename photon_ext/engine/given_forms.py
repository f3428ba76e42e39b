"""The forms of answers that another process has compiled, for an engine that compiles none."""

from __future__ import annotations

import threading
from collections import OrderedDict

from photon_ext.errors import CompilerBusy, shown
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.pattern import NotRegular
from photon_ext.sampling.token_automaton import TokenAutomaton

# Forms that an engine keeps, refused ones included. Most take some 100 kB, the worst 50 MB.
MOST_KEPT = 32


class GivenForms:
    """What was given last, for all requests of an engine; usable from any thread."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, TokenAutomaton | str] = OrderedDict()  # least recent first

    def give(self, grammar: Grammar, made: TokenAutomaton | str) -> None:
        """The form's automaton, or why the host has to keep it."""
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = made
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def find(self, grammar: Grammar) -> TokenAutomaton | str | None:
        """What was given for it; None: nothing, or it has made room for others."""
        with self._lock:
            made = self._kept.get(grammar)
            if made is not None:
                self._kept.move_to_end(grammar)
            return made

    def automaton(self, grammar: Grammar) -> TokenAutomaton:
        """Raises NotRegular: the host has to keep it, and why; CompilerBusy: nothing was given."""
        made = self.find(grammar)
        if made is None:
            what = f"{grammar.kind.value} {shown(grammar.text)}"
            raise CompilerBusy(f"{what} is compiled elsewhere, and is not here yet; try again")
        if isinstance(made, str):
            raise NotRegular(made)
        return made
