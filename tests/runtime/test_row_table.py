"""Rows, generations and the packing of deltas, applied here by a few independent tokens."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.errors import NoFreeRow
from photon_ext.layout import (
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    DELTA_ZEROS,
    NO_PAGE,
    ROW_COLUMNS,
    DeltaTable,
    RowColumn,
)
from photon_ext.runtime import Runtime
from photon_ext.runtime.row_table import RUN_WORDS, RowTable


def runs(packet: list[int]) -> list[tuple[int, int, list[int]]]:
    """(table, offset, words) of every run; the packet is checked for holes and overlaps on the
    way.
    """
    count, total = packet[0], packet[1]
    assert total == len(packet)
    found, expected_source = [], DELTA_HEADER + DELTA_RUN_WORDS * count
    for i in range(count):
        table, offset, words, source = packet[DELTA_HEADER + i * DELTA_RUN_WORDS :][
            :DELTA_RUN_WORDS
        ]
        assert source == expected_source
        found.append((table, offset, packet[source : source + words]))
        expected_source += words
    assert expected_source == total
    return found


def test_first_come_first_served_rows_start_at_one() -> None:
    table = RowTable(3, 1, 2)
    assert [table.acquire() for _ in range(3)] == [(1, 1), (2, 1), (3, 1)]
    with pytest.raises(NoFreeRow, match="all 3 rows"):
        table.acquire()


def test_hazard_15_a_reused_row_is_a_new_generation() -> None:
    table = RowTable(1, 1, 1)
    assert table.acquire() == (1, 1)
    table.release(1)
    assert table.free_rows == 1
    assert table.acquire() == (1, 2)


def test_a_row_is_three_runs() -> None:
    table = RowTable(4, 3, 2)
    table.write_row(2, list(range(100, 100 + ROW_COLUMNS)), (7, 8), (5,))
    assert runs(table.take_deltas()) == [
        (DeltaTable.ROW_STATE, 2 * ROW_COLUMNS, list(range(100, 100 + ROW_COLUMNS))),
        (DeltaTable.PAGES, 6, [7, 8, -1]),
        (DeltaTable.STOP_IDS, 4, [5, -1]),
    ]


def test_a_row_with_biases_and_penalties_has_three_more() -> None:
    table = RowTable(4, 1, 1, max_biases=2, penalty_vocab=RUN_WORDS + 40)
    vocab = table.penalty_vocab
    for _ in range(2):  # the second time for one that was never launched
        table.write_row(2, [1] * ROW_COLUMNS, (7,), (5,))
        table.write_bias(2, [3, 9])
        table.count_from(2, [6] * table.widths[DeltaTable.SEEN_BITS])
    packet = table.take_deltas()
    found = [packet[at : at + 4] for at in range(DELTA_HEADER, DELTA_HEADER + 7 * 4, 4)]
    assert packet[:2] == [7, len(packet)]
    assert [run[:3] for run in found[3:5]] == [
        [DeltaTable.BIASES, 8, 2],
        [DeltaTable.SEEN_BITS, 2 * 258, 258],
    ]
    assert packet[found[3][3] :] == [3, 9, *[6] * 258]
    assert found[5:] == [
        [DeltaTable.TOKEN_COUNTS, 2 * vocab, RUN_WORDS, DELTA_ZEROS],
        [DeltaTable.TOKEN_COUNTS, 2 * vocab + RUN_WORDS, 40, DELTA_ZEROS],
    ]
    assert table.take_deltas() == []
    assert len(packet) <= table.delta_capacity


def test_neighbouring_rows_merge_into_the_same_runs() -> None:
    table = RowTable(4, 1, 1)
    for row in (2, 1):
        table.write_row(row, [row] * ROW_COLUMNS, (row,), ())
    assert runs(table.take_deltas()) == [
        (DeltaTable.ROW_STATE, ROW_COLUMNS, [1] * ROW_COLUMNS + [2] * ROW_COLUMNS),
        (DeltaTable.PAGES, 1, [1, 2]),
        (DeltaTable.STOP_IDS, 1, [-1, -1]),
    ]


def test_a_run_that_is_long_enough_takes_no_neighbour() -> None:
    table = RowTable(2, RUN_WORDS - 1, 1)
    for row in (1, 2):
        table.write_row(row, [row] * ROW_COLUMNS, (row,), ())
    pages = [run for run in runs(table.take_deltas()) if run[0] == DeltaTable.PAGES]
    assert [(offset, len(words)) for _, offset, words in pages] == [
        (RUN_WORDS - 1, RUN_WORDS - 1),
        (2 * RUN_WORDS - 2, RUN_WORDS - 1),
    ]


def test_a_kill_is_one_word() -> None:
    table = RowTable(4, 1, 1)
    table.kill(3)
    assert runs(table.take_deltas()) == [
        (DeltaTable.ROW_STATE, 3 * ROW_COLUMNS + RowColumn.ALIVE, [0])
    ]


def test_a_later_write_replaces_an_earlier_one() -> None:
    table = RowTable(2, 1, 1)
    table.kill(1)
    table.write_row(1, [1] * ROW_COLUMNS, (1,), ())
    (_, _, state), *_ = runs(table.take_deltas())
    assert state[RowColumn.ALIVE] == 1
    table.write_row(1, [1] * ROW_COLUMNS, (1,), ())
    table.kill(1)
    (_, _, state), *_ = runs(table.take_deltas())
    assert state[RowColumn.ALIVE] == 0


def test_pages_that_were_not_sent_yet_leave_with_their_row() -> None:
    table = RowTable(1, 4, 1)
    row, _ = table.acquire()
    table.append_pages(row, 1, [7])
    table.append_pages(row, 2, [8])
    table.release(row)
    table.write_row(row, [1] * ROW_COLUMNS, (3,), ())
    assert (DeltaTable.PAGES, 4, [3, -1, -1, -1]) in runs(table.take_deltas())


def test_hazard_36_deltas_are_taken_once() -> None:
    table = RowTable(2, 1, 1)
    assert table.take_deltas() == []
    table.kill(1)
    assert table.take_deltas() != []
    assert table.take_deltas() == []


def test_a_row_of_many_words_makes_few_objects() -> None:
    """A thousand stop ids, say: an object for each would take the loop most of a millisecond,
    and drive garbage collection.
    """
    table, stops = RowTable(2, 500, 1500), list(range(1500))
    gc.disable()
    try:
        before = len(gc.get_objects())
        table.write_row(1, [1] * ROW_COLUMNS, range(1, 500), stops)
        assert len(gc.get_objects()) - before < 20
    finally:
        gc.enable()
    assert runs(table.take_deltas())[2] == (DeltaTable.STOP_IDS, 1500, stops)


@given(
    rows=st.integers(1, 5),
    pages=st.integers(1, 4),
    stops=st.integers(1, 3),
    writes=st.lists(st.tuples(st.sampled_from(["write", "kill"]), st.integers(1, 5)), max_size=20),
)
def test_packets_say_what_was_written_and_fit_the_capacity(
    rows: int, pages: int, stops: int, writes: list[tuple[str, int]]
) -> None:
    table = RowTable(rows, pages, stops)
    expected: dict[tuple[int, int], int] = {}
    for number, (what, row) in enumerate(writes):
        row = min(row, rows)
        if what == "kill":
            table.kill(row)
            expected[0, row * ROW_COLUMNS + RowColumn.ALIVE] = 0
            continue
        table.write_row(row, [number] * ROW_COLUMNS, [number + 1] * pages, [number + 2] * stops)
        for kind, width, word in (
            (0, ROW_COLUMNS, number),
            (1, pages, number + 1),
            (2, stops, number + 2),
        ):
            expected.update({(kind, row * width + i): word for i in range(width)})
    packet = table.take_deltas()
    assert len(packet) <= table.delta_capacity
    applied = {
        (kind, at + i): word
        for kind, at, words in (runs(packet) if packet else [])
        for i, word in enumerate(words)
    }
    assert applied == expected


@pytest.mark.parametrize("order", [range(1, 9), range(1, 9, 2), range(8, 0, -1)])
def test_the_largest_packet_fits_the_capacity(order: range) -> None:
    table = RowTable(8, 1, 1)
    for row in order:
        table.write_row(row, [1] * ROW_COLUMNS, (1,), (1,))
    assert len(table.take_deltas()) <= table.delta_capacity


def test_no_row_has_a_page_before_it_is_written() -> None:
    """Row 0, the padding row, and rows that were never admitted."""
    tables = Runtime(device="cpu", max_rows=3, max_len=64, page_size=16).tables
    assert tables.page_table.tolist() == [[NO_PAGE] * 4] * 4
    assert not tables.row_state.any()


def test_pages_appended_to_a_row_that_has_left_are_not_its_successors() -> None:
    """No step was launched meanwhile, which would have taken them."""
    table = RowTable(2, 4, 1)
    table.append_pages(1, 2, (8,))
    table.append_pages(1, 3, (9,))
    table.write_row(1, [1] * ROW_COLUMNS, (5,), ())
    table.append_pages(1, 1, (6,))
    pages = [run for run in runs(table.take_deltas()) if run[0] == DeltaTable.PAGES]
    assert pages == [(DeltaTable.PAGES, 4, [5, 6, -1, -1])]


def test_pages_appended_twice_before_a_launch_are_one_run() -> None:
    table = RowTable(2, 4, 1)
    for held, pages in ((0, (4,)), (1, (5, 6))):
        table.append_pages(2, held, pages)
    assert runs(table.take_deltas()) == [(DeltaTable.PAGES, 8, [4, 5, 6])]
    table.append_pages(2, 3, (7,))
    assert runs(table.take_deltas()) == [(DeltaTable.PAGES, 11, [7])]
