"""Rows with an automaton: what is sampled, and where the state goes."""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from photon_ext.layout import AUTOMATON_HEADER, AutomatonWord, RecordFlag, RowColumn
from tests.ops.automata import END, LONG, TEXTS, automaton, packed, vocabulary
from tests.ops.numeric import DTYPES, assert_same_bits, ints, poisoned, randn
from tests.ops.tables import SAMPLE, float_bits, row_state

INF = float("inf")
REGEXES = ("(ab)+", "[abc]*", "abc|cc", "é", "a{2,3}b?")
A, B, AB, C, ABC, CC = (TEXTS.index(text) for text in (b"a", b"b", b"ab", b"c", b"abc", b"cc"))


def state_of(device: str, rows: dict[int, tuple[int, int]], **columns: int) -> torch.Tensor:
    """row_state of rows with automata, (begin, state) each."""
    more = {RowColumn[name.upper()]: value for name, value in columns.items()}
    return row_state(
        device,
        {
            row: {
                RowColumn.AUTOMATON: begin,
                RowColumn.AUTOMATON_STATE: state,
                RowColumn.REMAINING: 9,
                **more,
            }
            for row, (begin, state) in rows.items()
        },
        1 + max(rows),
    )


def tables_of(state: torch.Tensor, stop_ids: list[int]) -> list[torch.Tensor]:
    device = str(state.device)
    pages = torch.full((len(state), 1), -1, dtype=torch.int32, device=device)
    return [state, pages, ints([stop_ids] * len(state), device)]


def segments_of(state: torch.Tensor) -> torch.Tensor:
    rows = [[row, row - 1, 1, SAMPLE] for row in range(1, len(state))]
    return ints(rows, str(state.device))


def sampled(
    device: str, state: torch.Tensor, logits: torch.Tensor, words: torch.Tensor
) -> torch.Tensor:
    out = poisoned(len(logits), dtype=torch.int32, device=device)
    ops.sample_into(out, logits, segments_of(state), state, automata=words, hopper=True)
    return out


def published(
    device: str, state: torch.Tensor, tokens: list[int], words: torch.Tensor, stops: list[int]
) -> list[list[int]]:
    """Records of rows 1, 2, ..., which have sampled these."""
    record = poisoned(len(tokens), 5, dtype=torch.int32, device=device)
    tables = tables_of(state, stops)
    ops.publish_(tables, record, ints(tokens, device), segments_of(state), automata=words)
    return record.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 41, 4099])
def test_only_what_the_state_allows_is_sampled(device: str, dtype: torch.dtype, size: int) -> None:
    machines = [automaton(regex, vocabulary(size)) for regex in REGEXES]
    words, begins = packed(machines, device)
    rows = {1 + i: (begin, 0) for i, begin in enumerate(begins)}
    state = state_of(device, {**rows, 1 + len(rows): (0, 0)})
    for seed in range(6):
        logits = randn(len(state) - 1, size, dtype=dtype, device=device, seed=seed)
        expected = logits.clone()
        for row, machine in enumerate(machines):
            bits = torch.from_numpy(machine.masks[machine.mask_of[0]])[:, None]
            allowed = (bits >> torch.arange(32)).flatten()[:size] & 1
            expected[row, allowed.to(device) == 0] = -INF
        out = sampled(device, state, logits, words)
        assert_same_bits(logits, expected)
        assert out.tolist() == expected.float().argmax(1).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_sampling_equals_the_reference(device: str, seed: int) -> None:
    size = 300
    machines = [automaton(regex, vocabulary(size)) for regex in REGEXES]
    words, begins = packed(machines, device)
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for row in range(1, 13):
        which = int(torch.randint(len(machines), (), generator=generator))
        reached = [s for s, mask in enumerate(machines[which].mask_of) if mask >= 0]
        state = reached[int(torch.randint(len(reached), (), generator=generator))]
        rows[row] = begins[which], state
    heat = {"temperature": float_bits(0.8), "top_k": 3, "seed_low": seed, "logprobs": 3}
    state = state_of(device, rows, **heat)
    logits = randn(12, size, dtype=torch.float32, device=device, seed=seed)
    expected_logits, told = logits.clone(), torch.zeros(12, 7, dtype=torch.int32, device=device)
    expected_told = told.clone()
    out, expected = (poisoned(12, dtype=torch.int32, device=device) for _ in range(2))
    rest = segments_of(state), state, None, True, None
    ops.sample_into(out, logits, *rest, told, words)
    reference.sample_into(expected, expected_logits, *rest, expected_told, words)
    assert out.tolist() == expected.tolist()
    assert_same_bits(logits, expected_logits)
    assert told[:, 1::2].tolist() == expected_told[:, 1::2].tolist()


