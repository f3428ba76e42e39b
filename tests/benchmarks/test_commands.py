"""Every command runs small on a CPU, and its tables can be had from its file."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bubble, host, report, schemas
from benchmarks.attribution.serving import Load, open_server, serve
from benchmarks.common.environment import REPOSITORY
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import BenchmarkError, read_runs
from benchmarks.common.session import Session, random_prompts
from benchmarks.engines.process import run_module
from benchmarks.lab import turns
from benchmarks.open_loop.loads import LOADS, make_asks
from photon_ext._library import OPS_FILE
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.models.weights import empty_weights
from tests.engine.byte_tokenizer import byte_tokenizer

TINY = "--device cpu --dtype float32 --model tiny"
SMALL = "--model tiny --device cpu --steps 33 --rounds 1"
COMMANDS = {
    "decode": f"{TINY} --batches 1,3 --depth 1,2 --context 40 --steps 12 --warm-up 4 "
    "--floor-gib 0.01 --timeline-cost",
    "decode through the engine": f"{TINY} --batches 1,3 --engine plain,exact --prefill 24 "
    "--floor-gib 0.01",
    "decode of fewer bits": f"{TINY} --batches 1 --depth 2 --context 40 --steps 12 --warm-up 4 "
    "--floor-gib 0.01 --quantize int4",
    "bubble": f"{TINY} --streams 1,3 --requests 4 --calibrate 3 --rounds 2 --length 16 --prompt 8 "
    "--long tiny --long-tokens 40 --long-sequences 3 --meter-cost",
    "bubble of short answers": f"{TINY} --streams 1,8 --requests 6 --calibrate 6 --answer 3 "
    "--prompt 64",
    "traffic": f"{TINY} --requests 5 --scale 0.03 --rows 4 --loads mix,shared --rates burst",
    "adapters": f"{SMALL} --rows 3 --adapters 1,3",
    "objects": f"{SMALL} --rows 4",
    "constraints": f"{SMALL} --rows 1 --callable-us 200",
    "floor": "--device cpu --gib 0.01",
    "quality": f"{TINY} --tokens 40",
}
NO_TABLES = {"floor"}
NAMES = sorted(
    path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [*NAMES, "lab.stamps", "lab.turns", "common.checkpoint"])
def test_every_command_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was measured in the one run of a file, whose tables were printed; nothing has failed."""
    printed = capsys.readouterr().out
    (run,) = read_runs(path)
    statuses = {entry["status"] for entry in run["entries"]}
    assert statuses in ({"ok"}, {"ok", "missing"}), run["entries"]
    if run["benchmark"] not in NO_TABLES:
        assert report.main([str(path)]) == 0
        assert capsys.readouterr().out.strip() in printed, "the table can be had from the file"
    return [entry for entry in run["entries"] if entry["status"] == "ok"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_small(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, more = COMMANDS[name], []
    if name == "constraints":
        pytest.importorskip("llguidance")
        (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_json())
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
        more = ["--tokenizer", str(tmp_path)]
    module, path = importlib.import_module(f"benchmarks.{name.split()[0]}"), tmp_path / "r.jsonl"
    assert module.main([*given.split(), *more, "--json", str(path)]) == 0
    for entry in checked(path, capsys):
        assert CHECKS.get(entry.get("what", ""), lambda _: True)(entry), entry


CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "decode": lambda e: (
        e["quiet_steps"] == e["steps"] == 12
        and e["rows_equal"]
        and e["depths_equal"]
        and all(us > 0 for us in e["host_us"].values())
    ),
    "gain": lambda e: (
        e["tokens_equal"]
        and e["observed"]
        == pytest.approx(e["tokens_per_s"]["pipe"] / e["tokens_per_s"]["block"] - 1, abs=1e-4)
        and (not e["capped"] or e["zombie_share"] == 0)
    ),
    "long": lambda e: 0 < e["active_share"] < 1,
    "cell": lambda e: e["requests"] == 5 and e["ttft_ms"]["p50"] <= e["ttft_ms"]["p99"],
    "quality": lambda e: (
        e["tokens"] == 40
        and 200 < e["perplexity"] < 300
        and isinstance(e["ms_per_step"], float)  # a difference of few ms: load may turn its sign
        and ("kl" not in e or 0 < e["kl"]["mean"] <= e["kl"]["p99"] < 0.02)
    ),
    "objects": lambda e: {mode["split"] for mode in e["modes"].values()} == {0},
    "constraints": lambda e: (
        {name for name, mode in e["modes"].items() if mode["split"] > 0}
        == {"grammar", "alone", "one", "callable"}
    ),
}


def test_one_that_cannot_be_made_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = "--model nonesuch,tiny --device cpu --dtype float32 --streams 1 --requests 3"
    given += f" --calibrate 3 --length 16 --prompt 8 --json {path}"
    assert bubble.main(given.split()) == 1
    (run,) = read_runs(path)
    assert [entry["status"] for entry in run["entries"]] == ["failed", "ok", "ok"]
    assert "nonesuch" in run["entries"][0]["error"]


def test_schemas_are_judged_one_by_one(
    narrow: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    given, path = tmp_path / "schemas.jsonl", tmp_path / "r.jsonl"
    forms = ({"enum": ["a", "b"]}, {"not": {}}, {"type": "array", "minItems": 50})
    lines = [json.dumps({"name": f"s{i}", "schema": form}) for i, form in enumerate(forms)]
    given.write_text("\n".join(lines))
    monkeypatch.setattr(schemas, "load_model", lambda _: narrow)
    assert schemas.main([str(given), "--rows", "5", "--cap", "6", "--json", str(path)]) == 0
    (run,) = read_runs(path)
    assert (run["served"], sum(run["refused"].values()), run["on_device"]) == (2, 1, 1)
    for entry in run["entries"]:
        counts = entry["counts"]
        assert (counts["ended and valid"], counts["cut, a beginning"]) == (1, 1)
        assert counts["plain rows"] == counts["plain rows with their tokens"] == 3


def test_the_host_s_work_of_each_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, given = tmp_path / "host.json", "--rows 2 --steps 80 --rounds 1 --json"
    assert host.main([*given.split(), str(path)]) == 0
    measured = {
        result["mode"]: result["host_us"] for result in json.loads(path.read_text())["results"]
    }
    left_out = "text is left out" in capsys.readouterr().out
    assert set(measured) == set(host.MODES) - ({"text"} if left_out else set())
    assert all(us > 0 for us in measured.values())


def test_eight_times_the_rows_cost_less_than_three_times_the_host_work() -> None:
    """Rows are columns: 1.5 times as a rule. The two take turns, so both meet the same load."""
    pairs = [[host.measure("quiet", rows, 300) for rows in (32, 256)] for _ in range(3)]
    assert min(many / few for few, many in pairs) < 3.0, pairs


# --- what a figure rests on -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gigabytes", "kib"),
    [
        ("qwen3-0.6b", 1.192, 112),
        ("llama-3.2-1b", 2.472, 32),
        ("qwen3-4b", 8.045, 144),
        ("qwen3-8b", 15.14, 144),  # whose embedding is not tied, and not read whole
    ],
)
def test_bytes_of_a_step_are_those_computed_by_hand(model: str, gigabytes: float, kib: int) -> None:
    weights = empty_weights(SHAPES[model], torch.bfloat16, "meta")
    assert weights.bytes_per_step == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert SHAPES[model].kv_bytes_per_token(2) == kib * 1024


def test_bytes_of_a_step_of_fewer_bits_are_those_computed_by_hand() -> None:
    """TINY in int4, a scale in float16 for 64 columns or for 32 of the 96 that down has; a head in
    fp8, and norms in float32."""
    weights = open_model("tiny", torch.float32, torch.device("cpu"), "int4")[1]
    linears = (128 + 64 + 192) * (64 // 2 + 2) + 64 * (96 // 2 + 3 * 2)
    norms = 2 * 64 + 2 * 16
    assert weights.bytes_per_step == 2 * (linears + 4 * norms) + 256 * (64 + 4) + 4 * 64


def test_a_session_refuses_wrong_tokens_and_sees_rows_that_differ() -> None:
    config, weights = open_model("tiny", torch.float32, torch.device("cpu"))
    with Session(config, weights, random_prompts(config.vocab, 2, 8), 32, depth=2) as session:
        session.begin(8)
        session.check()
        assert session.rows_equal()
        tokens = session.tokens[session.rows[1].index]
        tokens[3] = (tokens[3] + 1) % config.vocab
        assert not session.rows_equal()
        tokens[3] = config.vocab
        with pytest.raises(BenchmarkError, match="outside"):
            session.check()


def test_depths_generate_the_same_and_seeds_do_not() -> None:
    config, weights = open_model("tiny", torch.float32, torch.device("cpu"))
    load, digests = Load(3, 3, 8, 16, 96, 1.0), []
    for depth in (1, 2):
        with open_server(config, weights, load, depth) as engine:
            digests += [serve(engine, load, seed).digest for seed in (1, 2)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_the_mix_of_seed_7_is_the_published_burst() -> None:
    asks = make_asks(LOADS["mix"], 256, None, 151936, 7)
    assert sum(len(ask.prompt) for ask in asks) == 132_852
    assert sum(ask.answer for ask in asks) == 36_608


# --- a GPU's --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_activity_counts_a_steady_step_on_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: CUPTI has one subscriber, and torch.profiler has it from its first
    use on."""
    path = tmp_path / "r.jsonl"
    sizes = ["--model", "tiny", "--batches", "2", "--steps", "50"]
    assert run_module("benchmarks.activity", [*sizes, "--json", str(path)], 300) is None
    entries = read_runs(path)[0]["entries"]
    assert [entry["passed"] for entry in entries if entry["what"] == "counts"] == [True, True]


def test_builds_in_turns_write_a_file_that_they_take_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, way = tmp_path / "turns.jsonl", f"today={OPS_FILE}"
    given = f"--device cpu --model tiny --batches 1 --rounds 1 --ways {way} --json {path}".split()
    assert turns.main(given) == 0
    assert "tiny B=1   today" in capsys.readouterr().out
    (run,) = read_runs(path)
    assert [entry["way"] for entry in run["entries"]] == ["today"]
    assert turns.arguments(given).json == path
