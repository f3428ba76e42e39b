"""Streams that torch remembers outlive the runtime that had them."""

from __future__ import annotations

import gc

import pytest
import torch

from photon_ext import ops
from photon_ext.runtime.streams import CudaStreams, HostStreams, lasting_stream


class Owner:
    pass


def test_a_cpu_graph_keeps_the_memory_that_functional_ops_took() -> None:
    streams = HostStreams(inline=False)
    x, out, segments = torch.zeros(3, 64), torch.zeros(2, 8), torch.zeros(2, 4, dtype=torch.int32)
    segments[:, 1:3] = torch.tensor([[0, 1], [1, 2]])
    weights = [torch.randn(64, 64), torch.randn(64), torch.randn(8, 64)]

    def body(x: torch.Tensor, out: torch.Tensor) -> None:
        hidden = ops.rms_norm(ops.linear(x, weights[0]), weights[1], 1e-6)
        ops.linear_into(out, ops.select_tokens(hidden, segments), weights[2])

    graph = streams.capture(lambda: body(x, out))
    gc.collect()
    others = [torch.full((3, 64), torch.nan) for _ in range(64)]  # in the memory of dropped tensors
    for _ in range(3):
        x.normal_()
        expected = torch.zeros(2, 8)
        body(x, expected)
        streams.compute.launch(graph)
        streams.compute.synchronize()
        assert torch.equal(out, expected)
    assert all(one.isnan().all() for one in others)


def test_a_lasting_stream_goes_from_owner_to_owner() -> None:
    first, second = Owner(), Owner()
    streams = [lasting_stream(owner, "inline", 0) for owner in (first, second)]
    assert streams[0] is not streams[1]
    del first
    third, fourth = Owner(), Owner()
    assert lasting_stream(third, "inline", 0) is streams[0]
    assert lasting_stream(fourth, "inline", 0) not in streams


@pytest.mark.gpu
def test_pinned_memory_may_be_freed_after_the_runtime_that_read_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    target = torch.zeros(1024, device=device)
    torch.cuda.synchronize()
    gc.collect()  # none of other tests' streams becomes idle in here
    for value in range(20):
        streams = CudaStreams(device, None)
        pinned = torch.full((1024,), float(value)).pin_memory()
        with streams.on_in_copy():
            target.copy_(pinned, non_blocking=True)
        streams.synchronize()
        handle = streams.in_copy.handle
        del streams
        del pinned  # torch records an event on the stream
        assert torch.equal(target.cpu(), torch.full((1024,), float(value)))
        assert CudaStreams(device, None).in_copy.handle == handle
