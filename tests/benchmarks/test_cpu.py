"""benchmarks.cpu: sides that must have equal tokens, memory, and llama.cpp beside them."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import cpu
from benchmarks.common.environment import REPOSITORY
from benchmarks.common.formats import converted
from benchmarks.common.models import TINY
from benchmarks.common.result import BenchmarkError, ResultFile, read_runs
from benchmarks.engines.llama_cpp import LlamaCpp, why_absent
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.model_files import resolve_model
from photon_ext.models.requantize import requantized
from photon_ext.models.weights import DecoderWeights, random_weights, weight_modules
from tests.conftest import skip_without_smollm2

ARGUMENTS = Namespace(
    model="a file", prompt="abc", new_tokens=8, quantize=["int4"], repeats=1, threads=1, gguf=None
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stand_in(monkeypatch: pytest.MonkeyPatch, dense_seed: int) -> None:
    """A file in fp8, made of the random weights of seed 0; its dense ones are of another seed."""

    def opened(
        name: str, dtype: torch.dtype | None, device: torch.device, quantize: str | None
    ) -> tuple[ModelConfig, DecoderWeights]:
        seed = dense_seed if quantize == "none" else 0
        made = random_weights(TINY, torch.float32, seed=seed)
        for _, weight in weight_modules(made):
            weight.data.mul_(8)  # so large that tokens matter
        rounded = converted(requantized(TINY, "fp8"), made, torch.float32)
        config = requantized(TINY, "fp8" if quantize == "stored" else quantize)
        return config, converted(config, rounded, dtype or torch.bfloat16)

    monkeypatch.setattr(cpu, "open_model", opened)
    monkeypatch.setattr(cpu, "resolve_model", Path)
    monkeypatch.setattr(cpu, "encode", lambda name, prompt, vocab: [1, 2, 3])


def test_all_forms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    stand_in(monkeypatch, dense_seed=0)
    entry = cpu.compare(ARGUMENTS, ResultFile("cpu", ARGUMENTS, None))
    forms = ["float32", "bfloat16", "stored", "int4"]
    assert list(entry["rates"]) == [*forms, "transformers float32"]
    sizes = [entry["step_mib"][form] for form in forms]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(2 * sizes[1])


def test_stored_weights_that_are_other_numbers_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    stand_in(monkeypatch, dense_seed=1)
    with pytest.raises(BenchmarkError, match="with the weights as stored it is"):
        cpu.compare(ARGUMENTS, ResultFile("cpu", ARGUMENTS, None))


def test_a_model_of_random_weights_is_compared_by_equal_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "r.jsonl"
    given = ["--model", "tiny", "--repeats", "1", "--json", str(path), "--new-tokens"]
    assert cpu.main([*given, "8"]) == 0
    (run,) = read_runs(path)
    single, memory = run["entries"]
    assert single["tokens_equal"]
    assert single["llama_cpp"].startswith("needs a .gguf file")
    assert 0 < memory["ours"]["added_mib"] < memory["ours"]["peak_mib"]
    assert "llama.cpp" not in memory


def test_requests_at_once_in_the_forms_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = "--model tiny --together --repeats 1 --quantize fp8,int4 --forms float32,int4"
    assert cpu.main([*given.split(), "--json", str(path)]) == 0
    (run,) = read_runs(path)
    assert [entry["of"] for entry in run["entries"]] == ["float32", "int4"]
    for entry in run["entries"]:
        assert entry["tokens_equal"]
        assert set(entry["runs_s"]) == {"one_by_one", "at_once"}
        assert entry["llama_cpp_tokens_per_s"] is None
    unknown = "--model tiny --together --forms stored"
    assert cpu.main(unknown.split()) == 1


def test_the_most_threads_are_those_of_our_kernels() -> None:
    source = (REPOSITORY / "csrc" / "cpu" / "parallel.cpp").read_text()
    assert f"kMaxThreads = {cpu.MOST_THREADS};" in source


def test_why_llama_cpp_is_left_out() -> None:
    assert "needs a .gguf file" in why_absent(None)
    installed = importlib.util.find_spec("llama_cpp") is not None
    assert ("pip install" in why_absent(Path("a.gguf"))) == (not installed)


def test_sequences_of_llama_cpp_beside_each_other_are_those_of_each_alone() -> None:
    """In all but the rounding, which may choose another token: hence short ones."""
    pytest.importorskip("llama_cpp")
    skip_without_smollm2()
    llama = LlamaCpp(resolve_model("smollm2"), 40, 1, sequences=3)
    prompts, counts = [[7, 300, 41, 9], [5000], [12, 13, 14]], [3, 5, 1]
    together = llama.generate(prompts, counts).tokens
    alone = [llama.generate([p], [c]).tokens[0] for p, c in zip(prompts, counts, strict=True)]
    assert together == alone
    assert [len(one) for one in together] == counts
    assert llama.about.startswith("llama-cpp-python ")
    llama.close()
    with pytest.raises(BenchmarkError, match=r"cannot load nonesuch\.gguf"):
        LlamaCpp(Path("nonesuch.gguf"), 40, 1)
