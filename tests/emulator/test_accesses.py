"""What the ops' kernels read, as the emulator counts it: in processes of their own, because an ops
library is chosen at import.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.emulator.test_ops import run

BEGIN = """
import ctypes, json, torch
from photon_ext import ops
from photon_ext._library import _ops_library as library
library.photon_emulator_watched_reads.restype = ctypes.c_uint64

def watch(tensor):
    pointer = ctypes.c_void_p(tensor.data_ptr())
    library.photon_emulator_watch(pointer, ctypes.c_size_t(tensor.nbytes))

def reads():
    return library.photon_emulator_watched_reads()
"""


def printed(emulated: Path, script: str) -> object:
    done = run(emulated / "_ops.abi3.so", BEGIN + script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_where_two_ctas_share_the_columns_one_fetches_the_residual(emulated: Path) -> None:
    """Once, in vectors of 8 elements; by both kernels."""
    script = """
counts = []
for tokens in (3, 9):
    x, weight = torch.ones(tokens, 1088).bfloat16(), torch.ones(8, 1088).bfloat16()
    residual = torch.zeros(tokens, 8).bfloat16()
    watch(residual)
    ops.linear_residual_(residual, x, weight, hopper=True)
    assert (residual == 1088).all()
    counts.append(reads())
print(json.dumps(counts))
"""
    assert printed(emulated, script) == [3, 9]


def test_dead_tokens_behind_a_ctas_last_live_one_are_not_walked_over(emulated: Path) -> None:
    """A dead token is looked at when the work is divided, and when its output is cleared: not by
    every thread of a CTA that has done its share.
    """
    script = """
from tests.ops.test_split_attention import decode
step = decode("cpu", [300, *[0] * 40], 4, 2, 64)
watch(step.meta[20])
step.run()
warps, ctas, threads, words = 8, 2 * 4, 256, 3
print(json.dumps([reads(), words * (2 * ctas * warps + threads)]))
"""
    counts = printed(emulated, script)
    assert isinstance(counts, list)
    found, most = counts
    assert 0 < found <= most


def test_the_first_op_of_a_forward_may_start_early(emulated: Path) -> None:
    """It reads counts before it waits for the head of the step, which has written them by then."""
    script = """
from photon_ext.runtime import Pipeline, RowParams, Runtime

x, weight = torch.ones(8, 64).bfloat16(), torch.ones(16, 64).bfloat16()
residual = torch.zeros(8, 16).bfloat16()

def forward(step):
    tokens, rows = len(step.decode_meta), len(step.segments)
    ops.linear_residual_(
        residual[:tokens], x[:tokens], weight, None, step.counts[1:2], hopper=True, pdl=True
    )
    step.logits = residual[:rows].float()

pipeline = Pipeline(
    Runtime(max_rows=2, max_len=32, depth=2, device="cpu", backend="hopper"),
    forward, vocab_size=16, chunk=8, graph=False,
)
pipeline.admit([1, 2], RowParams(3))
ticks = 0
while pipeline.busy:
    pipeline.tick()
    ticks += 1
print(json.dumps(ticks))
"""
    assert printed(emulated, script) == 4
