"""When a step fails half-way: the pipeline says so from then on, and memory outlives the work
that still uses it.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from photon_ext import _C, ops
from photon_ext.errors import ConfigError, PipelineError
from photon_ext.runtime import Pipeline, RowParams, Runtime, StepTensors

VOCAB = 11


class Forward:
    """Logits that prefer the token after the last one; raises when told to."""

    def __init__(self) -> None:
        self.table = torch.eye(VOCAB).roll(1, dims=1).contiguous()
        self.num_tokens = torch.zeros(64, VOCAB)
        self.logits = torch.zeros(4, VOCAB)
        self.fail = False

    def __call__(self, step: StepTensors) -> None:
        if self.fail:
            raise RuntimeError("out of luck")
        num_tokens, logits = (
            self.num_tokens[: len(step.decode_meta)],
            self.logits[: len(step.segments)],
        )
        ops.embedding_into(num_tokens, step.decode_meta, self.table)
        ops.select_tokens_into(logits, num_tokens, step.segments)
        step.logits = logits


def make(forward: Callable[[StepTensors], None], graph: bool, depth: int = 2) -> Pipeline:
    runtime = Runtime(max_rows=2, max_len=32, depth=depth, device="cpu")
    return Pipeline(runtime, forward, vocab_size=VOCAB, chunk=8, graph=graph)


def assert_every_call_says(pipeline: Pipeline, why: str) -> None:
    for call in (pipeline.launch, pipeline.commit, pipeline.finalize, pipeline.tick):
        with pytest.raises(PipelineError, match=why):
            call()


def test_a_forward_that_raises_ends_the_pipeline_and_every_call_says_why() -> None:
    forward = Forward()
    pipeline = make(forward, graph=False)
    row = pipeline.admit([1, 2], RowParams(9))
    pipeline.tick()
    forward.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        pipeline.tick()
    assert_every_call_says(pipeline, "cannot go on: RuntimeError: out of luck")
    assert pipeline.abort(row)


def test_late_sampling_that_raises_ends_the_pipeline_and_every_call_says_why() -> None:
    """Its masks are sent, and nothing was sampled with them: the step can neither be finalized
    again nor be committed.
    """

    def sample(step: StepTensors) -> None:
        raise RuntimeError("no dice")

    runtime = Runtime(max_rows=2, max_len=32, device="cpu")
    pipeline = Pipeline(runtime, Forward(), vocab_size=VOCAB, sample=sample, chunk=8, graph=False)
    row = pipeline.admit([1, 2], RowParams(9, constrained=True))
    pipeline.launch()
    with pytest.raises(RuntimeError, match="no dice"):
        pipeline.finalize(lambda row, words: None)
    assert_every_call_says(pipeline, "cannot go on: RuntimeError: no dice")
    assert pipeline.abort(row)


def test_a_commit_that_raises_ends_the_pipeline_and_every_call_says_why() -> None:
    """The step is half read: rows before the bad one have their tokens, and nobody hears of
    them.
    """

    def sample(step: StepTensors) -> None:
        step.sampled[0], step.sampled[1] = 3, VOCAB

    runtime = Runtime(max_rows=2, max_len=32, device="cpu")
    pipeline = Pipeline(runtime, Forward(), vocab_size=VOCAB, sample=sample, chunk=8, graph=False)
    rows = [pipeline.admit([one], RowParams(9)) for one in (1, 2)]
    pipeline.launch()
    with pytest.raises(PipelineError, match=f"sampling gave token {VOCAB}"):
        pipeline.commit()
    assert_every_call_says(pipeline, f"cannot go on: PipelineError: .*sampling gave token {VOCAB}")
    assert [pipeline.abort(row) for row in rows] == [True, True]


def test_a_row_is_aborted_by_the_pipeline_that_admitted_it() -> None:
    """Both rows have index 1: the other pipeline's goes on."""
    pipelines = [make(Forward(), graph=True) for _ in range(2)]
    rows = [pipeline.admit([1, 2], RowParams(2)) for pipeline in pipelines]
    with pytest.raises(PipelineError, match="was admitted by another pipeline; abort it there"):
        pipelines[0].abort(rows[1])
    for pipeline, row in zip(pipelines, rows, strict=True):
        tokens = []
        while pipeline.busy:
            tokens += [(event.row, *event.tokens) for event in pipeline.tick()]
        assert tokens == [(row, 3), (row, 4)]


