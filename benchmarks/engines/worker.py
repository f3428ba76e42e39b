"""The process in which one engine runs: reads a task, appends a JSON line after each thing it has
done.

    python -m benchmarks.engines.worker TASK.json

It imports nothing of photon_ext itself: a peer may live in an environment where that is not built.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.engines.catalog import open_peer
from benchmarks.engines.peer import Setup, Window


def run(task: dict[str, Any]) -> None:
    """Loads the engine, then measures each batch; a batch that fails is reported, and the next
    one tried.
    """
    report = Path(task["report"])
    setup = Setup(**{**task["setup"], "window": Window(*task["setup"]["window"])})
    begin = time.perf_counter()
    peer = open_peer(task["peer"], setup)
    loaded = {
        "version": peer.version,
        "mode": peer.mode,
        "method": peer.method,
        "load_s": time.perf_counter() - begin,
    }
    _append(report, {"loaded": loaded})
    for prompts in task["prompts"]:
        batch, begin = len(prompts), time.perf_counter()
        try:
            measured = peer.measure(prompts, setup.window)
        except Exception as error:
            traceback.print_exc()
            _append(report, {"batch": batch, "error": f"{type(error).__name__}: {error}"})
        else:
            _append(
                report,
                {"batch": batch, "seconds": time.perf_counter() - begin, **measured._asdict()},
            )
    peer.close()


def _append(report: Path, line: dict[str, Any]) -> None:
    with report.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
