"""The benchmarks themselves, on a tiny model and the CPU."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import activity, adapters, constraints, cpu, decode, floor, objects, schemas
from benchmarks.common import turns
from benchmarks.common.models import SHAPES, TINY, open_model
from benchmarks.common.result import BenchmarkError
from benchmarks.common.session import Session, random_prompts
from benchmarks.engines.process import run_module
from photon_ext import Engine, SamplingParams
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.output import Output
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.models.weights import empty_weights
from tests.engine.byte_tokenizer import byte_tokenizer

DEVICE = torch.device("cpu")
ANY_JSON = "a value may be any JSON, which nests to any depth"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("results") / "decode.json"
    arguments = "--model tiny --device cpu --dtype float32 --batches 1,3 --depth 1,2 --context 40"
    arguments += " --steps 12 --warm-up 4 --floor-gib 0.01 --timeline-cost"
    assert decode.main([*arguments.split(), "--json", str(path)]) == 0
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_decode_measures_every_batch_and_depth(measured: dict[str, Any]) -> None:
    whats = ["floor", "check", *["decode"] * 4, *["timeline"] * 2]
    assert [entry["what"] for entry in measured["entries"]] == whats
    decodes = measured["entries"][2:6]
    sizes = [(entry["batch"], entry["depth"]) for entry in decodes]
    assert sizes == [(1, 1), (1, 2), (3, 1), (3, 2)]
    for entry in decodes:
        assert entry["steps"] == 12
        assert entry["quiet_steps"] == 12
        assert entry["rows_equal"]
        assert entry["depths_equal"]
        assert abs(entry["context"] - 40) <= 2
        assert entry["ms_per_step"]["median"] > 0
        assert entry["step_gap_us"]["count"] >= 8
        assert set(entry["host_us"]) == {"plan", "launch", "wait", "commit", "deliver", "busy"}
        assert all(value > 0 for value in entry["host_us"].values())
        # a whole step, and a split one in two
        assert entry["graphs"] == 2 * entry["depth"] + entry["depth"]


def test_decode_counts_the_bytes_a_step_reads(measured: dict[str, Any]) -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    entry = measured["entries"][5]
    assert entry["bytes_per_step"]["weights"] == weights.nbytes == weights.bytes_per_step
    assert config.kv_bytes_per_token(4) == 2 * 2 * 2 * 16 * 4
    assert entry["bytes_per_step"]["kv"] == round(
        3 * entry["context"] * config.kv_bytes_per_token(4)
    )
    floor_entry = measured["entries"][0]
    expected = sum(entry["bytes_per_step"].values()) / floor_entry["bytes_per_s"] * 1e3
    assert entry["floor_ms"] == pytest.approx(expected, rel=1e-4)
    beyond = entry["ms_per_step"]["median"] - entry["floor_ms"]
    assert entry["us_per_node"] == pytest.approx(beyond / entry["graph_nodes"] * 1e3, rel=1e-3)
    assert entry["predicted_ms"] is None, "the model's nodes are a GPU's"


def test_decode_through_the_engine_and_forwards_of_prompts_are_measured_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.json"
    given = "--model tiny --device cpu --dtype float32 --batches 1,3 --engine plain,exact"
    given += f" --prefill 24 --floor-gib 0.01 --json {path}"
    assert decode.main(given.split()) == 0
    entries = json.loads(path.read_text())["entries"]
    whats = ["floor", "check", *["engine"] * 4, *["prefill"] * 2]
    assert [entry["what"] for entry in entries] == whats
    sizes = [(entry["way"], entry["batch"]) for entry in entries[2:6]]
    assert sizes == [("plain", 1), ("plain", 3), ("exact", 1), ("exact", 3)]
    for entry in entries[2:6]:
        times = entry["seconds_of_answers"]
        between = (times["24"] - times["8"]) / 16 * 1e3
        assert entry["ms_per_step"] == pytest.approx(between, rel=1e-3, abs=1e-3)
        assert entry["context"] == 64 + 16
        assert entry["floor_ms"] > 0 < entry["gap_us"]["p99"]
    for entry in entries[6:]:
        # two layers of q, k and v; o; gate and up; down
        weights = 2 * 64 * (4 * 16 + 4 * 16 + 64 + 3 * 96)
        flops = entry["tflop_per_s"] * 1e12 * entry["ms"] / 1e3
        assert flops == pytest.approx(2 * 24 * weights, rel=1e-3)
        assert entry["share"] == pytest.approx(
            entry["tflop_per_s"] / entry["product_tflop_per_s"], rel=1e-3
        )
    assert "through the engine" in capsys.readouterr().out


def test_the_checks_for_a_timeline_are_compared_with_none(measured: dict[str, Any]) -> None:
    for entry in measured["entries"][6:]:
        assert len(entry["ratios"]) == decode.TIMELINE_ROUNDS["cpu"]
        assert entry["ratio"] == pytest.approx(median(entry["ratios"]), rel=1e-4)
        assert entry["off_ms"] > 0 < entry["bare_ms"]


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


def test_a_model_that_does_not_exist_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    given = "--model nonesuch,tiny --device cpu --batches 1 --depth 1 --steps 8 --context 24"
    given += f" --floor-gib 0.01 --json {path}"
    assert decode.main(given.split()) == 1
    entries = json.loads(path.read_text())["entries"]
    found = [(entry["what"], entry["status"]) for entry in entries]
    assert found == [("floor", "ok"), ("check", "failed"), ("check", "ok"), ("decode", "ok")]
    assert "nonesuch" in entries[1]["error"]


def test_a_session_refuses_wrong_tokens_and_sees_rows_that_differ() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    prompts = random_prompts(TINY.vocab, 2, 8)
    assert prompts[0] == prompts[1]
    with Session(config, weights, prompts, 32, depth=2) as session:
        session.begin(8)
        session.check()
        assert session.rows_equal()
        tokens = session.tokens[session.rows[1].index]
        tokens[3] = (tokens[3] + 1) % TINY.vocab
        assert not session.rows_equal()
        tokens[3] = TINY.vocab
        with pytest.raises(BenchmarkError, match="outside"):
            session.check()


def test_a_session_refuses_logits_that_are_not_finite() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    weights.head.norm[0] = float("inf")
    with Session(config, weights, random_prompts(TINY.vocab, 1, 8), 32, depth=1) as session:
        session.begin()
        with pytest.raises(BenchmarkError, match="not all finite"):
            session.check()


def test_a_row_that_ends_while_measured_is_an_error() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    with (
        pytest.raises(BenchmarkError, match="ended"),
        Session(config, weights, [[1, 2, 3]], 4, depth=1) as session,
    ):
        session.run(8)


def test_floor_reads_the_whole_buffer_by_the_best_method() -> None:
    found = floor.read_floor(DEVICE, 1 << 22)
    assert found["bytes"] == 1 << 22
    assert found["bytes_per_s"] == max(
        value for value in found["methods"].values() if isinstance(value, float)
    )


def test_activity_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "activity.json"
    assert activity.main(["--device", "cpu", "--json", str(path)]) == 0
    assert "needs a GPU" in capsys.readouterr().out
    assert json.loads(path.read_text())["skipped"] == "no GPU"


def test_cpu_compares_equal_tokens_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "cpu.json"
    assert (
        cpu.main(["--model", "tiny", "--new-tokens", "8", "--repeats", "1", "--json", str(path)])
        == 0
    )
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["tokens_equal"]
    assert set(entry["rates"]) == {"float32", "bfloat16", "transformers float32"}
    assert entry["ratio"]["transformers float32"] == 1.0


def test_requests_at_once_are_compared_with_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.json"
    given = ["--model", "tiny", "--together", "--repeats", "1", "--json", str(path)]
    assert cpu.main(given) == 0
    assert "8 requests at once and one by one" in capsys.readouterr().out
    entries = json.loads(path.read_text())["entries"]
    assert [entry["dtype"] for entry in entries] == ["float32", "bfloat16"]
    for entry in entries:
        assert entry["tokens_equal"]
        rates = entry["tokens_per_s"], entry["one_by_one_tokens_per_s"]
        assert entry["ratio"] == pytest.approx(rates[0] / rates[1], rel=1e-3)


class FakeLlama:
    """llama-cpp-python's class: the same tokens as whoever made it says."""

    tokens: ClassVar[list[int]] = [7] * 40
    given: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: str, **options: Any) -> None:
        FakeLlama.given = {"path": path, **options}

    def reset(self) -> None:
        pass

    def generate(self, prompt: list[int], **options: Any) -> Iterator[int]:
        assert options["temp"] == 0.0, "greedy"
        FakeLlama.given["prompt"] = prompt
        yield from self.tokens


