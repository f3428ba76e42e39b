"""Requests by the clock: what is asked, who asks it, what is made of it, and whole small runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import plots, report, traffic
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.catalog import missing
from benchmarks.open_loop import cells
from benchmarks.open_loop.cells import BURST, Cells, Plan, saturation
from benchmarks.open_loop.client import Client, News, Run
from benchmarks.open_loop.figures import busy_seconds, figures, spread
from benchmarks.open_loop.loads import LOADS, Ask, make_asks
from benchmarks.open_loop.ours import OurServer
from benchmarks.open_loop.vllm import VllmServer
from photon_ext import SamplingParams

QWEN_IDS = 151936
TASK = {"model": "tiny", "device": "cpu", "dtype": "float32", "options": {"max_len": 64}}


def ask(
    prompt: list[int], answer: int, after: int | None = None, whole: bool = False, due_s: float = 0
) -> Ask:
    return Ask(prompt, answer, due_s, after, whole, 1)


class FakeServer:
    """Answers one request after the other, `per_second` of them, and tells it at once: times lie
    ahead of the clock. Nothing is told before `patience` requests have been submitted."""

    version, vocabulary = "0", 256
    start_up: ClassVar[dict[str, float]] = {}

    def __init__(self, per_second: float = 1e6, patience: int = 1) -> None:
        self.per_second, self.patience = per_second, patience
        self.short: set[int] = set()  # requests that get a token too few

    def begin(self) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.order: list[int] = []
        self._counts: dict[int, int] = {}
        self._times: dict[int, list[float]] = {}
        self._news: list[News] = []
        self._free = 0.0

    def submit(self, index: int, prompt: list[int], count: int) -> None:
        self._free = max(self._free, time.perf_counter()) + 1 / self.per_second
        count -= index in self.short
        self.prompts[index], self._counts[index] = prompt, count
        self.order.append(index)
        self._times[index] = [self._free] * count
        self._news += [News(self._free, index, False)] * bool(count)
        self._news.append(News(self._free, index, True))

    def news(self, timeout: float | None) -> Sequence[News]:
        if len(self.order) < self.patience:
            assert timeout is not None, "nothing is due, and nothing will come"
            time.sleep(timeout)
            return ()
        taken, self._news = self._news, []
        return taken

    def answer(self, index: int) -> list[int]:
        return [100 + index] * self._counts[index]

    def times(self) -> list[list[float]]:
        return [self._times[index] for index in range(len(self._times))]

    def counters(self, busy_s: float) -> dict[str, Any]:
        return {}

    def hits(self) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        pass


# --- what is asked -------------------------------------------------------------------------------


def test_the_mix_of_seed_7_is_the_published_burst() -> None:
    asks = make_asks(LOADS["mix"], 256, None, QWEN_IDS, 7)
    assert sum(len(ask.prompt) for ask in asks) == 132_852
    assert sum(ask.answer for ask in asks) == 36_608
    assert {ask.due_s for ask in asks} == {0.0}
    assert all(1000 <= token < 100_000 for ask in asks for token in ask.prompt)


def test_the_same_seed_asks_the_same_at_every_rate() -> None:
    slow, fast, other = (
        make_asks(LOADS["chat"], 400, rate, 256, seed) for rate, seed in ((5, 1), (50, 1), (5, 2))
    )
    assert slow == make_asks(LOADS["chat"], 400, 5, 256, 1)
    assert [a.prompt for a in slow] == [a.prompt for a in fast] != [a.prompt for a in other]
    assert [a.answer for a in slow] == [a.answer for a in fast]
    assert [a.due_s for a in slow] == pytest.approx([10 * a.due_s for a in fast])
    gaps = np.diff([0.0, *(a.due_s for a in slow)])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "of a Poisson process"


@pytest.mark.parametrize("name", LOADS)
def test_lengths_are_those_of_the_load(name: str) -> None:
    load = LOADS[name]
    asks = make_asks(load, 300, 10.0, 256, 3)
    assert len(asks) == (load.most or 300)
    for lengths, drawn in (
        (load.prompt, [len(ask.prompt) - load.prefix for ask in asks]),
        (load.answer, [ask.answer for ask in asks]),
    ):
        assert lengths.low <= min(drawn) <= max(drawn) <= lengths.high
        expected = lengths.median or (lengths.low + lengths.high) / 2
        middle = float(np.median(drawn)) if lengths.median else fmean(drawn)
        assert middle == pytest.approx(expected, rel=0.15)
    small = load.scaled(1 / 16)
    assert small.longest < load.longest
    least = min(ask.answer for ask in make_asks(small, 50, None, 256, 3))
    assert least >= 3
    assert max(len(ask.prompt) + ask.answer for ask in asks) <= load.longest


def test_shared_prompts_begin_alike_and_wait_for_a_first_token() -> None:
    asks = make_asks(LOADS["shared"], 256, 10.0, QWEN_IDS, 7)
    assert [ask.after for ask in asks] == [None, *range(63)]
    assert {tuple(ask.prompt[:2000]) for ask in asks} == {tuple(asks[0].prompt[:2000])}
    assert len({tuple(ask.prompt[2000:]) for ask in asks}) == 64
    assert not any(ask.whole for ask in asks)
    assert [ask.turn for ask in asks[:3]] == [1, 2, 2]


def test_turns_wait_for_the_end_of_their_chat_s_turn_before() -> None:
    asks = make_asks(LOADS["turns"], 10, 2.0, 256, 7)
    assert [ask.after for ask in asks] == [None, 0, 1, 2, None, 4, 5, 6, None, 8]
    assert [ask.turn for ask in asks] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert all(ask.whole for ask in asks)
    assert 0 < asks[0].due_s < asks[4].due_s < asks[8].due_s


# --- the client ----------------------------------------------------------------------------------


def test_arrivals_are_by_the_clock_though_nobody_answers() -> None:
    asks = [ask([i], 2, due_s=0.02 * i) for i in range(6)]
    server = FakeServer(patience=6)  # a client that waited for an answer would wait for ever
    run = Client(server, asks).run()
    assert server.order == list(range(6))
    assert np.diff(run.due).tolist() == pytest.approx([0.02] * 5)
    late = np.array(run.sent) - np.array(run.due)
    assert 0 <= late.min() <= late.max() < 1.0


def test_a_late_client_counts_from_the_intended_arrival() -> None:
    class Slow(FakeServer):
        def submit(self, index: int, prompt: list[int], count: int) -> None:
            time.sleep(0.03)
            super().submit(index, prompt, count)

    asks = [ask([1], 1), ask([1], 1)]
    found = figures(asks, Client(Slow(), asks).run())
    assert found["late_ms"]["max"] >= 30
    assert found["ttft_ms"]["max"] >= 60


def test_a_chain_goes_on_with_the_first_token_or_with_the_answer() -> None:
    server = FakeServer()
    first = [ask([1, 2], 3), ask([5], 2, after=0), ask([6], 2, after=1)]
    run = Client(server, first).run()
    assert [server.prompts[i] for i in range(3)] == [[1, 2], [5], [6]]
    assert run.due[1:] == [times[0] for times in run.times[:2]]
    chat = [ask([1, 2], 3), ask([5], 2, after=0, whole=True), ask([6], 1, after=1, whole=True)]
    run = Client(server, chat).run()
    assert server.prompts[2] == [1, 2, 100, 100, 100, 5, 101, 101, 6]
    assert run.due[1:] == [times[-1] for times in run.times[:2]]


def test_an_answer_that_is_too_short_is_an_error_and_nobody_waits_for_it() -> None:
    server = FakeServer()
    server.short = {0}
    with pytest.raises(BenchmarkError, match="request 0 got 0 of 1 tokens: the engine stopped"):
        Client(server, [ask([1], 1), ask([5], 2, after=0)]).run()


# --- figures -------------------------------------------------------------------------------------


def test_figures_of_a_run_by_hand() -> None:
    asks = [ask([1], 3), ask([1], 2)._replace(turn=2)]
    run = Run([10.0, 11.0], [10.001, 11.0], [[10.5, 10.6, 10.8], [11.1, 11.4]])
    found = figures(asks, run)
    assert (found["requests"], found["tokens"]) == (2, 5)
    assert found["wall_s"] == pytest.approx(1.4)
    assert found["busy_s"] == pytest.approx(1.2)
    assert found["tokens_per_s"] == pytest.approx(5 / 1.4)
    assert found["requests_per_s"] == pytest.approx(2 / 1.4)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["ttft_ms"]["max"] == pytest.approx(500)
    assert found["ttft_by_turn"][2]["p99"] == pytest.approx(100)
    assert found["inter_token_ms"]["p50"] == pytest.approx(200)
    assert found["inter_token_ms"]["max"] == pytest.approx(300)
    assert found["queue_s"] == pytest.approx(0.99 * 0.4)
    assert found["late_ms"]["max"] == pytest.approx(1.0)


def test_percentiles_lie_between_values() -> None:
    found = spread(np.arange(101) / 1e3)
    assert found == pytest.approx({"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0})
    assert spread([]) is None


def test_time_with_work_counts_once() -> None:
    begins, ends = np.array([5.0, 0.0, 1.0, 2.0]), np.array([6.0, 4.0, 3.0, 4.5])
    assert busy_seconds(begins, ends) == pytest.approx(4.5 + 1.0)


# --- the sweep -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "asked", "found"),
    [(10.0, [10, 20, 40, 80, 160, 113.14, 95.14], 113.14), (500.0, [500, 250, 125], 125)],
)
def test_a_sweep_doubles_until_requests_queue_and_then_halves(
    start: float, asked: list[float], found: float
) -> None:
    rates: list[float] = []

    def queueing(rate: float) -> float:
        rates.append(rate)
        return 1.5 if rate > 100 else 1.0

    assert saturation(start, queueing) == pytest.approx(found, rel=1e-3)
    assert rates == pytest.approx(asked, rel=1e-3)


def test_a_sweep_without_a_rate_to_begin_at_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        traffic.main(["--sweep", "--rates", "burst"])
    assert "--rates has burst alone; add one, for instance" in capsys.readouterr().err


def test_a_sweep_that_never_queues_ends() -> None:
    with pytest.raises(
        BenchmarkError, match=r"no request queued for 1\.0 s at any rate up to 65536"
    ):
        saturation(1.0, lambda rate: 0.0)


def test_a_sweep_finds_what_an_engine_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(cells, "say", said.append)
    monkeypatch.setattr(cells, "QUEUE_S", 0.1)
    plan = Plan(["mix"], 0.1, [BURST, 100.0, 7.0], True, 4, 0.3, seed=1)
    Cells(FakeServer(per_second=200), "mix", plan).run()
    measured = [line for line in said if line["what"] == "cell"]
    assert [line["rate"] for line in measured[:3]] == [BURST, 100.0, 200.0]
    assert [line["requests"] for line in measured[:3]] == [4, 30, 60]
    (end,) = (line for line in said if line["what"] == "saturation")
    assert 200 <= end["rate"] <= 400
    assert measured[-1]["of_saturation"] == 0.8
    assert measured[-1]["rate"] == pytest.approx(0.8 * end["rate"])
    over = [line["rate"] for line in measured[1:-1] if line["queue_s"] > 0.1]
    assert min(over) == end["rate"]


# --- engines -------------------------------------------------------------------------------------


def test_our_server_gives_the_tokens_of_the_engine_and_their_times() -> None:
    server = OurServer({**TASK, "options": {"max_len": 64, "max_rows": 2}})
    asks = [ask([1, 2, 3], 5), ask([9] * 20, 1), ask([4], 8), ask([7], 4, after=0, whole=True)]
    runs = [Client(server, asks).run() for _ in range(2)]
    run = runs[1]
    assert [len(times) for times in run.times] == [5, 1, 8, 4]
    assert all(times == sorted(times) for times in run.times)
    assert all(times[0] > sent for times, sent in zip(run.times, run.sent, strict=True))
    meter = server.counters(busy_s=10.0)
    assert 8 <= meter["grown"]["steps"] < 40, "of one run"
    assert meter["grown"]["tokens"] == sum(ask.answer for ask in asks)
    assert meter["grown"]["live"] == 0
    assert 0 <= meter["zombie_share"] < 1
    assert meter["host_us"] > 0
    assert server.hits() == [(3, 0), (20, 16), (1, 0), (9, 0)]
    assert server.start_up["engine_s"] > server.start_up["capture_s"] > 0
    assert server.start_up["graphs"] > 0
    engine = server._engine
    greedy = SamplingParams(max_new_tokens=4, ignore_eos=True)
    (expected,) = engine.generate([[1, 2, 3, *server.answer(0), 7]], greedy)
    assert server.answer(3) == list(expected.token_ids)
    server.close()


def test_a_request_that_our_engine_refuses_is_an_error_of_the_run() -> None:
    server = OurServer(TASK)
    with pytest.raises(ValueError, match="the prompt has 100 tokens and the context holds 64"):
        Client(server, [ask([1] * 100, 2)]).run()
    server.close()


class FakeLLM:
    """vLLM's AsyncLLM as far as it is used; prompt [0] fails."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 256)

    @classmethod
    def from_engine_args(cls, args: Any) -> FakeLLM:
        made = cls()
        made.args = args
        return made

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        if prompt["prompt_token_ids"] == [0]:
            raise RuntimeError("no such token")
        left = params.max_tokens
        while left:
            count = min(2, left)
            left -= count
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count)])

    def shutdown(self) -> None:
        pass


