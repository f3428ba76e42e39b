"""Small automata for tests of ops: a vocabulary of short texts, and what the device has of them."""

from __future__ import annotations

import time

import torch

from photon_ext.sampling.byte_automaton import AutomatonLimits, byte_automaton
from photon_ext.sampling.regex_pattern import regex_pattern
from photon_ext.sampling.token_automaton import TokenAutomaton, TokenBytes

END = 3  # the id that ends answers
TEXTS = [b"", b"a", b"b", b"", b"ab", b"ba", b"c", b"abc", b"cc", b"\xc3", b"\xa9", b"\xc3\xa9"]
LONG = b"ab" * 100  # more bytes than a warp has lanes


def vocabulary(size: int) -> TokenBytes:
    """`size` tokens: TEXTS, LONG, and then single digits and letters."""
    more = [LONG, *(bytes([48 + i % 75]) for i in range(size))]
    return TokenBytes([*TEXTS, *more][:size], [END])


def automaton(regex: str, tokens: TokenBytes) -> TokenAutomaton:
    """The texts that a regular expression matches."""
    limits = AutomatonLimits(seconds=60.0)
    made = byte_automaton(regex_pattern(regex), limits, time.monotonic() + limits.seconds)
    return TokenAutomaton(made, tokens, limits)


def packed(automata: list[TokenAutomaton], device: str) -> tuple[torch.Tensor, list[int]]:
    """The words of all, and where each begins."""
    parts, begins = [automata[0].vocabulary.tables], []
    for one in automata:
        begins.append(sum(map(len, parts)))
        parts.append(one.tables)
    return torch.cat(parts).to(device), begins
