"""What a Runtime and a Pipeline are made with is checked when it is given; the message names the
argument, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from photon_ext import _C
from photon_ext.errors import ConfigError, DeviceError, RequestError
from photon_ext.runtime import Pipeline, RowParams, RowTable, Runtime, StepTensors
from photon_ext.testing import SimRuntime

RANGE = r"give an integer from 1 to 2147483647"


def make(kind: type, **options: Any) -> Any:
    return kind(**({"device": "cpu", "max_len": 64, **options} if kind is Runtime else options))


def forward(step: object) -> None:
    raise AssertionError("not called")


@pytest.mark.parametrize("kind", [Runtime, SimRuntime])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, f"max_rows is 0; {RANGE}"),
        ({"max_rows": 1.5}, f"max_rows is 1.5; {RANGE}"),
        ({"max_rows": "a"}, f"max_rows is 'a'; {RANGE}"),
        ({"max_rows": None}, f"max_rows is None; {RANGE}"),
        ({"max_rows": True}, f"max_rows is True; {RANGE}"),
        ({"max_len": 3.5}, f"max_len is 3.5; {RANGE}"),
        ({"max_len": 2**31}, f"max_len is 2147483648; {RANGE}"),
        ({"page_size": "4"}, f"page_size is '4'; {RANGE}"),
        ({"page_size": 0}, f"page_size is 0; {RANGE}"),
        ({"max_stop_ids": -1}, f"max_stop_ids is -1; {RANGE}"),
        ({"max_stop_ids": 10**12}, f"max_stop_ids is 1000000000000; {RANGE}"),
        ({"depth": 3}, r"depth is 3; give 1 \(the blocking loop\) or 2"),
        ({"depth": "2"}, "depth is '2'; give 1"),
        ({"depth": 2.0}, "depth is 2.0; give 1"),
        ({"depth": True}, "depth is True; give 1"),
    ],
)
def test_a_bad_runtime_says_what_is_wrong(
    kind: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **options)


@pytest.mark.parametrize("kind", [Runtime, SimRuntime])
def test_an_integer_of_another_kind_will_do(kind: type) -> None:
    runtime = make(kind, max_rows=torch.tensor(3), page_size=torch.tensor(16))
    assert (runtime.table.max_rows, runtime.page_size, runtime.table.pages_per_row) == (3, 16, 4)


@pytest.mark.parametrize("device", [None, 2.5, "tpus"])
def test_a_device_that_is_none_is_named(device: Any) -> None:
    with pytest.raises(DeviceError, match=f"device {device!r} is not one torch knows"):
        Runtime(device=device)


def test_tables_that_int32_cannot_count_are_refused_before_they_are_made() -> None:
    with pytest.raises(
        ConfigError,
        match="max_rows 32, each with 1 pages, max_stop_ids 1000000000 and penalty_vocab 0, make "
        "tables of 33000001885 words",
    ):
        Runtime(device="cpu", max_stop_ids=10**9)
    with pytest.raises(
        ConfigError, match=r"max_rows 2147483647, .* make one of them smaller, or page_size larger"
    ):
        RowTable(2**31 - 1, 1, 1)
    with pytest.raises(ConfigError, match="penalty_vocab 150000, make tables of 2250150000 words"):
        RowTable(15000, 1, 1, penalty_vocab=150000)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, f"vocab_size is 0; {RANGE}"),
        ({"vocab_size": 2**33}, f"vocab_size is 8589934592; {RANGE}"),
        ({"vocab_size": "32"}, f"vocab_size is '32'; {RANGE}"),
        ({"chunk": 2.0}, "chunk is 2.0; give an integer from 1 to 536870911"),
        ({"chunk": 10**10}, "chunk is 10000000000; give an integer from 1 to 536870911"),
        ({"buckets": 5}, "buckets is 5; give a tuple of integers from 1 on"),
        ({"buckets": (1, "2")}, f"an entry of buckets is '2'; {RANGE}"),
        ({"prefill_buckets": 5}, "prefill_buckets is 5; give a tuple of integers from 1 on"),
        ({"prefill_buckets": (-3,)}, f"an entry of prefill_buckets is -3; {RANGE}"),
        ({"mixed": None}, "mixed is None; give True or False"),
        ({"forward": 5}, "forward is 5; give a function$"),
        ({"forward": None}, "forward is None; give a function$"),
        ({"sample": 5}, "sample is 5; give a function, or None"),
        ({"on_release": 5}, "on_release is 5; give a function, or None"),
    ],
)
def test_a_bad_pipeline_says_what_is_wrong_and_leaves_the_runtime_as_it_was(
    options: dict[str, Any], message: str, graph: bool
) -> None:
    runtime = SimRuntime()
    good: dict[str, Any] = {"forward": forward, "vocab_size": 32, "graph": graph}
    with pytest.raises(ConfigError, match=message):
        Pipeline(runtime, **{**good, **options})
    Pipeline(runtime, **good)


def test_buckets_may_come_from_a_generator() -> None:
    def buckets() -> Iterator[int]:
        yield from (1, 2)

    pipe = Pipeline(SimRuntime(), forward, vocab_size=32, buckets=buckets())
    assert pipe.keys.decode_buckets == (1, 2, 4)


def test_tables_without_memory_name_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*shape: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        ConfigError,
        match=r"there is not enough memory on cpu for max_rows 7, max_len 64, .* make one of them",
    ):
        Runtime(device="cpu", max_rows=7, max_len=64)


@pytest.mark.parametrize("place", ["tensors", "pinned"])
def test_slots_without_memory_name_their_arguments_and_leave_the_runtime_as_it_was(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise (
            RuntimeError("DefaultCPUAllocator: can't allocate memory")
            if place == "tensors"
            else MemoryError
        )

    runtime = Runtime(device="cpu", max_rows=3, max_len=64)
    with monkeypatch.context() as patched:
        patched.setattr(*((torch, "zeros") if place == "tensors" else (_C, "PinnedBuffer")), fail)
        with pytest.raises(
            ConfigError,
            match="there is not enough memory on cpu for max_rows 3, chunk 99, vocab_size 32; make "
            "one of them smaller",
        ):
            Pipeline(runtime, forward, vocab_size=32, chunk=99, graph=False)
    Pipeline(runtime, forward, vocab_size=32, chunk=99, graph=False)


def test_the_largest_context_has_room_for_the_largest_cap() -> None:
    """Whatever a runtime takes as max_len fits the device's int32, and so does every cap up to
    it: no row beside it comes to harm.
    """

    def greedy_zero(step: StepTensors) -> None:
        step.logits = torch.zeros(len(step.segments), 32)

    pipeline = Pipeline(
        Runtime(device="cpu", max_rows=2, max_len=2**31 - 1),
        greedy_zero,
        vocab_size=32,
        graph=False,
    )
    row, other = (
        pipeline.admit([1], RowParams(2**31 - 1)),
        pipeline.admit([2], RowParams(3)),
    )
    with pytest.raises(
        RequestError, match="max_new_tokens 2147483647 exceed the context of 2147483647"
    ):
        pipeline.admit([1, 2], RowParams(2**31 - 1))
    tokens = 0
    while other.running:
        tokens += sum(event.row is other for event in pipeline.tick())
    assert (tokens, row.running) == (3, True)
