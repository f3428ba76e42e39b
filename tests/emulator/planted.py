"""The bugs that kernels.cu has planted, by name, and what tests of its kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.numeric import poisoned

THREADS = 128  # of most thread blocks in kernels.cu
LANES = range(32)

# enum Bug in kernels.cu
NO_BUG, MISSING_BARRIER, USE_BEFORE_LANDING, OVERWRITE_IN_USE, MISSING_ARRIVAL, MISSING_FENCE = (
    range(6)
)
TOO_MANY_BYTES, TOO_MANY_ARRIVALS, NEVER_AWAITED, UNINITIALIZED, ENDS_TOO_EARLY = range(6, 11)
NEVER_ENTERS, NEVER_MEETS, ENTERS_TWICE, WRONG_RANK = range(11, 15)
NEVER_WAITS, THREAD_NEVER_WAITS, BLOCK_NEVER_WAITS, WRITES_TOO_EARLY = range(15, 19)
READS_TOO_EARLY, COPIES_TOO_EARLY, READS_THE_FIRST_TOO_EARLY = range(19, 22)
# enum LetsNext in kernels.cu
NEVER, BEFORE_IT_WAITS, AFTER_IT_HAS_WAITED = range(3)


def floats(*shape: int) -> Tensor:
    return poisoned(*shape, dtype=torch.float32, device="cpu")
