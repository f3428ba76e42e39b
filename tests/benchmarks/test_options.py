"""Options that all benchmarks have: what cannot be is refused in a line, before anything is
measured."""

from __future__ import annotations

import importlib
import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

from benchmarks import cpu
from benchmarks.common.environment import REPOSITORY
from benchmarks.common.options import output_file

BENCHMARKS = [
    *("activity", "adapters", "adopt", "bubble", "constraints", "cpu", "decode", "floor"),
    *("kernels", "objects", "peers", "traffic"),
]


def refusal(benchmark: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a benchmark says, which it must say at once."""
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{benchmark}").main(given)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    "line",
    [
        "decode --model , -> argument --model: ',' names nothing",
        "peers --peers , -> argument --peers: ',' names nothing",
        "kernels --ops , -> argument --ops: ',' names nothing",
        "kernels --models nope -> --models nope: unknown; known are tiny",
        "bubble --no-gain -> --no-gain: nothing is left to measure; give --meter-cost or --long",
        "bubble --requests 3,4 -> --requests: '3,4' is not one positive integer",
        "bubble --length x -> --length: 'x' is not a list of integers like 1,8,32",
        "cpu --prompt= -> argument --prompt: it is empty; give some text",
        "cpu --threads 100000 -> argument --threads: '100000' is above 256",
        "peers --seconds nan -> --seconds: 'nan' is not a positive number",
        "peers --floor-gib -1 -> --floor-gib: '-1' is not a positive number",
        "peers --peers nope -> --peers nope: unknown; known are ours",
        "peers --python vllm -> --python: 'vllm': expected PEER=PATH with a peer of",
        "peers --python nope=/bin/python -> 'nope=/bin/python': expected PEER=PATH",
        "decode --steps 0 -> --steps: '0' has a value below 1",
        "decode --seconds inf -> --seconds: 'inf' is not a positive number",
        "adopt --model nope -> --model 'nope' is unknown; use one of tiny",
        "adopt --loop stock,jax -> --loop has ['jax']",
        "adopt --tokens 31 -> --tokens is 31; use at least 32",
        "host --modes idle -> there is no mode 'idle'; there are quiet, handover, text",
        "constraints --modes plain,x -> --modes x: unknown; known are plain, device, grammar",
        "constraints --steps 20 -> --steps is 20; give 32 at least",
        "adapters --steps 20 -> --steps is 20; give 32 at least",
        "adapters --adapters 0 -> --adapters: '0' has a value below 1",
        "objects --steps 20 -> --steps is 20; give 32 at least",
        "floor --gib 1e-9 -> --gib 1e-09: 1 bytes are no buffer to sweep",
        "floor --gib 100000 --device cpu -> --gib 100000: 100000 GiB to sweep do not fit into the ",
        "traffic --loads short,nope -> --loads nope: unknown; known are short, chat, long",
        "traffic --engines sglang -> --engines sglang: unknown; known are ours, vllm",
        "traffic --rates burst,0 -> argument --rates: '0' is not a positive number",
        "traffic --engine depth -> --engine: 'depth': expected OPTION=VALUE or OPTION=VALUE/VALUE",
        "plots x.json --output plot -> 'plot' does not end in .png",
        "plots x.json --output . -> '.' is no plain file; name one",
    ],
)
def test_what_cannot_be_measured_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, _, message = line.partition(" -> ")
    benchmark, *options = given.split()
    assert message in refusal(benchmark, options, capsys)


def test_the_most_threads_are_those_of_our_kernels() -> None:
    source = (REPOSITORY / "csrc" / "cpu" / "parallel.cpp").read_text()
    assert f"kMaxThreads = {cpu.MOST_THREADS};" in source


@pytest.mark.parametrize(
    "given", ["decode --model tiny", "kernels --models tiny", "peers --model tiny --peers ours"]
)
def test_a_floor_of_more_bytes_than_an_integer_tells_is_refused_in_a_line(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, *options = given.split()
    module = importlib.import_module(f"benchmarks.{benchmark}")
    assert module.main(["--device", "cpu", "--floor-gib", "1e300", *options]) == 1
    said = "".join(capsys.readouterr())
    assert "GiB to sweep do not fit into the " in said
    assert "OverflowError" not in said


@pytest.mark.parametrize("benchmark", [*BENCHMARKS, "host"])
def test_a_result_that_cannot_be_written_is_refused(
    benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    said = refusal(benchmark, ["--json", str(tmp_path)], capsys)
    assert said.endswith(f"--json: {str(tmp_path)!r} is no plain file; name one")
    below = refusal(benchmark, ["--json", str(tmp_path / "file" / "new" / "r.json")], capsys)
    assert below.endswith(f"{str(tmp_path / 'file')!r} is no directory that can be written into")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("benchmark", [*BENCHMARKS, "common.checkpoint"])
def test_a_device_that_is_not_there_is_refused(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "--device: device 'gpu' is not one torch knows; use 'cpu', 'cuda' or 'cuda:N'"
    assert unknown in refusal(benchmark, ["--device", "gpu"], capsys)
    absent = "cuda:99" if torch.cuda.is_available() else "cuda"
    assert f"'{absent}'" in refusal(benchmark, ["--device", absent], capsys)


def test_an_output_file_is_not_made_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    assert output_file(str(path)) == path
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("")
    assert output_file(str(tmp_path / "old.json")) == tmp_path / "old.json"
    with pytest.raises(ArgumentTypeError, match="'/dev/null' is no plain file"):
        output_file("/dev/null")
    monkeypatch.setattr(os, "access", lambda *_: False)  # who is root may write everywhere
    with pytest.raises(ArgumentTypeError, match="no directory that can be written into"):
        output_file(str(path))


@pytest.mark.parametrize("benchmark", ["adopt", "bubble", "decode", "kernels", "peers", "traffic"])
def test_without_a_gpu_sizes_fit_a_cpu(benchmark: str) -> None:
    module = importlib.import_module(f"benchmarks.{benchmark}")
    args = vars(module.arguments(["--device", "cpu"]))
    assert {name: args[name] for name in module.ON_CPU} == module.ON_CPU
    assert set(module.ON_CPU) == set(module.ON_GPU)
    name, value = next(iter(module.ON_GPU.items()))
    given = ",".join(value) if isinstance(value, list) else str(value)
    option = f"--{name.replace('_', '-')}"
    chosen = vars(module.arguments(["--device", "cpu", option, given]))
    assert chosen[name] == value, "what is given stays"