@pytest.fixture
def vllm_server(monkeypatch: pytest.MonkeyPatch) -> VllmServer:
    def module(name: str, **attributes: Any) -> None:
        made = ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm", __version__="0.0", SamplingParams=SimpleNamespace)
    module("vllm.engine")
    module("vllm.engine.arg_utils", AsyncEngineArgs=SimpleNamespace)
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    module("vllm.v1")
    module("vllm.v1.engine")
    module("vllm.v1.engine.async_llm", AsyncLLM=FakeLLM)
    return VllmServer({**TASK, "directory": "/somewhere", "dtype": None})


def test_vllm_gets_the_same_requests(vllm_server: VllmServer) -> None:
    args = vllm_server._llm.args
    assert (args.model, args.dtype, args.max_model_len) == ("/somewhere", "bfloat16", 64)
    asks = [ask([1], 5), ask([2], 1, due_s=0.01), ask([3], 2, after=0, whole=True)]
    run = Client(vllm_server, asks).run()
    assert [len(times) for times in run.times] == [5, 1, 2]
    assert run.times[0][0] == run.times[0][1], "tokens that came together"
    assert vllm_server.answer(2) == [7, 7]
    with pytest.raises(BenchmarkError, match="request 0 failed: RuntimeError: no such token"):
        Client(vllm_server, [ask([0], 2)]).run()
    vllm_server.close()


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one whole run; a page size of 0 is no engine."""
    path = tmp_path_factory.mktemp("traffic") / "traffic.json"
    given = "--model tiny --device cpu --dtype float32 --requests 5 --scale 0.03 --rows 4"
    given += " --loads mix,shared,turns --rates burst,200 --engine page_size=16/0"
    assert traffic.main([*given.split(), "--json", str(path)]) == 1
    return path


def test_each_engine_has_its_cells_and_fails_alone(file: Path) -> None:
    entries = json.loads(file.read_text())["entries"]
    ours = [entry for entry in entries if entry["status"] == "ok"]
    measured = [(entry["load"], entry["rate"]) for entry in ours]
    rates = (BURST, 200.0)
    both = [("turns", rate) for rate in rates]
    assert measured == [*(("mix", rate) for rate in rates), ("shared", "one by one"), *both]
    for entry in ours:
        assert entry["title"] == "photon_ext max_rows=4 page_size=16"
        assert entry["requests"] == 5
        assert entry["ttft_ms"]["p50"] <= entry["ttft_ms"]["p99"] <= entry["ttft_ms"]["max"]
        assert entry["inter_token_ms"]["max"] > 0
        assert entry["tokens"] >= 15
        assert entry["meter"]["gap_us"]["p99"] >= entry["meter"]["gap_us"]["p50"] > 0
        assert 0 < entry["meter"]["active_share"] < 1
    assert list(ours[2]["ttft_by_turn"]) == ["1", "2"]
    assert list(ours[3]["ttft_by_turn"]) == ["1", "2", "3", "4"]
    prompts = [turn["prompt"] for turn in ours[3]["hits_by_turn"].values()]
    assert prompts == sorted(prompts), "a turn has all that was said"
    others = ours[2]["hits_by_turn"]["2"]
    assert 0 < others["cached"] < others["prompt"]
    failed, peer = entries[5:]
    assert failed["status"] == "failed"
    assert "page_size" in failed["reason"]
    assert (peer["engine"], peer["status"]) == ("vllm", "missing")
    assert peer["reason"] == missing("vllm", "cpu")


def test_the_report_and_the_plot_show_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(file), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "## tiny\n" in text
    assert "| mix | photon_ext max_rows=4 page_size=16 | burst | 5 |" in text
    assert "of the first request and the others" in text
    assert "photon_ext max_rows=4 page_size=16: made in " in text
    assert "tiny mix photon_ext" in report.headline(json.loads(file.read_text()))
    pytest.importorskip("matplotlib")
    picture = tmp_path / "traffic.png"
    assert plots.main(["--traffic", str(file), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_of_the_engine_are_measured_in_every_combination() -> None:
    given = "--depth 2,1,2 --engine exact=True --engine prefill=mixed/separate --device cpu"
    found = traffic.variants(traffic.arguments(given.split()))
    assert [each["depth"] for each in found] == [2, 2, 1, 1, 2, 2]
    assert [each["prefill"] for each in found] == ["mixed", "separate"] * 3
    assert {each["exact"] for each in found} == {True}
    assert traffic.variants(traffic.arguments(["--device", "cpu"])) == [{}]
