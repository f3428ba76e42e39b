"""`photon-ext info`: it says what is there and what is missing, also without torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from photon_ext import _build_info
from tests.cli.command import blocked_torch, entries, run, run_process

NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"


def test_info_names_versions_devices_kernels_and_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    parts = "photon_ext ", "torch ", "build:", "devices:", "kernel threads", "kernels:", "cuda:"
    assert all(part in out for part in (*parts, "missing:"))


def test_info_without_cuda_calls_it_none_and_optional(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_build_info.BUILD_INFO, "cuda", None)
    monkeypatch.setitem(_build_info.BUILD_INFO, "cuda_archs", [])
    monkeypatch.setitem(sys.modules, "photon_ext._C", SimpleNamespace(cuda_compiled=False))
    code, out, _ = run(capsys, "info")
    lines = [line.strip() for line in out.splitlines()]
    assert code == 0
    assert "cuda: none" in lines
    assert "cuda_archs: none" in lines
    missing = lines[lines.index("missing:") :]
    assert any(line.startswith("for a GPU: the CUDA kernels") for line in missing)
    of_gpus = [line for line in missing if "CUDA" in line or "GPU" in line]
    assert all(line.startswith("for a GPU: ") for line in of_gpus)


def test_info_advises_no_toolkit_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "photon_ext._C", SimpleNamespace(cuda_compiled=False))
    monkeypatch.setattr(
        shutil, "which", lambda name: name if name.startswith(str(tmp_path)) else None
    )
    begin = "for a GPU: the CUDA kernels;"
    again = "PHOTON_CUDA=1 python setup.py build_ext --inplace"
    told = f"{begin} install the CUDA toolkit (nvcc), then {again}\n"
    assert told in run(capsys, "info")[1]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    told = f"{begin} {tmp_path}/bin/nvcc is there, so build again: {again}\n"
    assert told in run(capsys, "info")[1]


@pytest.mark.parametrize("entry", entries())
def test_without_torch_it_says_so(entry: str, tmp_path: Path) -> None:
    blocked_torch(tmp_path, NO_TORCH)
    done = run_process(entry, tmp_path, "info")
    assert (done.returncode, done.stderr) == (0, "")
    missing = done.stdout[done.stdout.index("missing:") :]
    assert "torch, which everything needs: see pytorch.org" in missing
    assert "kernels:\n  none: photon_ext's libraries cannot be loaded" in done.stdout


@pytest.mark.parametrize("entry", entries())
def test_without_torch_other_commands_say_what_to_do(entry: str, tmp_path: Path) -> None:
    blocked_torch(tmp_path, NO_TORCH)
    done = run_process(entry, tmp_path, "generate", "hello")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("photon-ext generate: torch is not installed")
    assert "photon-ext info says what is missing" in done.stderr
    assert run_process(entry, tmp_path, "--version").stdout.startswith("photon-ext ")


@pytest.mark.parametrize("entry", entries())
def test_ctrl_c_while_torch_is_imported_is_one_line(entry: str, tmp_path: Path) -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    blocked_torch(tmp_path, f"import os, signal, time\n{interrupt}\ntime.sleep(60)\n")
    for arguments in (("info",), ("generate", "hello"), ("chat",)):
        done = run_process(entry, tmp_path, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("entry", entries())
def test_a_plan_needs_no_torch(entry: str, tmp_path: Path) -> None:
    blocked_torch(tmp_path, NO_TORCH)
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
    sizes |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    for name in ("qwen3-0.6b", str(model)):
        done = run_process(entry, tmp_path, "info", "--plan", name)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{name} in bfloat16 on h200: backend hopper\n")


def test_a_plan_is_a_table_of_ops_by_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "info", "--plan", "qwen3-4b", "--device", "h200")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    ranges = ["1-8", "9-32", "33-128", "129+"]
    assert ["decode", "steps,", "by", "tokens", *ranges] in lines
    down = ["down", "narrow", "mid", "batch", "cuBLAS"]
    assert lines.count(down) == 1
    assert [*down, "cuBLAS"] in lines  # in steps with chunks
    assert ["attention", *["split_attention"] * 2, *["batch_attention"] * 2] in lines
    chunks = [*["balanced_attention"] * 4, "chunk_attention*"]  # of more than 4,096 tokens
    assert ["attention", "of", "chunks", *chunks] in lines
    assert "fixed positions" not in out
    _, out, _ = run(capsys, "info", "--plan", "qwen3-4b", "--device", "h200", "--exact")
    assert "exact: balanced_attention cuts contexts at fixed positions" in out


def test_a_plan_says_why_a_kernel_is_not_the_one_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "info", "--plan", "qwen3-4b", "--device", "a100", "--backend", "hopper")
    assert "down                   tile*       cuBLAS" in out
    assert "* attention (attention; attention of decode rows): the device's compute" in out
    _, out, _ = run(capsys, "info", "--plan", "qwen3-4b", "--device", "a100")
    assert "backend portable\nhopper was not chosen: the device's compute capability" in out
    exact = ("--backend", "hopper", "--dtype", "float32", "--exact", "--device", "h200")
    _, out, _ = run(capsys, "info", "--plan", "llama-3.2-1b", *exact)
    assert "an engine with exact=True refuses this: q, k, v: the dtype is not bfloat16" in out


def test_a_plan_of_keys_and_values_in_fp8_runs_chunk_attention_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fp8 = ("--plan", "qwen3-4b", "--device", "h200", "--kv-dtype", "fp8")
    _, out, _ = run(capsys, "info", *fp8)
    assert out.startswith("qwen3-4b in bfloat16, keys and values in fp8 on h200: backend hopper\n")
    lines = [line.split() for line in out.splitlines()]
    assert ["attention", *["split_attention"] * 4] in lines
    assert ["attention", "of", "chunks", *["chunk_attention*"] * 4] in lines
    why = "keys and values are fp8, which balanced attention does not read"
    assert f"* chunk_attention (attention of chunks): {why}" in out
    _, out, _ = run(capsys, "info", *fp8, "--exact")
    assert "fixed positions" not in out
    _, out, _ = run(capsys, "info", *fp8, "--json")
    assert json.loads(out)["kv_dtype"] == "fp8"
    _, _, err = run(capsys, "info", "--kv-dtype", "fp8")
    assert err.startswith("photon-ext info: --kv-dtype: without --plan MODEL")


def test_a_plan_of_activations_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ("--plan", "qwen3-4b", "--device", "h200", "--activations", "fp8")
    _, out, _ = run(capsys, "info", *fp8, "--quantize", "fp8")
    assert "fp8, activations in fp8 on h200: backend hopper\n" in out.splitlines(True)[0]
    lines = [line.split() for line in out.splitlines()]
    assert ["gate,", "up", "narrow", *["batch_fp8"] * 2, "torch", "fp8"] in lines
    _, out, _ = run(capsys, "info", *fp8, "--quantize", "fp8", "--json")
    assert json.loads(out)["activations"] == "fp8"
    code, _, err = run(capsys, "info", *fp8)
    assert code == 2
    assert "no layer has weights in fp8" in err


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--plan", "smollm2", "--device", "h200", "--json", "--exact")
    found = json.loads(out)
    assert code == 0
    assert {name: value for name, value in found.items() if name != "kernels"} == {
        "model": "smollm2",
        "device": "h200",
        "dtype": "bfloat16",
        "quantization": None,
        "quantization_of_files": "weights in q4_1, q8_0",
        "kv_dtype": None,
        "activations": None,
        "backend": "hopper",
        "exact": True,
        "hopper_unsupported": None,
    }
    large = {"step": "decode", "op": "down", "least": 65, "most": None, "kernel": "large"}
    assert {**large, "why": None} in found["kernels"]
    _, out, _ = run(capsys, "info", "--plan", "qwen3-0.6b", "--device", "b200", "--json")
    assert "PHOTON_HOPPER_ON_10=1 allows them" in json.loads(out)["hopper_unsupported"]


def test_a_plan_of_no_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "info", "--plan", "nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model 'nowhere': no such file or directory" in err
    assert "a model of the Hugging Face Hub, or one of qwen3-0.6b, " in err
    code, out, err = run(capsys, "info", "--device", "h200", "--exact")
    assert (code, out) == (2, "")
    assert err == (
        "photon-ext info: --device, --exact: without --plan MODEL there is nothing to choose\n"
    )


def test_what_info_says_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["versions", "build", "devices", "kernels", "missing"]
    assert any(line.startswith("torch ") for line in found["versions"])
