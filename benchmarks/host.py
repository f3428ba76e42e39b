"""Host work of a step: what the engine's thread spends on one, without any device.

    python -m benchmarks.host [--rows 32,128,256] [--modes quiet,handover,text] [--json FILE]

A stub device answers every step at once, so that the loop's turns are nothing but host work. Modes:

    quiet      nobody reads before the end, as in `generate`
    handover   every token is handed on, a message per step, to one consumer in another process
    text       32 threads stream text beside the loop; left out without SmolLM2's tokenizer
    traffic    4 requests per row of the load "mix" of benchmarks.traffic, all at once, with pages
               for less than all of them: rows are admitted and end, prompts ride beside decode
               rows, and pages are appended, every few steps

The figure is the median of the loop's turns in microseconds, on its own thread; of `traffic`, whose
turns differ, the mean, without what the stub device itself takes. In `text` readers take the
interpreter from the loop, so that the figure tells what streaming in one process costs.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as cli
from benchmarks.common.hand_over import hand_over
from benchmarks.open_loop.loads import LOADS, make_asks
from photon_ext import Engine, EngineOptions, SamplingParams
from photon_ext.engine import EngineParts
from photon_ext.engine.loop import EngineLoop
from photon_ext.errors import PhotonError
from photon_ext.testing.stub import StubDevice

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer

MODES = ("quiet", "handover", "text", "traffic")
VOCABULARY = 151936
READERS = 32
WARM_UP = 50  # turns: admission and the first steps
PER_ROW = 4  # requests of `traffic`
PAGES_PER_ROW = 36  # of `traffic`, whose requests take 42 in the mean


class TimedLoop:
    """The times of a loop's turns, from its own thread's clock of wall time.

    Attributes:
        turns_ns: of each turn, the stub device's part included.
        device_ns: what the stub device took in all of them.
    """

    def __init__(self) -> None:
        self.turns_ns: list[int] = []
        self.device_ns = 0

    def __enter__(self) -> TimedLoop:
        self._turn, self._run = turn, run = EngineLoop._turn, StubDevice.run
        turns = self.turns_ns

        def timed_run(device: StubDevice, *words: Any) -> memoryview:
            begin = time.perf_counter_ns()
            records = run(device, *words)
            self.device_ns += time.perf_counter_ns() - begin
            return records

        def timed(loop: EngineLoop) -> None:
            begin = time.perf_counter_ns()
            turn(loop)
            turns.append(time.perf_counter_ns() - begin)

        EngineLoop._turn = timed  # type: ignore[method-assign]
        StubDevice.run = timed_run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        EngineLoop._turn = self._turn  # type: ignore[method-assign]
        StubDevice.run = self._run  # type: ignore[method-assign]


def bundled_tokenizer() -> Tokenizer:
    """SmolLM2's. Raises ImportError or PhotonError where a package for it is not installed."""
    from photon_ext.models.loading.gguf_file import GgufFile
    from photon_ext.models.loading.model_files import resolve_model
    from photon_ext.models.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf(GgufFile(resolve_model("smollm2")))


def stub_engine(rows: int, steps: int, tokenizer: Tokenizer | None) -> Engine:
    """An engine around the stub device, with one graph bucket for all rows."""
    runtime = StubDevice(rows, max_len=steps + 16)
    pages = rows * runtime.table.pages_per_row
    parts = EngineParts(runtime, lambda step: None, VOCABULARY, pages, tokenizer)
    return Engine(parts, EngineOptions(buckets=(rows,), prefill="separate", freeze=False))


def measure(mode: str, rows: int, steps: int, tokenizer: Tokenizer | None = None) -> float:
    """Median microseconds of a turn with `rows` requests of `steps` tokens."""
    prompts, params = [[1, 2, 3, 4]] * rows, SamplingParams(max_new_tokens=steps)
    with stub_engine(rows, steps, tokenizer) as engine, TimedLoop() as timed:
        if mode == "text":
            _read_all([engine.submit(prompt, params) for prompt in prompts])
        else:
            finish = hand_over(engine) if mode == "handover" else _nothing
            outputs = engine.generate(prompts, params)
            engine.close()  # the last step is handed on, too
            tokens = finish()
            assert all(len(output.token_ids) == steps for output in outputs)
            assert mode != "handover" or tokens == rows * steps, (tokens, rows * steps)
    return statistics.median(timed.turns_ns[WARM_UP:]) / 1e3


def measure_traffic(rows: int) -> float:
    """Mean microseconds of a turn with `rows` rows and PER_ROW requests for each, without the stub
    device's own.
    """
    load = LOADS["mix"]
    asks = make_asks(load, PER_ROW * rows, None, VOCABULARY, seed=7)
    params = [SamplingParams(max_new_tokens=ask.answer) for ask in asks]
    runtime = StubDevice(rows, max_len=load.longest)
    pages = PAGES_PER_ROW * max(rows, 3)  # a pool that holds the longest request
    parts = EngineParts(runtime, lambda step: None, VOCABULARY, pages)
    buckets = (64, 128, 256, 512)
    options = EngineOptions(chunk=512, prefill_buckets=buckets, prefill="mixed", freeze=False)
    with TimedLoop() as timed:
        with Engine(parts, options) as engine:
            finish = hand_over(engine)
            outputs = engine.generate([ask.prompt for ask in asks], params)
        tokens = finish()
    assert [len(output.token_ids) for output in outputs] == [ask.answer for ask in asks]
    assert tokens == sum(ask.answer for ask in asks)
    return (sum(timed.turns_ns) - timed.device_ns) / len(timed.turns_ns) / 1e3


def _nothing() -> int:
    return 0


def _read_all(requests: list[Any]) -> None:
    """Threads that stream: each reads its requests one after the other."""

    def read(own: list[Any]) -> None:
        for request in own:
            for _ in request.iter():
                pass

    threads = [threading.Thread(target=read, args=(requests[i::READERS],)) for i in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per mode and number of rows; writes JSON where asked."""
    options = cli.plain_parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--rows", type=cli.integers, default=[32, 128, 256], help="rows, separated by commas")
    add("--modes", type=cli.names, default=list(MODES), help="modes, separated by commas")
    add("--steps", type=cli.positive_integer, default=1000, help="tokens per request")
    add("--rounds", type=cli.positive_integer, default=3, help="runs, of which the median counts")
    add("--json", type=cli.output_file, help="where the results go")
    given = options.parse_args(arguments)
    if unknown := [mode for mode in given.modes if mode not in MODES]:
        options.error(f"there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if given.steps <= WARM_UP:
        options.error(f"--steps is {given.steps}; use more than {WARM_UP}, which warm up")
    results = []
    for mode in given.modes:
        try:
            tokenizer = bundled_tokenizer() if mode == "text" else None
        except (ImportError, PhotonError) as error:
            print(f"text is left out, it needs SmolLM2's tokenizer: {error!s:.200}", flush=True)
            continue
        for rows in given.rows:
            runs = [
                measure_traffic(rows)
                if mode == "traffic"
                else measure(mode, rows, given.steps, tokenizer)
                for _ in range(given.rounds)
            ]
            host_us = round(statistics.median(runs), 1)
            result = {"rows": rows, "mode": mode, "host_us": host_us}
            results.append({**result, "runs_us": [round(run, 1) for run in runs]})
            print(f"{mode:9} {rows:4} rows {host_us:8.1f} us", flush=True)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"results": results}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