def test_a_forward_that_cannot_be_captured_leaves_the_runtime_usable() -> None:
    runtime = Runtime(max_rows=2, max_len=32, device="cpu")
    forward = Forward()
    forward.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        Pipeline(runtime, forward, vocab_size=VOCAB, chunk=8)
    forward.fail = False
    pipeline = Pipeline(runtime, forward, vocab_size=VOCAB, chunk=8)
    pipeline.admit([3], RowParams(3))
    tokens = []
    while pipeline.busy:
        tokens += [token for event in pipeline.tick() for token in event.tokens]
    assert tokens == [4, 5, 6]


def test_a_runtime_serves_one_pipeline() -> None:
    pipeline = make(Forward(), graph=True)
    with pytest.raises(ConfigError, match="already serves a Pipeline"):
        Pipeline(pipeline._runtime, Forward(), vocab_size=VOCAB)


def test_every_step_knows_the_largest_length_there_can_be() -> None:
    found = set()

    class Looking(Forward):
        def __call__(self, step: StepTensors) -> None:
            found.add(step.max_length)
            super().__call__(step)

    runtime = Runtime(max_rows=2, max_len=24, device="cpu")
    pipeline = Pipeline(runtime, Looking(), vocab_size=VOCAB, chunk=8, graph=False)
    pipeline.admit([3], RowParams(3))
    while pipeline.busy:
        pipeline.tick()
    assert found == {24}


def test_torch_code_is_refused_in_a_cpu_graph_by_name() -> None:
    def forward(step: StepTensors) -> None:
        step.logits = torch.zeros(len(step.segments), VOCAB)

    with pytest.raises(
        Exception, match=r"aten\.zeros.*cannot be recorded into a CPU graph.*graph=False"
    ):
        Pipeline(Runtime(max_rows=1, max_len=8, device="cpu"), forward, vocab_size=VOCAB)


def sleep_on(stream: _C.Stream, seconds: float) -> None:
    """Keeps a host stream busy: nanosleep has the shape of a host kernel."""
    address = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p).value
    stream.enqueue(address, struct.pack("qq", 0, int(seconds * 1e9)))


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_memory_outlives_the_work_of_a_pipeline_that_is_dropped(
    depth: int, constrained: bool
) -> None:
    """A step waits behind a sleep, finished or, constrained, still without its sampling; the
    forward's buffers must wait with it.
    """
    forward = Forward()
    pipeline = make(forward, graph=True, depth=depth)
    freed: list[float] = []
    weakref.finalize(forward, lambda: freed.append(time.perf_counter()))
    pipeline.admit([1, 2], RowParams(9, constrained=constrained))
    begin = time.perf_counter()
    sleep_on(pipeline._runtime.streams.compute, 0.3)
    pipeline.launch()
    del pipeline, forward
    gc.collect()
    assert freed
    assert freed[0] - begin > 0.29


@pytest.mark.parametrize("graph", [True, False])
def test_an_engine_that_owns_its_pipeline_and_its_forward_is_collected(graph: bool) -> None:
    class Owner:
        def __init__(self) -> None:
            self.inner = Forward()
            self.pipeline = make(self.forward, graph)

        def forward(self, step: StepTensors) -> None:
            self.inner(step)

    owner = Owner()
    owner.pipeline.admit([1, 2], RowParams(3))
    owner.pipeline.tick()
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
