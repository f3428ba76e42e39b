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
from benchmarks.common.options import (
    device_name,
    number_from_zero,
    output_file,
    png_file,
    positive_integer,
    positive_number,
)
from benchmarks.common.result import BenchmarkError
from benchmarks.floor import read_floor

BENCHMARKS = ["activity", "adopt", "bubble", "cpu", "decode", "floor", "kernels", "peers"]
PARSING = [*BENCHMARKS, "common.checkpoint"]


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
    ("benchmark", "given", "message"),
    [
        ("decode", ["--model", ""], "argument --model: '' names nothing"),
        ("peers", ["--peers", ","], "argument --peers: ',' names nothing"),
        ("kernels", ["--ops", ""], "argument --ops: '' names nothing"),
        (
            "bubble",
            ["--no-gain"],
            "error: --no-gain: nothing is left to measure; give --meter-cost or --long MODEL",
        ),
        ("cpu", ["--prompt", ""], "argument --prompt: it is empty; give some text"),
        ("cpu", ["--threads", "100000"], "argument --threads: '100000' is above 256"),
    ],
)
def test_what_leaves_nothing_to_measure_is_refused(
    benchmark: str, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(benchmark, given, capsys)


def test_the_most_threads_are_those_of_our_kernels() -> None:
    source = (REPOSITORY / "csrc" / "cpu" / "parallel.cpp").read_text()
    assert f"kMaxThreads = {cpu.MOST_THREADS};" in source


def test_a_floor_of_no_bytes_is_an_error_and_no_rate() -> None:
    with pytest.raises(BenchmarkError, match="10 bytes are no buffer to sweep"):
        read_floor(torch.device("cpu"), 10)


def test_a_floor_of_more_than_the_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal("floor", ["--device", "cpu", "--gib", "100000"], capsys)
    assert "error: --gib 100000: 100000 GiB to sweep do not fit into the " in said
    assert said.endswith(" GiB that cpu has free; give fewer")
    assert "--gib 1e-09: 1 bytes are no buffer to sweep" in refusal(
        "floor", ["--gib", "1e-9"], capsys
    )
    with pytest.raises(BenchmarkError, match="do not fit"):
        read_floor(torch.device("cpu"), 1 << 50)


@pytest.mark.parametrize(
    "given", ["decode --model tiny", "kernels --models tiny", "peers --model tiny --peers ours"]
)
def test_a_floor_of_more_bytes_than_an_integer_tells_is_refused_in_a_line(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, *options = given.split()
    assert (
        importlib.import_module(f"benchmarks.{benchmark}").main(
            ["--device", "cpu", "--floor-gib", "1e300", *options]
        )
        == 1
    )
    said = "".join(capsys.readouterr())
    assert "GiB to sweep do not fit into the " in said
    assert "OverflowError" not in said


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_result_that_cannot_be_written_is_refused(
    benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert refusal(benchmark, ["--json", str(tmp_path)], capsys).endswith(
        f"--json: {str(tmp_path)!r} is a directory; name a file in it"
    )
    below = refusal(benchmark, ["--json", str(tmp_path / "file" / "new" / "r.json")], capsys)
    assert below.endswith(f"{str(tmp_path / 'file')!r} is no directory")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("benchmark", PARSING)
def test_a_device_that_is_not_there_is_refused(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        "--device: device 'gpu' is not one torch knows; use 'cpu', 'cuda' or 'cuda:N'"
        in refusal(benchmark, ["--device", "gpu"], capsys)
    )
    absent = "cuda:99" if torch.cuda.is_available() else "cuda"
    assert f"'{absent}'" in refusal(benchmark, ["--device", absent], capsys)


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [("bubble", "--markdown"), ("kernels", "--markdown"), ("peers", "--markdown")],
)
def test_so_are_other_files_that_cannot_be_written(
    benchmark: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option}: {str(tmp_path)!r} is a directory" in refusal(
        benchmark, [option, str(tmp_path)], capsys
    )


def test_an_output_file_is_not_made_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    assert output_file(str(path)) == path
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("")
    assert output_file(str(tmp_path / "old.json")) == tmp_path / "old.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is a directory"),
        (".", "is a directory"),
        ("/dev/null", "is no plain file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_no_output_file_is_named(text: str, words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        output_file(text)


def test_a_folder_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # who is root may write everywhere
    with pytest.raises(ArgumentTypeError, match="is not writable"):
        output_file(str(tmp_path / "r.json"))


def test_devices_that_are_there_keep_their_names() -> None:
    assert [device_name(name) for name in ("auto", "cpu")] == ["auto", "cpu"]


@pytest.mark.parametrize(
    ("benchmark", "given", "said"),
    [
        ("bubble", "--temperature nan", "--temperature: 'nan' is not a positive number"),
        ("bubble", "--requests 3,4", "--requests: '3,4' is not one positive integer"),
        ("peers", "--seconds nan", "--seconds: 'nan' is not a positive number"),
        ("peers", "--timeout 0", "--timeout: '0' is not a positive number"),
        ("peers", "--floor-gib -1", "--floor-gib: '-1' is not a positive number"),
        (
            "peers",
            "--folder /dev/null",
            "--folder: '/dev/null' is no directory that can be written into",
        ),
        ("decode", "--steps 0", "--steps: '0' has a value below 1"),
        ("decode", "--seconds inf", "--seconds: 'inf' is not a positive number"),
        ("kernels", "--floor-gib x", "--floor-gib: 'x' is not a positive number"),
        ("adopt", "--model nope", "--model 'nope' is unknown; use one of tiny"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_is_measured(
    benchmark: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(benchmark, given.split(), capsys)


def test_zero_and_usual_numbers_are_taken() -> None:
    assert positive_integer("1") == 1
    assert (number_from_zero("0"), number_from_zero("0.7"), positive_number("2.5")) == (
        0.0,
        0.7,
        2.5,
    )
    assert png_file("a.PNG") == Path("a.PNG")


@pytest.mark.parametrize("benchmark", ["adopt", "bubble", "decode", "kernels", "peers"])
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