def test_llama_cpp_has_the_same_prompt_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path, model = tmp_path / "cpu.json", tmp_path / "tiny.gguf"
    fake = ModuleType("llama_cpp")
    fake.__dict__.update(Llama=FakeLlama, __spec__=ModuleSpec("llama_cpp", None))
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    config, weights = open_model("tiny", torch.float32, DEVICE)
    monkeypatch.setattr(cpu, "open_model", lambda *_: (config, weights))
    monkeypatch.setattr(cpu, "encode", lambda *_: [3, 5, 7])
    model.write_text("")
    sizes = ["--new-tokens", "8", "--repeats", "1", "--threads", "1"]
    assert cpu.main(["--model", str(model), *sizes, "--json", str(path)]) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    assert set(entry["rates"]) == {"float32", "transformers float32", "llama.cpp"}
    assert FakeLlama.given["path"] == str(model)
    assert (FakeLlama.given["n_threads"], FakeLlama.given["prompt"]) == (1, [3, 5, 7])
    assert "llama.cpp: as stored in the file" in capsys.readouterr().out


def test_llama_cpp_is_left_out_with_a_word_where_it_is_not_installed() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        assert "pip install llama-cpp-python" in cpu.open_llama_cpp("tiny", 8, 1)[1]
    else:
        assert "needs a .gguf file" in cpu.open_llama_cpp("tiny", 8, 1)[1]