def test_publish_walks_the_tokens_bytes_to_the_next_state(device: str) -> None:
    machine = automaton("(ab)+c?", vocabulary(40))
    words, (begin,) = packed([machine], device)
    state = state_of(device, {1: (begin, 0), 2: (begin, 0), 3: (begin, 0), 4: (0, 7)})
    records = published(device, state, [A, AB, len(TEXTS), B], words, [-1])
    assert [record[2:] for record in records] == [
        [1, 0, A], [1, 0, AB], [1, 0, len(TEXTS)], [1, 0, B],
    ]  # fmt: skip
    expected = [machine.advance(0, A), machine.advance(0, AB), machine.state_after([AB] * 100), 7]
    assert state[1:, RowColumn.AUTOMATON_STATE].tolist() == expected
    assert len(LONG) == 200  # of the third


def test_a_row_ends_where_nothing_may_follow(device: str) -> None:
    machine = automaton("abc|cc", vocabulary(40))
    words, (begin,) = packed([machine], device)
    after = machine.advance(0, AB)
    state = state_of(device, {1: (begin, 0), 2: (begin, after), 3: (begin, 0)}, remaining=1)
    records = published(device, state, [CC, C, C], words, [-1])
    complete = RecordFlag.COMPLETE
    assert [record[2:] for record in records] == [
        [1, complete, CC], [1, complete, C], [1, RecordFlag.LENGTH, C],
    ]  # fmt: skip
    assert state[1:, RowColumn.ALIVE].tolist() == [0, 0, 0]


@pytest.mark.parametrize("stops", [[-1], [END]])
def test_an_end_token_ends_an_answer_that_may_end(device: str, stops: list[int]) -> None:
    machine = automaton("(ab)+", vocabulary(40))
    words, (begin,) = packed([machine], device)
    accepting = machine.advance(0, AB)
    state = state_of(device, {1: (begin, accepting)}, stop_count=1)
    (record,) = published(device, state, [END], words, stops)
    flag = RecordFlag.STOP if stops == [END] else RecordFlag.COMPLETE
    assert record[2:] == [1, flag, END]


def test_a_stop_id_is_not_shown_to_the_automaton(device: str) -> None:
    machine = automaton("(ab)+", vocabulary(40))
    words, (begin,) = packed([machine], device)
    state = state_of(device, {1: (begin, 0)}, stop_count=1)
    (record,) = published(device, state, [CC], words, [CC])
    assert record[2:] == [1, RecordFlag.STOP, CC]
    assert state[1, RowColumn.AUTOMATON_STATE] == 0


@pytest.mark.parametrize("token", [B, C, 0, END, 39])
def test_a_token_that_is_not_allowed_ends_its_row_alone(device: str, token: int) -> None:
    machine = automaton("(ab)+", vocabulary(40))
    words, (begin,) = packed([machine], device)
    state = state_of(device, {1: (begin, 0), 2: (begin, 0)})
    records = published(device, state, [token, AB], words, [-1])
    assert records[0][2:] == [0, RecordFlag.AUTOMATON_ERROR, -1]
    assert records[1][2:] == [1, 0, AB]
    assert state[1:, RowColumn.ALIVE].tolist() == [0, 1]


