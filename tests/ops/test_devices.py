"""Ops on a GPU that is not the current one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

# The process has no memory, stream or context on GPU 0; its current device stays GPU 0.
SCRIPT = """
import torch
from photon_ext import ops
x, weight = torch.ones(2, 64, device="cuda:1"), torch.ones(8, 64, device="cuda:1")
assert torch.equal(ops.linear(x, weight), torch.full((2, 8), 64.0, device="cuda:1"))
assert torch.cuda.current_device() == 0
print([torch._C._cuda_hasPrimaryContext(i) for i in range(2)])
"""


def test_a_process_that_uses_another_gpu_makes_no_context_on_the_first() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[False,", "True]"]
