"""The read floor: the fastest read-only sweep of a large buffer that we find on this machine. No
decode step can be faster than its bytes over this figure.

    python -m benchmarks.floor [--device cuda|cpu] [--gib N] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.options import device_of, parser, positive_number
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.table import print_table
from photon_ext.engine.memory import available_bytes

GIB = 1 << 30
CUDA_BYTES, CPU_BYTES = 9 * GIB, GIB
LEFT_FREE = 4 * GIB
UNIT = 512  # bytes, of which a buffer has a whole number
REPEATS = 7

# Sums 32-bit words: 16-byte loads, several in flight per thread, every thread slot of the chip
# taken, one atomic per warp.
SWEEP_SOURCE = """
extern "C" __global__ void __launch_bounds__(512)
sweep(const uint4* __restrict__ data, unsigned* out, int vectors) {
  constexpr int kUnroll = 8;
  const long long stride = 1ll * gridDim.x * blockDim.x;
  unsigned sum = 0;
  long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < vectors; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) v[k] = data[i + k * stride];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) sum += v[k].x + v[k].y + v[k].z + v[k].w;
  }
  for (; i < vectors; i += stride) sum += data[i].x + data[i].y + data[i].z + data[i].w;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}
"""
Sweep = Callable[[], Any]


def bytes_of(gib: float | None) -> float | None:
    """What read_floor() takes, from an option in GiB; None: not given."""
    return None if gib is None else gib * GIB


def read_floor(device: torch.device, nbytes: float | None = None) -> dict[str, Any]:
    """The best read bandwidth found on `device`, in `nbytes` of memory; None: in so many that no
    cache holds them, where there are.

    Returns: bytes swept, bytes_per_s, the method that reached it, and the bytes_per_s (or the
    error) of every method tried.
    """
    data = _buffer(device, nbytes)
    methods: dict[str, Any] = {}
    for name, sweep in _sweeps(data).items():
        try:
            methods[name] = data.nbytes / _seconds(sweep, device)
        except Exception as error:  # a method that this torch or chip lacks; others remain
            methods[name] = f"{type(error).__name__}: {error}"[:200]
    reached = {name: value for name, value in methods.items() if isinstance(value, float)}
    if not reached:
        raise BenchmarkError(f"no method could read {data.nbytes} bytes on {device}: {methods}")
    best = max(reached, key=lambda name: reached[name])
    return {"bytes": data.nbytes, "bytes_per_s": reached[best], "method": best, "methods": methods}


def _buffer(device: torch.device, nbytes: float | None) -> torch.Tensor:
    """Random words that are floats in [0.5, 1) too, int32 [N], larger than any cache where
    memory allows.
    """
    if nbytes is None:
        nbytes = CPU_BYTES
        if device.type == "cuda":
            torch.cuda.empty_cache()
            nbytes = max(GIB, min(CUDA_BYTES, torch.cuda.mem_get_info(device)[0] - LEFT_FREE))
    check_size(device, nbytes)
    words = torch.empty(int(nbytes) // UNIT * UNIT // 4, dtype=torch.int32, device=device)
    return words.random_(
        0x3F000000, 0x3F800000, generator=torch.Generator(device=device).manual_seed(0)
    )


def check_size(device: torch.device, nbytes: float) -> None:
    """BenchmarkError where `nbytes` are too few for a buffer, or more than are free on `device`."""
    if nbytes < UNIT:
        raise BenchmarkError(
            f"{nbytes:.0f} bytes are no buffer to sweep; give {UNIT} or more, best more than any "
            "cache holds"
        )
    free = available_bytes(device)
    if nbytes > free:
        raise BenchmarkError(
            f"{nbytes / GIB:.6g} GiB to sweep do not fit into the {free / GIB:.3g} GiB that "
            f"{device} has free; give fewer"
        )


def _sweeps(data: torch.Tensor) -> dict[str, Sweep]:
    floats = data.view(torch.float32)
    rows = floats.view(-1, 128)
    ones = torch.ones(128, dtype=torch.float32, device=data.device)
    sweeps: dict[str, Sweep] = {
        "torch.sum float32": lambda: torch.sum(floats),
        "torch.mv float32": lambda: torch.mv(rows, ones),
    }
    if data.device.type == "cuda":
        sweeps["torch.sum int32"] = lambda: torch.sum(data)
        sweeps["own kernel"] = _OwnSweep(data)
    return sweeps


class _OwnSweep:
    """A grid-stride sum in CUDA C++, compiled at the first call, whose result is checked against
    torch's.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._kernel: Any = None
        self._out: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._kernel is None:
            self._kernel = torch.cuda._compile_kernel(SWEEP_SOURCE, "sweep")  # type: ignore[attr-defined]
            self._out = torch.zeros(1, dtype=torch.int32, device=self._data.device)
            self._launch()
            if int(self._out.item()) % 2**32 != int(self._data.sum().item()) % 2**32:
                raise BenchmarkError(
                    "the sweep's sum is not torch's: it does not read everything once"
                )
        self._launch()

    def _launch(self) -> None:
        blocks = 4 * torch.cuda.get_device_properties(self._data.device).multi_processor_count
        self._kernel(
            grid=(blocks, 1, 1),
            block=(512, 1, 1),
            args=[self._data, self._out, self._data.nbytes // 16],
        )


def _seconds(sweep: Sweep, device: torch.device) -> float:
    """Median seconds of one sweep, after two for warm-up."""
    time_once = _device_seconds if device.type == "cuda" else _host_seconds
    return statistics.median([time_once(sweep) for _ in range(REPEATS + 2)][2:])


def _device_seconds(sweep: Sweep) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    sweep()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _host_seconds(sweep: Sweep) -> float:
    begin = time.perf_counter()
    sweep()
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--gib", type=positive_number, help="GiB to sweep; default 9 on CUDA, 1 on a CPU"
    )
    args = options.parse_args(arguments)
    device = device_of(args.device)
    nbytes = bytes_of(args.gib)
    if nbytes is not None:
        try:
            check_size(device, nbytes)
        except BenchmarkError as error:
            options.error(f"--gib {args.gib:g}: {error}")
    result = ResultFile("floor", args, args.json)
    entry = result.measure({"device": str(device)}, lambda: read_floor(device, nbytes))
    if entry is None:
        return 1
    rows = [
        [name, value / 1e9 if isinstance(value, float) else None]
        for name, value in entry["methods"].items()
    ]
    print_table(["method", "GB/s"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
