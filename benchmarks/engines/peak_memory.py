"""A process that loads a model and answers one prompt, and says what memory that took at most.

The task on stdin: {"side": "ours" or "llama.cpp", "model", "quantize", "prompt", "count",
"threads"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

MIB_OF_KIB = 1 / 1024


def peak_mib() -> float:
    """The most memory that this process has had, its mapped files among it: Linux' VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * MIB_OF_KIB


def answer(task: dict[str, Any]) -> None:
    """Loads the model, and makes the tokens behind the prompt."""
    prompt, count, threads = task["prompt"], task["count"], task["threads"]
    if task["side"] == "ours":
        import photon_ext
        from benchmarks.common.models import open_model
        from benchmarks.common.one_stream import run_ours

        torch.set_num_threads(threads)
        photon_ext.set_num_threads(threads)
        opened = open_model(task["model"], None, torch.device("cpu"), task["quantize"])
        run_ours(*opened, prompt, count)
        return
    from benchmarks.engines.llama_cpp import LlamaCpp

    llama = LlamaCpp(Path(task["model"]), len(prompt) + count, threads)
    llama.generate([prompt], [count])


def main() -> None:
    task, before = json.load(sys.stdin), peak_mib()
    answer(task)
    after = peak_mib()
    # after the measurement, because it brings more of torch with it
    from benchmarks.engines.worker import say

    say({"import_mib": before, "peak_mib": after, "added_mib": after - before})


if __name__ == "__main__":
    main()
