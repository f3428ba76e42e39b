"""Options that all benchmarks have: what cannot be is refused in a line, before anything is
measured."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch


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
        "kernels --models nope -> --models nope: unknown; known are tiny",
        "bubble --no-gain -> --no-gain: nothing is left to measure; give --meter-cost or --long",
        "cpu --threads 100000 -> argument --threads: '100000' is above 256",
        "peers --seconds nan -> --seconds: 'nan' is not a positive number",
        "peers --python vllm -> --python: 'vllm': expected PEER=PATH with a peer of",
        "traffic --sweep --rates burst -> --rates has burst alone; add one, for instance",
        "decode --steps 0 -> --steps: '0' has a value below 1",
        "adopt --model nope -> --model 'nope' is unknown; use one of tiny",
        "adopt --tokens 31 -> --tokens is 31; use at least 32",
        "host --modes idle -> there is no mode 'idle'; there are quiet, handover, text",
        "constraints --modes plain,x -> --modes x: unknown; known are plain, device, grammar",
        "adapters --steps 20 -> --steps is 20; give 32 at least",
        "objects --steps 20 -> --steps is 20; give 32 at least",
        "floor --gib 1e-9 -> --gib 1e-09: 1 bytes are no buffer to sweep",
        "traffic --loads short,nope -> --loads nope: unknown; known are short, chat, long",
        "traffic --engine depth -> --engine: 'depth': expected OPTION=VALUE or OPTION=VALUE/VALUE",
        "plots x.json --output plot -> 'plot' does not end in .png",
    ],
)
def test_what_cannot_be_measured_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, _, message = line.partition(" -> ")
    benchmark, *options = given.split()
    assert message in refusal(benchmark, options, capsys)


@pytest.mark.parametrize("benchmark", ["decode", "host"])
def test_a_result_that_cannot_be_written_is_refused(
    benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    said = refusal(benchmark, ["--json", str(tmp_path)], capsys)
    assert said.endswith(f"--json: {str(tmp_path)!r} is no plain file; name one")
    below = refusal(benchmark, ["--json", str(tmp_path / "file" / "new" / "r.json")], capsys)
    assert below.endswith(f"{str(tmp_path / 'file')!r} is no directory that can be written into")
    if benchmark != "host":
        assert "not a result file" in refusal(benchmark, ["--json", str(tmp_path / "file")], capsys)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("benchmark", ["decode", "common.checkpoint"])
def test_a_device_that_is_not_there_is_refused(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "--device: device 'gpu' is not one torch knows; use 'cpu', 'cuda' or 'cuda:N'"
    assert unknown in refusal(benchmark, ["--device", "gpu"], capsys)
    absent = "cuda:99" if torch.cuda.is_available() else "cuda"
    assert f"'{absent}'" in refusal(benchmark, ["--device", absent], capsys)


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
