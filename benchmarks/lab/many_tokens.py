"""Linears of 129 tokens and more by many_tokens.cu, beside torch's, on one GPU.

    python -m benchmarks.lab.many_tokens [check | time | bounds]

`check` compares all tiles with products in float32. `time` prints microseconds by turns in one
process, weights from memory: torch, torch with SwiGLU in a kernel of its own, and all tiles.
`bounds` leaves out copies, or products, and reads the clock of an SM meanwhile: what a kernel waits
for, and what the chip's power leaves of its clock.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import NamedTuple

import torch
from torch import Tensor

from photon_ext import ops

SOURCE = Path(__file__).with_suffix(".cu")
NVCC = "nvcc -shared -Xcompiler -fPIC -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Icsrc"
MODES = ("whole", "no copies", "no products")
POOL_VALUES = 200 << 20  # of weights: several times what L2 holds
TOKENS = (160, 256, 512, 1024, 2048)
CLOCK_VALUES = 512  # as many_tokens.cu has them
MOST_ERROR = 6e-3  # of the size of what is right: outputs are rounded to bfloat16


class Shape(NamedTuple):
    """A weight [n, k]; SwiGLU: of gate rows, then up rows."""

    name: str
    n: int
    k: int
    swiglu: bool = False

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.swiglu else self.n


SHAPES = (
    Shape("4b qkv", 6144, 2560),
    Shape("4b o", 2560, 4096),
    Shape("4b gate_up", 19456, 2560, True),
    Shape("4b down", 2560, 9728),
    Shape("0.6b qkv", 4096, 1024),
    Shape("0.6b gate_up", 6144, 1024, True),
)


class Tile(NamedTuple):
    index: int
    tokens: int
    rows: int
    swiglu: bool

    def __str__(self) -> str:
        return f"{self.tokens}x{self.rows}"


class Library:
    """many_tokens.cu, built anew."""

    def __init__(self) -> None:
        path = Path(gettempdir()) / "many_tokens.so"
        subprocess.run([*NVCC.split(), str(SOURCE), "-o", str(path)], check=True)
        self._library = ctypes.CDLL(str(path))
        self.tiles: list[Tile] = []
        tokens, rows, swiglu = ctypes.c_int(), ctypes.c_int(), ctypes.c_bool()
        ends = [ctypes.byref(each) for each in (tokens, rows, swiglu)]
        for index in count():
            if not self._library.many_tile(index, *ends):
                break
            self.tiles.append(Tile(index, tokens.value, rows.value, swiglu.value))

    def run(self, tile: Tile, x: Tensor, weight: Tensor, out: Tensor, mode: int = 0) -> None:
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, weight, out)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = len(x), out.shape[1], x.shape[1]
        error = self._library.many_linear(tile.index, mode, *pointers, *sizes, stream)
        if error != 0:
            raise RuntimeError(f"tile {tile} of {sizes}: CUDA's error {error}")

    def clocks(self) -> tuple[int, int]:
        """Of an SM: cycles and nanoseconds, when its last CTA ended."""
        values = (ctypes.c_longlong * CLOCK_VALUES)()
        if self._library.many_clocks(values) != 0:
            raise RuntimeError("the clocks cannot be read: see CUDA's error before")
        return values[0], values[1]


class Operands:
    """Of a shape and a number of tokens: x, weights one behind the other, outputs."""

    def __init__(self, shape: Shape, num_tokens: int) -> None:
        self.shape = shape
        self.x = random(num_tokens, shape.k)
        together = max(POOL_VALUES // (shape.n * shape.k), 1)
        self.weights = random(together, shape.n, shape.k) / shape.k**0.5
        self.out = torch.full_like(random(num_tokens, shape.outputs), torch.nan)
        self.both = random(num_tokens, shape.n)

    def expected(self) -> Tensor:
        product = self.x.float() @ self.weights[0].float().T
        if not self.shape.swiglu:
            return product
        gate, up = product.bfloat16().float().chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def multiply(self, weight: Tensor) -> None:
        torch.mm(self.x, weight.t(), out=self.both)

    def multiply_and_end(self, weight: Tensor) -> None:
        self.multiply(weight)
        ops.silu_mul_into(self.out, self.both)


class Turn:
    """A graph of one launch for each weight, and its times."""

    def __init__(self, run: Callable[[Tensor], None], weights: Tensor) -> None:
        run(weights[0])  # what a first call does once
        torch.cuda.synchronize()
        self._graph, self._launches = torch.cuda.CUDAGraph(), len(weights)
        with torch.cuda.graph(self._graph):
            for weight in weights:
                run(weight)
        self._us: list[float] = []

    def run(self, times: int) -> None:
        self._graph.replay()  # in front, so that the host is ahead
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            self._us.append(begin.elapsed_time(end) * 1000 / self._launches)

    @property
    def us(self) -> float:
        return median(self._us)


def random(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="cuda").uniform_(-1.7, 1.7)


def take_turns(turns: dict[str, Turn], rounds: int = 3) -> str:
    for _ in range(rounds):
        for turn in turns.values():
            turn.run(5)
    return "  ".join(f"{name} {turn.us:.2f}" for name, turn in turns.items())


def check(library: Library) -> None:
    wrong = 0
    for shape in [Shape("", n, k, s) for n, k in ((528, 576), (3040, 64)) for s in (False, True)]:
        for num_tokens in (1, 63, 129, 160, 257, 700):
            operands = Operands(shape, num_tokens)
            expected = operands.expected()
            for tile in library.tiles:
                if tile.swiglu != shape.swiglu:
                    continue
                operands.out.fill_(torch.nan)
                library.run(tile, operands.x, operands.weights[0], operands.out)
                error = float((operands.out.float() - expected).norm() / expected.norm())
                if not error < MOST_ERROR:
                    wrong += 1
                    print(f"tile {tile}, {shape}, {num_tokens} tokens: error {error:.1e}")
    print(f"{wrong} results are wrong")


def runs(library: Library, operands: Operands, tile: Tile, mode: int = 0) -> Turn:
    return Turn(
        lambda weight: library.run(tile, operands.x, weight, operands.out, mode), operands.weights
    )


def time(library: Library) -> None:
    for shape in SHAPES:
        for num_tokens in TOKENS:
            operands = Operands(shape, num_tokens)
            turns = {"torch": Turn(operands.multiply, operands.weights)}
            if shape.swiglu:
                turns["torch, SwiGLU"] = Turn(operands.multiply_and_end, operands.weights)
            for tile in library.tiles:
                if tile.swiglu == shape.swiglu:
                    turns[str(tile)] = runs(library, operands, tile)
            print(f"{shape.name}, {num_tokens} tokens, us: {take_turns(turns)}", flush=True)


def bounds(library: Library) -> None:
    for shape in SHAPES:
        for num_tokens in (256, 2048):
            operands = Operands(shape, num_tokens)
            for tile in library.tiles:
                if tile.swiglu != shape.swiglu:
                    continue
                turns: dict[str, Turn] = {}
                for mode, name in enumerate(MODES):
                    turn = runs(library, operands, tile, mode)
                    turn.run(10)
                    before = library.clocks()
                    turn.run(20)
                    cycles, ns = (b - a for a, b in zip(before, library.clocks(), strict=True))
                    turns[f"{name} at {cycles / ns:.2f} GHz"] = turn
                found = take_turns(turns)
                print(f"{shape.name}, {num_tokens} tokens, {tile}, us: {found}", flush=True)


if __name__ == "__main__":
    built = Library()
    for word in sys.argv[1:] or ("check", "time", "bounds"):
        {"check": check, "time": time, "bounds": bounds}[word](built)
