"""benchmarks.peers on a tiny model and the CPU: each peer in its own process, the same tokens, and
what goes wrong is told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import peers
from benchmarks.common import checkpoint
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import BenchmarkError, read_runs
from benchmarks.common.session import random_prompts
from benchmarks.engines.catalog import open_peer
from benchmarks.engines.compiled import Compiled
from benchmarks.engines.ours import Ours
from benchmarks.engines.peer import Setup, Tokens, Window, by_difference, by_steps
from photon_ext.models.loading.loader import load_model
from tests.models.tiny import VOCAB, greedy_ids, saved_tiny_model

HERE = ("ours", "hf-static", "compiled")  # in processes of their own, which take long to start
WINDOW = Window(prompt=5, first=3, last=12)


def setup_of(directory: Path) -> Setup:
    return Setup(str(directory), "float32", "cpu", WINDOW)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved_tiny_model("llama-plain", folder)
    return folder


@pytest.fixture(scope="module")
def entries(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("results") / "peers.jsonl"
    sizes = "--batches 2 --new-tokens 16 --floor-gib 0.01 --seconds 10 --timeout 300"
    given = f"--model {directory} --device cpu --dtype float32 {sizes}".split()
    code = peers.main([*given, "--peers", ",".join([*HERE, "vllm"]), "--json", str(path)])
    assert code == 0
    (run,) = read_runs(path)
    found: list[dict[str, Any]] = run["entries"]
    return found


def test_every_peer_here_is_measured_and_the_others_are_missing(
    entries: list[dict[str, Any]],
) -> None:
    assert [entry["status"] for entry in entries] == ["ok"] * 4 + ["missing"]
    assert [entry["peer"] for entry in entries[1:]] == [*HERE, "vllm"]
    assert "pip install vllm" in entries[-1]["reason"] or "on a GPU only" in entries[-1]["reason"]


def test_all_peers_give_the_same_tokens(entries: list[dict[str, Any]], directory: Path) -> None:
    measured = entries[1:-1]
    assert [entry["same_tokens"] for entry in measured] == [1.0] * len(HERE)
    prompt = random_prompts(VOCAB, 2, peers.PROMPT)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert measured[0]["first_tokens"] == greedy_ids(model, prompt, 8)
    assert len(set(measured[0]["first_tokens"])) >= 3


@pytest.mark.slow("transformers' continuous batching takes long to begin")
@pytest.mark.parametrize("name", ["ours-engine", "hf-cb"])
def test_the_other_peers_give_the_same_tokens(name: str, directory: Path) -> None:
    peer = open_peer(name, setup_of(directory))
    prompts = random_prompts(VOCAB, 2, WINDOW.prompt)
    measured = peer.measure(prompts, WINDOW)
    peer.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert measured.tokens == [greedy_ids(model, prompt, WINDOW.last) for prompt in prompts]
    assert measured.ms_per_step > 0


@pytest.mark.slow("torch compiles the step")
@pytest.mark.parametrize("name", ["llama-7-1-96-scaled", "llama-biased-linear", "qwen3-6-3-24"])
def test_the_compiled_step_is_the_model(name: str, tmp_path: Path) -> None:
    model = saved_tiny_model(name, tmp_path)
    setup = setup_of(tmp_path)
    prompts = random_prompts(VOCAB, 3, WINDOW.prompt)
    measured = Compiled(setup, compiles=False).measure(prompts, WINDOW)
    assert measured.tokens == [greedy_ids(model, prompt, WINDOW.last) for prompt in prompts]
    assert measured.tokens == Ours(setup).measure(prompts, WINDOW).tokens


@pytest.mark.parametrize("name", ["tiny", "llama-small"])
def test_a_written_checkpoint_is_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden": 32, "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 64}
    sizes |= {"intermediate": 48, "eos_ids": (), "tied_embeddings": False}
    monkeypatch.setitem(SHAPES, "llama-small", replace(SHAPES["llama-3.2-1b"], **sizes))
    monkeypatch.setattr(checkpoint, "SHARD_SIZE", "20KB")
    given = ["--model", name, "--dtype", "bfloat16", "--device", "cpu", str(tmp_path)]
    assert checkpoint.main(given) == 0
    loaded = load_model(tmp_path)
    config, weights = open_model(name, torch.bfloat16, torch.device("cpu"))
    assert loaded.config == config
    assert loaded.weights.dtype == torch.bfloat16
    pairs = zip(loaded.weights.tensors(), weights.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_steps_are_taken_from_the_window() -> None:
    tokens: Tokens = [[1] * 12]
    measured = by_steps([9.0] * 2 + [1.0] * 4 + [3.0] * 5, tokens, WINDOW)
    assert (measured.ms_per_step, measured.ms_spread, measured.samples) == (3.0, (1.0, 3.0), 9)
    with pytest.raises(BenchmarkError, match="8 steps were timed, the window has 9"):
        by_steps([1.0] * 8, tokens, WINDOW)
    with pytest.raises(BenchmarkError, match=r"\[11, 12\] new tokens, expected 12"):
        by_steps([1.0] * 11, [[1] * 12, [1] * 11], WINDOW)


class Clocked:
    """An engine on a clock of its own: what its runs of `count` tokens take, in seconds, is
    `takes(count, runs before)`."""

    def __init__(self, takes: Callable[[int, int], float], patch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        self._takes, self._now = takes, 0.0
        patch.setattr("benchmarks.engines.peer.time.perf_counter", lambda: self._now)

    def __call__(self, prompts: list[list[int]], count: int) -> Tokens:
        self._now += self._takes(count, len(self.counts))
        self.counts.append(count)
        return [[1] * count for _ in prompts]


def test_differences_cancel_what_both_runs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Clocked(lambda count, _: 0.05 + 0.004 * count, monkeypatch)
    measured = by_difference(generate, [[1]], WINDOW, 9.0)
    assert (measured.ms_per_step, measured.samples) == (pytest.approx(4.0), 3)
    with pytest.raises(BenchmarkError, match="stopped early"):
        by_difference(lambda prompts, count: [[1] for _ in prompts], [[1]], WINDOW, 9.0)