GARBAGE = {
    "a begin beyond the words": (10**6, 0, None),
    "a negative begin": (-4, 0, None),
    "a state beyond the states": (None, 1000, None),
    "a negative state": (None, -1, None),
    "no states": (None, 0, (AutomatonWord.STATES, 0)),
    "a size beyond the words": (None, 0, (AutomatonWord.SIZE, 10**9)),
    "masks beyond its size": (None, 0, (AutomatonWord.MASKS, 10**8)),
    "masks that are too narrow": (None, 0, (AutomatonWord.MASK_WORDS, 1)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_hazard_17_an_automaton_that_is_none_allows_nothing(device: str, name: str) -> None:
    machine = automaton("(ab)+", vocabulary(40))
    words, (begin,) = packed([machine], device)
    at, number, header = GARBAGE[name]
    if header is not None:
        words[begin + header[0]] = header[1]
    state = state_of(device, {1: (begin if at is None else at, number), 2: (0, 0)})
    logits = randn(2, 40, dtype=torch.float32, device=device, seed=1)
    best = int(logits[1].argmax())
    out = sampled(device, state, logits, words)
    assert out.tolist() == [-1, best]
    records = published(device, state, out.tolist(), words, [-1])
    # publish_ does not know how wide masks have to be
    narrow = header is not None and header[0] is AutomatonWord.MASK_WORDS
    flag = RecordFlag.NO_CANDIDATE if narrow else RecordFlag.AUTOMATON_ERROR
    assert records[0][2:] == [0, flag, -1]
    assert records[1][2:] == [1, 0, best]


def test_hazard_17_a_byte_of_a_class_that_is_none_leads_nowhere(device: str) -> None:
    """Never to what stands behind a state's transitions, which is another state's or no memory of
    the automaton's.
    """
    words, (begin,) = packed([automaton("(ab)+", vocabulary(40))], "cpu")
    states, classes = (words[begin + at] for at in (AutomatonWord.STATES, AutomatonWord.CLASSES))
    at = begin + AUTOMATON_HEADER
    behind = words[at + 64 + states :][: states * classes][classes:]  # those of the next states
    byte_class = int(classes) + int(torch.argmax((behind >= 0).int()))
    words[at : at + 64].view(torch.uint8)[ord("a")] = byte_class
    words = words.to(device)
    state = state_of(device, {1: (begin, 0), 2: (begin, 0)})
    expected_state = state.clone()
    records = published(device, state, [A, AB], words, [-1])
    assert [record[2:] for record in records] == 2 * [[0, RecordFlag.AUTOMATON_ERROR, -1]]
    expected = poisoned(2, 5, dtype=torch.int32, device=device)
    segments, tokens = segments_of(state), ints([A, AB], device)
    reference.publish_(tables_of(expected_state, [-1]), expected, tokens, segments, automata=words)
    assert records == expected.tolist()


def test_without_words_a_row_with_an_automaton_is_not_sampled(device: str) -> None:
    state = state_of(device, {1: (64, 0)})
    out = poisoned(1, dtype=torch.int32, device=device)
    ops.sample_into(
        out, randn(1, 40, dtype=torch.float32, device=device), segments_of(state), state
    )
    assert out.tolist() == [-1]


@pytest.mark.parametrize("seed", range(6))
def test_publish_equals_the_reference(device: str, seed: int) -> None:
    machines = [automaton(regex, vocabulary(60)) for regex in REGEXES]
    words, begins = packed(machines, device)
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[int]) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    rows = {row: (pick([*begins, 0, -1]), pick([0, 1, 2, 3, 9])) for row in range(1, 31)}
    state = state_of(device, rows, stop_count=1)
    tokens = ints([pick([A, B, AB, C, ABC, CC, END, 12, -1]) for _ in rows], device)
    expected_state = state.clone()
    tables, expected_tables = tables_of(state, [ABC]), tables_of(expected_state, [ABC])
    record, expected = (poisoned(30, 5, dtype=torch.int32, device=device) for _ in range(2))
    ops.publish_(tables, record, tokens, segments_of(state), automata=words)
    reference.publish_(expected_tables, expected, tokens, segments_of(state), automata=words)
    assert_same_bits(record, expected)
    assert_same_bits(state, expected_state)