@pytest.mark.gpu
def test_activity_counts_a_steady_step_on_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: CUPTI has one subscriber, and torch.profiler has it from its first
    use on."""
    path = tmp_path / "activity.json"
    sizes = ["--model", "tiny", "--batches", "2", "--steps", "50"]
    assert run_module("benchmarks.activity", [*sizes, "--json", str(path)], 300) is None
    entries = json.loads(path.read_text())["entries"]
    assert [entry["passed"] for entry in entries if entry["what"] == "counts"] == [True, True]


def test_constraints_in_turns_with_plain_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_json())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    path = tmp_path / "constraints.json"
    given = "--model tiny --device cpu --rows 1 --steps 40 --rounds 1 --callable-us 200 --json"
    assert constraints.main([*given.split(), str(path), "--tokenizer", str(tmp_path)]) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    modes = entry["modes"]
    assert tuple(modes) == constraints.MODES
    assert modes["plain"]["ratio"] == 1
    split = {mode: figures["split"] > 0 for mode, figures in modes.items()}
    held = {"grammar", "alone", "one", "callable"}  # by the host
    assert split == {mode: mode in held for mode in constraints.MODES}
    # the gap and the step are means of different windows: on a busy machine this may be above 1
    assert all(figures["idle"] >= 0 for figures in modes.values())
    assert modes["callable"]["work_ms"] > 0.2
    assert modes["callable"]["ms"] > modes["callable"]["work_ms"] / 2
    assert "callable" in capsys.readouterr().out


def test_adapters_beside_an_engine_without_slots(tmp_path: Path) -> None:
    path = tmp_path / "adapters.json"
    given = "--model tiny --device cpu --rows 3 --adapters 1,3 --steps 32 --rounds 1 --json"
    assert adapters.main([*given.split(), str(path)]) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    assert tuple(entry["modes"]) == ("no slots", "none", "1", "3")
    assert all(figures["ms"] > 0 for figures in entry["modes"].values())


def test_objects_beside_text_split_no_step(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    given = "--model tiny --device cpu --rows 4 --steps 33 --rounds 1 --json"
    assert objects.main([*given.split(), str(path)]) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    assert tuple(entry["modes"]) == tuple(objects.MODES)
    assert [figures["split"] for figures in entry["modes"].values()] == [0, 0, 0]


def test_every_other_row_of_half_has_objects() -> None:
    asks = objects.asks_of(2, 8, 40)
    skills = [ask.options.get("skill") for ask in asks]
    assert skills == [None, "point", None, "detect", None, "segment", None, "point"]
    assert [ask.options["max_objects"] for ask in asks[1:6:2]] == [20, 14, 20]
    assert not any(ask.options for ask in objects.asks_of(0, 8, 40))


def test_an_answer_that_ends_early_is_no_figure() -> None:
    config, weights = open_model("tiny", None, torch.device("cpu"))
    asks = [turns.Ask(SamplingParams(max_new_tokens=39, ignore_eos=True))] * 2
    with (
        Engine.from_weights(config, weights, **turns.sizes(2, 40)) as engine,
        pytest.raises(BenchmarkError, match="an answer ended early: length"),
    ):
        turns.Decoding(engine, 2, 40).run(asks)


def test_schemas_are_judged_one_by_one(
    narrow: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    given, path = tmp_path / "schemas.jsonl", tmp_path / "result.json"
    forms = ({"enum": ["a", "b"]}, {"not": {}}, {"type": "array", "minItems": 50})
    lines = [json.dumps({"name": f"s{i}", "schema": form}) for i, form in enumerate(forms)]
    given.write_text("\n".join(lines))
    monkeypatch.setattr(schemas, "load_model", lambda _: narrow)
    sizes = ["--rows", "5", "--cap", "6", "--json", str(path)]
    assert schemas.main([str(given), *sizes]) == 0
    result = json.loads(path.read_text())
    assert result["served"] == 2
    assert result["refused"] == {'Unimplemented keys: ["not"]': 1}
    assert (result["on_device"], result["on_host"]) == (1, {ANY_JSON: 1})
    for entry in result["entries"]:
        counts = entry["counts"]
        assert (counts["ended and valid"], counts["cut, a beginning"]) == (1, 1)
        assert counts["plain rows"] == counts["plain rows with their tokens"] == 3
    invalid = Output('"c"', (), "stop", "constraint", None, 1, 0, None, None)
    assert judged(narrow, forms[0], invalid) == "invalid"
    beyond = replace(invalid, token_ids=(5,), finish_reason="length")
    assert judged(narrow, forms[0], beyond) == "no beginning"


def judged(narrow: LoadedModel, schema: dict[str, Any], output: Output) -> str:
    bench = schemas.Bench.__new__(schemas.Bench)
    config, tokenizer = narrow.config, narrow.tokenizer
    bench._compiler = GrammarCompiler(tokenizer, config.vocab, config.eos_ids)
    bench._words, bench.fill_us = memoryview(bytearray(config.vocab // 8)).cast("i"), []
    return bench._judged(schema, output)
