"""MaskThreads: masks that are filled together are those that each row fills alone."""

from __future__ import annotations

import random

import llguidance  # noqa: F401  without it these tests are left out
import pytest

from photon_ext.engine import compiled_grammar
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.errors import RequestError
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.sampling.grammar_constraint import GrammarConstraint
from photon_ext.sampling.mask_threads import LEAST_TOGETHER, MaskThreads
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer

EOS = 0
TOKENIZER = byte_tokenizer()
REGEXES = (r"[a-z]+@[a-z]+", r"\d{4}-\d\d", "(yes|no|perhaps)", r"\{\"a\":[0-9]+\}", "x*y?z")


def started(count: int, vocab_size: int = VOCAB) -> list[GrammarConstraint]:
    compiler = GrammarCompiler(TOKENIZER, vocab_size, [EOS])
    grammars = [SamplingParams(regex=regex).answer_grammar for regex in REGEXES]
    return [compiler.start(grammars[i % len(grammars)]) for i in range(count)]  # type: ignore[arg-type]


def mask(constraint: GrammarConstraint, num_words: int = VOCAB // 32) -> bytes:
    words = memoryview(bytearray(4 * num_words)).cast("i")
    constraint.fill_bitmask(words)
    return words.tobytes()


def one_of(words: bytes, rng: random.Random) -> int:
    number = int.from_bytes(words, "little")
    return rng.choice([bit for bit in range(8 * len(words)) if number >> bit & 1])


@pytest.mark.parametrize("count", [LEAST_TOGETHER - 1, LEAST_TOGETHER, 32])
@pytest.mark.parametrize("vocab_size", [VOCAB, 100])
def test_masks_are_the_same_together_and_alone(count: int, vocab_size: int) -> None:
    together, alone = started(count, vocab_size), started(count, vocab_size)
    threads, rng, width = MaskThreads(True), random.Random(count), -(-vocab_size // 32)
    for _ in range(12):
        threads.fill(together)
        assert all((one.filled is not None) == (count >= LEAST_TOGETHER) for one in together)
        for one, other in zip(together, alone, strict=True):
            if one.finished:
                continue
            found = mask(one, width)
            assert found == mask(other, width)
            assert found == mask(one, width)  # asked again, after an interrupt
            if any(found):
                token = one_of(found, rng)
                one.advance(token)
                other.advance(token)
            assert one.finished == other.finished


def test_a_mask_of_the_position_before_is_not_handed_out() -> None:
    constraints = started(9)
    MaskThreads(True).fill(constraints)
    constraint = constraints[2]
    constraint.advance(TOKENIZER.encode("y", False)[0])
    assert constraint.filled is None
    assert one_of(mask(constraint), random.Random(0)) == TOKENIZER.encode("e", False)[0]


def test_where_they_are_not_enabled_each_row_fills_its_own() -> None:
    constraints = started(16)
    MaskThreads(False).fill(constraints)
    assert [one.filled for one in constraints] == [None] * 16


def test_constraints_of_other_kinds_fill_their_own() -> None:
    constraints = [*started(8), from_allowed_ids([1]), None]
    MaskThreads(True).fill(constraints)
    assert [getattr(one, "filled", None) is not None for one in constraints] == [True] * 8 + [
        False
    ] * 2


def test_a_grammar_that_fails_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "_MOST_STATES", 300)
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
    grammar = SamplingParams(regex=".*a.{40}x").answer_grammar
    assert grammar is not None
    failing, others, threads = compiler.start(grammar), started(7), MaskThreads(True)
    with pytest.raises(RequestError, match=r"failed in this answer: .*too many stat"):  # noqa: PT012
        for token in TOKENIZER.encode("abaabbabaaababab" * 8, False):
            threads.fill([failing, *others])
            mask(failing)
            failing.advance(token)
    threads.fill([failing, *others])
    words = memoryview(bytearray(b"\xff" * (VOCAB // 8))).cast("i")
    with pytest.raises(RequestError, match="failed in this answer"):
        failing.fill_bitmask(words)
    assert not any(words)
    assert [mask(one) for one in others] == [mask(one) for one in started(7)]
