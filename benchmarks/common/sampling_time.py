"""How long sampling takes by itself: the tail of a step, captured alone."""

from __future__ import annotations

import struct
from statistics import median

import torch

from benchmarks.common.result import BenchmarkError
from photon_ext import _C, ops
from photon_ext.layout import RECORD_WIDTH, ROW_COLUMNS, RowColumn, SegmentFlag
from photon_ext.runtime.streams import CudaStreams, HostStreams, Streams

REPEATS = 30


def sampling_ms(
    device: torch.device,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    stop_ids: int,
    temperature: float,
    fast: bool,
) -> float:
    """Median milliseconds of `sample_into` and `publish_` as one graph.

    Args:
        device: where they run.
        rows, vocab, dtype: the logits, [rows, vocab].
        stop_ids: ids to look through per token.
        temperature: of every row.
        fast: the kernel made for Hopper, where it runs: what the step that is taken apart runs.
    """
    streams: Streams = (
        CudaStreams(_indexed(device), None) if device.type == "cuda" else HostStreams(inline=False)
    )

    def words(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    state = words(rows + 1, ROW_COLUMNS)  # row 0 is nobody's
    state[:, RowColumn.REMAINING] = 1 << 30
    state[:, RowColumn.ALIVE] = 1
    state[:, RowColumn.STOP_COUNT] = stop_ids
    state[:, RowColumn.TEMPERATURE] = struct.unpack("<i", struct.pack("<f", temperature))[0]
    segments = words(rows, 4)
    segments[:, 0], segments[:, 1] = torch.arange(1, rows + 1), torch.arange(rows)
    segments[:, 2], segments[:, 3] = 1, int(SegmentFlag.SAMPLE)
    # looked through, never met: a row that stops would make the next turn cheaper
    stops = words(rows + 1, max(1, stop_ids)) - 1
    tables = [state, words(rows + 1, 1), stops]
    logits = torch.randn(
        rows, vocab, generator=torch.Generator(device=device).manual_seed(0), device=device
    ).to(dtype)
    sampled, records = words(rows), words(rows, RECORD_WIDTH)

    def tail() -> None:
        ops.sample_into(sampled, logits, segments, state, hopper=fast)
        ops.publish_(tables, records, sampled, segments)

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with streams.on_compute():
            tail()
        streams.synchronize()
    graph = streams.capture(tail)
    begin, end = (_C.Event(streams.backend, timing=True, device=streams.device) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        streams.compute.record(begin)
        streams.compute.launch(graph)
        streams.compute.record(end)
        end.synchronize()
        times.append(end.elapsed_ms(begin))
    streams.synchronize()
    if int(sampled.min()) < 0:
        raise BenchmarkError(f"rows were not sampled: {sampled.tolist()}")
    return median(times[REPEATS // 3 :])


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
