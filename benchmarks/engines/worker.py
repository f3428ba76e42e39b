"""The process in which one engine runs: reads a task from stdin and says a line per thing done.

It imports nothing of photon_ext itself: a peer may live in an environment without it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

from benchmarks.engines.catalog import open_peer
from benchmarks.engines.peer import MARK, Setup, Window


def run(task: dict[str, Any]) -> None:
    """Loads the engine, then measures each batch; one that fails is reported, others go on."""
    setup = Setup(**{**task["setup"], "window": Window(*task["setup"]["window"])})
    begin = time.perf_counter()
    peer = open_peer(task["peer"], setup)
    loaded = {"version": peer.version, "mode": peer.mode, "method": peer.method}
    say({"loaded": {**loaded, "load_s": time.perf_counter() - begin}})
    for prompts in task["prompts"]:
        batch, begin = len(prompts), time.perf_counter()
        try:
            measured = peer.measure(prompts, setup.window)
        except Exception as error:
            traceback.print_exc()
            say({"batch": batch, "error": f"{type(error).__name__}: {error}"})
        else:
            seconds = time.perf_counter() - begin
            say({"batch": batch, "seconds": seconds, **measured._asdict()})
    peer.close()


def say(line: dict[str, Any]) -> None:
    """On a line of its own, whatever libraries have printed before it."""
    print(f"\n{MARK}{json.dumps(line)}", flush=True)


if __name__ == "__main__":
    run(json.load(sys.stdin))
