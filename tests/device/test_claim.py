"""A claimed thread's photon ops go to the stream: they are enqueued, recorded while it captures,
and run at once when nobody claims.
"""

from __future__ import annotations

import threading

import pytest
import torch

import photon_ext  # noqa: F401  registers the ops and binds their queue
from photon_ext import _C


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def carry(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source, by a photon op. The caller keeps the tensors alive until the op has run."""
    torch.ops.photon_ext.carry_over_ids_(target, source, CARRY_ALL)


CARRY_ALL = ids(0)


def test_ops_run_in_the_streams_order(kernels, flag):
    stream, source, target = _C.Stream.create("host"), ids(0), ids(0)
    kernels.wait_for_flag(stream, flag)
    kernels.multiply_add(stream, source, 1, 7)
    with stream.claim() as claimed:
        assert claimed is stream
        carry(target, source)
    assert target.item() == 0, "the op ran before what was enqueued ahead of it"
    flag[0] = 1
    stream.synchronize()
    assert target.item() == 7


def test_ops_are_recorded_by_a_capture(backend, stream):
    source, target = ids(3), ids(0)
    stream.begin_capture()
    with stream.claim():
        carry(target, source)
    graph = stream.end_capture()
    assert (graph.nodes, target.item()) == (1, 0)
    source[0] = 9
    stream.launch(graph)
    stream.synchronize()
    assert target.item() == 9


def test_ops_of_an_unclaimed_thread_run_at_once(kernels, flag):
    stream, source, target, elsewhere = _C.Stream.create("host"), ids(5), ids(0), ids(0)
    kernels.wait_for_flag(stream, flag)
    with stream.claim():
        worker = threading.Thread(target=lambda: carry(elsewhere, source))
        worker.start()
        worker.join()
    assert elsewhere.item() == 5, "a claim is of one thread"
    carry(target, source)
    assert target.item() == 5
    flag[0] = 1


def test_claims_nest(kernels, flag):
    outer, inner = _C.Stream.create("host"), _C.Stream.create("host")
    source, first, second, third = ids(4), ids(0), ids(0), ids(0)
    kernels.wait_for_flag(outer, flag)
    with outer.claim():
        with inner.claim():
            carry(first, source)
        inner.synchronize()
        carry(second, source)
        with _C.Stream.create("inline").claim():
            carry(third, source)
        assert (first.item(), second.item(), third.item()) == (4, 0, 4)
    flag[0] = 1
    outer.synchronize()
    assert second.item() == 4


def test_a_claim_ends_with_an_exception(kernels, flag):
    stream, source, target = _C.Stream.create("host"), ids(6), ids(0)
    kernels.wait_for_flag(stream, flag)

    def fail_claimed() -> None:
        with stream.claim():
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail_claimed()
    carry(target, source)
    assert target.item() == 6
    flag[0] = 1


def test_a_claim_is_left_where_it_was_entered(stream):
    claim = stream.claim()
    with pytest.raises(RuntimeError, match="left without having been entered"):
        claim.__exit__(None, None, None)
    claim.__enter__()
    errors: list[str] = []

    def leave_elsewhere() -> None:
        try:
            claim.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    worker = threading.Thread(target=leave_elsewhere)
    worker.start()
    worker.join()
    claim.__exit__(None, None, None)
    assert len(errors) == 1
    assert "a claim belongs to one thread" in errors[0]
