"""A token automaton as the bytes of a file."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np

from photon_ext.sampling.byte_automaton import NO_STATE, AutomatonLimits, ByteAutomaton
from photon_ext.sampling.token_automaton import StateMasks, TokenAutomaton, TokenBytes

FORMAT = 1  # to be raised where the same form would give another automaton, or other bytes
_DIGEST_BYTES = 32


def automaton_bytes(automaton: TokenAutomaton, key: bytes) -> bytes:
    """What a file holds: a digest of the key and the rest, then the arrays, compressed."""
    named: dict[str, Any] = automaton.by_bytes._asdict()
    named |= StateMasks(automaton.masks, automaton.mask_of)._asdict()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **named)
    arrays = buffer.getvalue()
    return _digest(key, arrays) + arrays


def read_automaton(
    data: bytes, key: bytes, vocabulary: TokenBytes, limits: AutomatonLimits
) -> TokenAutomaton:
    """The automaton of such bytes. Raises ValueError: they are damaged, or of another key;
    NotRegular: it takes more than the limits allow.
    """
    arrays = data[_DIGEST_BYTES:]
    if data[:_DIGEST_BYTES] != _digest(key, arrays):
        raise ValueError("its digest is another one")
    try:
        with np.load(io.BytesIO(arrays), allow_pickle=False) as found:
            by_bytes = ByteAutomaton(*(found[name] for name in ByteAutomaton._fields))
            masks = StateMasks(*(found[name] for name in StateMasks._fields))
        _check(by_bytes, masks)
    except Exception as error:  # numpy's and zipfile's are many
        raise ValueError(f"it holds no automaton: {error}") from error
    return TokenAutomaton(by_bytes, vocabulary, limits, masks=masks)


def _check(by_bytes: ByteAutomaton, masks: StateMasks) -> None:
    """Raises ValueError: numbers that point nowhere."""
    states, classes = by_bytes.transitions.shape
    fits = (
        by_bytes.classes.shape == (256,)
        and by_bytes.classes.max() < classes
        and by_bytes.transitions.min() >= NO_STATE
        and by_bytes.transitions.max() < states
        and len(by_bytes.accepting) == len(masks.mask_of) == states
        and masks.mask_of.max() < len(masks.masks)
    )
    if not fits:
        raise ValueError("its numbers do not fit together")


def _digest(key: bytes, arrays: bytes) -> bytes:
    return hashlib.sha256(key + arrays).digest()
