"""Captured mixed steps: their graphs give the tokens, keys and values of eager and of separate
steps, however prompts are cut, whoever waits for masks or leaves in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch

from photon_ext.errors import ConfigError
from photon_ext.layout import RECORD_WIDTH, SEGMENT_COLUMNS, RecordFlag
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import KernelPlan
from photon_ext.row_params import RowParams
from photon_ext.runtime import Pipeline, Runtime
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Chunk, StepKey, StepKind, StepPlan
from photon_ext.runtime.step_graph import StepGraph
from photon_ext.runtime.step_program import StepProgram
from photon_ext.testing import Random, Request, SimRuntime
from tests.runtime.simulated import MODEL, follow, pipeline
from tests.runtime.test_plans import Planned
from tests.runtime.test_replay import CONFIG, MAX_LEN, PAGE, PAGES_PER_ROW, ROWS, weights_on

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPTS = (6, 11, 4)
CUTS = ((3,), (4, 8), (2,))
MOVES = list(product((-1, 0, 1), repeat=4))
Cuts = tuple[tuple[int, ...], ...]


def moved(moves: Iterable[int]) -> Cuts:
    """The chunk boundaries of each prompt, every one moved by so much."""
    by = iter(moves)
    return tuple(tuple(cut + next(by) for cut in cuts) for cuts in CUTS)


def cut_at(cuts: Cuts) -> Callable[[Pipeline], StepPlan]:
    """Decode rows always ride; each prompt goes to its next boundary, or, from the second on, waits
    until the prompts before have gone half way, so that chunks meet rows that decode.
    """

    def plan(pipe: Pipeline) -> StepPlan:
        chunks = []
        for row in pipe.running_set.prefill[:2]:
            ends = (*cuts[PROMPTS.index(len(row.prompt_ids))], len(row.prompt_ids))
            end = next(end for end in ends if end > row.prefilled)
            chunks.append(Chunk(row, end - row.prefilled))
        return StepPlan(pipe.running_set.decode, tuple(chunks))

    return plan


# --- the simulated device -------------------------------------------------------------------------


@DEPTHS
def test_hazard_24_to_27_tokens_do_not_depend_on_where_prompts_are_cut(depth: int) -> None:
    """Rows with different pasts, padding in both parts, chunks of different lengths beside rows of
    one token, and no token of a chunk that does not end its prompt; one row waits for masks.
    """
    asked = [
        Request(tuple(range(length)), 9 - i, allowed=follow if i == 1 else None)
        for i, length in enumerate(PROMPTS)
    ]
    expected = [MODEL.generate(request) for request in asked]
    for seed, moves in enumerate(MOVES):
        runtime = SimRuntime(5, 32, depth, page_size=4, chooser=Random(seed))
        driver = Planned(
            runtime,
            cut_at(moved(moves)),
            pages=40,
            buckets=(1, 4),
            prefill_buckets=(4, 16),
            mixed=True,
            chunk=16,
        )
        assert driver.run(*asked) == expected
        assert StepKind.MIXED in driver.kinds
        assert runtime.stats.slow == []


@DEPTHS
@pytest.mark.parametrize("ticks", range(0, 12, 2))
def test_a_cancel_between_mixed_steps_touches_no_other_request(ticks: int, depth: int) -> None:
    asked = [Request(tuple(range(length)), 7) for length in PROMPTS]
    for leaving in range(3):
        driver = Planned(
            SimRuntime(4, 32, depth, page_size=4, chooser=Random(ticks)),
            cut_at(CUTS),
            pages=32,
            prefill_buckets=(16,),
            mixed=True,
            chunk=16,
        )
        outcomes = [driver.submit(request) for request in asked]
        for _ in range(ticks):
            driver.tick()
        driver.cancel(outcomes[leaving])
        while driver.busy:
            driver.tick()
        for i, outcome in enumerate(outcomes):
            expected = MODEL.generate(outcome.request)
            assert tuple(outcome.tokens) == (expected[: len(outcome.tokens)])
            assert i == leaving or tuple(outcome.tokens) == expected
        assert sorted(driver.free_pages) == list(range(32))


def test_the_key_and_the_words_of_a_captured_mixed_step() -> None:
    pipe = pipeline(
        SimRuntime(5, depth=1), buckets=(1, 4), prefill_buckets=(4, 16), mixed=True, chunk=16
    )
    rows = [pipe.admit((1,) * size, RowParams(9)) for size in (2, 3, 4, 4)]
    launched: list[array[int]] = []
    slot = pipe._slots[0]
    launch = slot.launch
    slot.launch = lambda *step: (launched.append(step[1]), launch(*step))[1]  # type: ignore[method-assign]
    pipe.launch(StepPlan((), (Chunk(rows[0], 2), Chunk(rows[1], 3))))
    pipe.commit()
    step = pipe.launch(StepPlan((rows[1], rows[0]), (Chunk(rows[3], 4), Chunk(rows[2], 1))))
    assert step is not None
    assert step.key == StepKey(4, 16, 3, False)
    words = launched[1].tolist()
    assert [words[i : i + 4] for i in range(0, len(words), 4)] == [
        [rows[1].index, 0, 1, 1],
        [rows[0].index, 1, 1, 1],
        [0] * 4,
        [0] * 4,
        [rows[3].index, 4, 4, 5],  # staged, and sampled
        [rows[2].index, 8, 1, 4],
        [0] * 4,
    ]
    assert [event.row for event in pipe.commit()] == [rows[1], rows[0], rows[3]]


@pytest.mark.parametrize(
    ("decoding", "tokens", "key"),
    [
        (1, 1, (1, 1, 1)),
        (1, 2, (1, 2, 2)),
        (1, 3, (1, 8, 5)),
        (2, 2, (3, 2, 2)),
        (3, 8, (3, 8, 4)),
        (3, 9, (3, 9, 1)),  # no graph takes 9: as it is, without padding
        (4, 1, (6, 1, 1)),
        (5, 8, (6, 8, 2)),
        (5, 9, (5, 9, 1)),
    ],
)
@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_gets_the_smallest_graph_that_holds_it(
    decoding: int, tokens: int, key: tuple[int, int, int], constrained: bool
) -> None:
    pipe = pipeline(
        SimRuntime(6, depth=1), buckets=(1, 3), prefill_buckets=(1, 2, 8), mixed=True, chunk=12
    )
    for _ in range(decoding):
        pipe.admit((1,), RowParams(9, constrained=constrained))
    pipe.tick(lambda row, words: words.__setitem__(0, -1))
    waiting = pipe.admit((2,) * 12, RowParams(9))
    step = pipe.launch(StepPlan(pipe.running_set.decode, (Chunk(waiting, tokens),)))
    assert step is not None
    assert step.key == StepKey(*key, constrained)


# --- the host -------------------------------------------------------------------------------------


class Host:
    """Requests on the host's own kernels, in fp32.

    Attributes:
        kinds: of the steps that ran.
        captured: how many of the mixed ones were replayed.
    """

    def __init__(self, depth: int, graph: bool = True, mixed: bool = True) -> None:
        self.decoder = Decoder(
            CONFIG,
            weights_on("cpu"),
            64,
            2 * ROWS,
            MAX_LEN,
            PAGE,
            ROWS * PAGES_PER_ROW,
            plan=KernelPlan(),
        )
        self.pipe = Pipeline(
            Runtime(max_rows=ROWS, max_len=MAX_LEN, depth=depth, device="cpu", page_size=PAGE),
            self.decoder.forward,
            vocab_size=CONFIG.vocab,
            buckets=(1, 2),
            prefill_buckets=(5, 16),
            mixed=mixed,
            chunk=16,
            graph=graph,
        )
        self.kinds: set[StepKind] = set()
        self.captured = 0

    def tokens(
        self,
        planner: Callable[[Pipeline], StepPlan] | None,
        constrained: int = -1,
        leaves: tuple[int, int] | None = None,
    ) -> list[list[int]]:
        """Tokens of a request for each of PROMPTS; `constrained` names one, `leaves` one that is
        cancelled and after how many commits.
        """
        pipe = self.pipe
        rows = [
            pipe.admit(
                [(7 * i + 3 * j) % CONFIG.vocab for j in range(length)],
                RowParams(12 - i, constrained=i == constrained, temperature=0.5 * i, seed=i),
                range(i * PAGES_PER_ROW, (i + 1) * PAGES_PER_ROW),
            )
            for i, length in enumerate(PROMPTS)
        ]
        found: dict[Row, list[int]] = {row: [] for row in rows}
        commits = 0
        while pipe.busy:
            pipe.finalize(_allow_even)
            plan = planner(pipe) if planner else None
            step = pipe.launch(plan) if pipe.can_launch else None
            if step is not None:
                self.kinds.add(step.key.kind)
                captured = step.key in self.pipe.keys.all()
                self.captured += captured and step.key.kind is StepKind.MIXED
            pipe.finalize(_allow_even)
            if step is None or not pipe.can_launch:
                for event in pipe.commit():
                    found[event.row] += event.tokens
                commits += 1
                if leaves is not None and commits == leaves[1]:
                    pipe.abort(rows[leaves[0]])
        return [found[row] for row in rows]

    def kv(self) -> list[torch.Tensor]:
        """Keys and values of every position that the requests have filled, by request."""
        layers = [*self.decoder._kv.keys, *self.decoder._kv.values]
        found = []
        for i, length in enumerate(PROMPTS):
            pages = slice(i * PAGES_PER_ROW, (i + 1) * PAGES_PER_ROW)
            filled = length + 12 - i - 1
            found.append(torch.stack([one[pages].flatten(0, 1)[:filled] for one in layers]))
        return found


def _allow_even(row: Row, words: memoryview) -> None:
    words[:] = array("i", [0x55555555] * len(words))


@DEPTHS
@pytest.mark.parametrize("constrained", [-1, 0, 1])
def test_i8_mixed_steps_equal_separate_ones_to_the_bit(depth: int, constrained: int) -> None:
    """Tokens, keys and values, with every chunk boundary moved by one to either side."""
    separate = Host(depth, mixed=False)
    expected = separate.tokens(None, constrained)
    expected_kv = separate.kv()
    assert separate.kinds == {StepKind.PREFILL, StepKind.DECODE}
    mixed = Host(depth)
    for moves in MOVES[:: 1 if constrained < 0 else 4]:
        assert mixed.tokens(cut_at(moved(moves)), constrained) == expected
        assert all(map(torch.equal, mixed.kv(), expected_kv))
    assert StepKind.MIXED in mixed.kinds
    assert mixed.captured > len(MOVES) / 4


@DEPTHS
@pytest.mark.parametrize("leaving", range(3))
def test_who_leaves_between_mixed_steps_changes_no_other_row(depth: int, leaving: int) -> None:
    expected = Host(1, graph=False).tokens(None)
    mixed = Host(depth)
    for commits in range(1, 9):
        tokens = mixed.tokens(cut_at(CUTS), leaves=(leaving, commits))
        for i, (own, whole) in enumerate(zip(tokens, expected, strict=True)):
            assert own == (whole if i != leaving else whole[: len(own)])
    assert mixed.captured


@DEPTHS
def test_captured_mixed_steps_equal_eager_ones(depth: int) -> None:
    eager, captured = Host(depth, graph=False), Host(depth)
    for moves in MOVES[::8]:
        plan = cut_at(moved(moves))
        assert captured.tokens(plan, constrained=1) == eager.tokens(plan, constrained=1)
        assert all(map(torch.equal, captured.kv(), eager.kv()))
    assert (eager.captured, bool(captured.captured)) == (0, True)


@DEPTHS
@pytest.mark.parametrize("split", [False, True])
def test_hazard_25_a_mixed_step_of_padding_alone_writes_nothing(depth: int, split: bool) -> None:
    host = Host(depth)
    for layer in (*host.decoder._kv.keys, *host.decoder._kv.values):
        layer.zero_()  # whatever lies there may be no number, which equals nothing
    host.tokens(cut_at(CUTS))
    slot, tables = host.pipe._slots[0], host.pipe._runtime.tables  # type: ignore[attr-defined]
    before = [host.decoder._kv.keys[0].clone(), *(table.clone() for table in tables)]
    for key in host.pipe.keys.all():
        if key.kind is StepKind.MIXED and key.split == split:
            slot.launch(
                key, array("i", bytes(4 * SEGMENT_COLUMNS * key.segments)), (), (), not split
            )
            if split:
                slot.finalize(key)
            records = slot.wait(key.segments).tolist()
            assert set(records[3::RECORD_WIDTH]) == {int(RecordFlag.DEAD)}
    assert all(map(torch.equal, before, [host.decoder._kv.keys[0], *tables]))


def test_the_report_tells_the_keys_and_counts_three_graphs_for_each() -> None:
    """One graph of a whole step, two of a split one, for each slot."""
    host = Host(2)
    report = host.pipe._runtime.report  # type: ignore[attr-defined]
    assert report.keys == host.pipe.keys.all()
    pairs = len(report.keys) // 2
    assert pairs == 3 + 2 + 3 * 2
    assert report.graphs == 3 * 2 * pairs
    eager = Host(1, graph=False).pipe._runtime.report  # type: ignore[attr-defined]
    assert (eager.keys, eager.graphs) == ((), 0)


def test_hazard_22_graphs_are_captured_at_start_up_largest_first_and_none_while_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[StepKey] = []
    capture = StepGraph._capture_key

    def watched(graphs: StepGraph, slot: int, key: StepKey, program: StepProgram) -> None:
        captured.append(key)
        capture(graphs, slot, key, program)

    monkeypatch.setattr(StepGraph, "_capture_key", watched)
    host = Host(2)
    sizes = [key.num_tokens for key in captured]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(captured) == sorted(2 * host.pipe.keys.all())
    host.tokens(cut_at(CUTS))
    assert len(captured) == len(sizes)


def test_a_forward_with_too_little_room_for_mixed_steps_says_so() -> None:
    logits = torch.zeros(ROWS, 8)

    def forward(step: object) -> None:
        step.logits = logits[: len(step.segments)]  # type: ignore[attr-defined]

    runtime = Runtime(max_rows=ROWS, max_len=8, device="cpu")
    with pytest.raises(
        ConfigError, match=r"step.logits of shape \(4, 8\).* expected shape \(5, 8\)"
    ):
        Pipeline(runtime, forward, vocab_size=8, buckets=(1, 2), mixed=True)
