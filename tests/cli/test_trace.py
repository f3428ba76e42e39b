"""`photon-ext trace`: files, text, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from photon_ext.cli.trace import mean_context
from photon_ext.engine import Output
from photon_ext.models.loading.loader import load_model
from photon_ext.observe.render.save import has_matplotlib
from tests.cli.command import environment, run

FILES = {"trace.json", "timeline.html", "summary.txt", "summary.json"}


def on(model: str, out: Path) -> tuple[str, ...]:
    """A trace on a CPU, with its files in `out`."""
    return "trace", "--out", str(out), "--model", model, "--device", "cpu"


@pytest.mark.parametrize("depth", [1, 2])
def test_it_writes_what_it_says_and_prints_the_summary(
    depth: int, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "here"
    options = "--depth", str(depth), "--batch", "3", "--max-new-tokens", "9"
    code, printed, _ = run(capsys, *on(model, out), *options, "--prompt", "w5 w6")
    assert code == 0
    expected = FILES | ({"timeline.png"} if has_matplotlib() else set())
    assert {path.name for path in out.iterdir()} == expected
    text = (out / "summary.txt").read_text()
    assert text in printed
    told = "steady", "active", "step gap", "zombies", "clocks agree", "effective bandwidth"
    assert all(part in text for part in told)
    assert all(str(out / name) in printed for name in expected)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["zombies"]["rows"] >= 9  # of three requests that take up to nine steps
    assert summary["excluded"][0]["step"] == 0, "the steps of the warm-up are not counted"
    config, weights, _ = load_model(model)
    # of three rows, eight steps that attend to 3 .. 10 tokens
    most = config.kv_bytes_per_token(weights.dtype.itemsize) * 3 * 6.5
    assert 0 < summary["bytes_per_step"] - weights.bytes_per_step <= most
    assert " of keys and values (mean)" in text


def test_keys_and_values_in_fp8_are_fewer_bytes(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    short, read = ("--max-new-tokens", "5", "--prompt", "w5 w6"), []
    for more in ((), ("--kv-dtype", "fp8")):
        assert run(capsys, *on(model, tmp_path), *short, *more)[0] == 0
        read.append(json.loads((tmp_path / "summary.json").read_text())["bytes_per_step"])
    assert read[1] < read[0]


def test_a_path_that_the_output_cannot_spell_is_no_crash(model: str, tmp_path: Path) -> None:
    out = tmp_path / "\u00e4"
    line = [sys.executable, "-m", "photon_ext", *on(model, out), "--prompt", "w5"]
    spelled = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C.UTF-8")
    done = subprocess.run(line, env=spelled, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"?/trace.json" in done.stdout
    assert (out / "trace.json").exists()


def test_the_context_that_steps_read_is_that_of_all_rows() -> None:
    """Of two requests from prompts of 3 and 5 tokens, the first answers with 3 tokens, the
    second with 2: two steps, 4 + 6, then 5.
    """
    outputs = [answer(prompt=3, tokens=3), answer(prompt=5, tokens=2)]
    assert mean_context(outputs) == 7.5
    assert mean_context([answer(prompt=3, tokens=1)]) == 0, "the prefill's token alone"


def answer(prompt: int, tokens: int) -> Output:
    return cast("Output", SimpleNamespace(prompt_tokens=prompt, token_ids=[1] * tokens))


def test_without_matplotlib_everything_else_is_written(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("photon_ext.observe.render.save", "photon_ext.cli.trace"):
        monkeypatch.setattr(f"{module}.has_matplotlib", lambda: False)
    code, _, err = run(capsys, *on(model, tmp_path), "--prompt", "w5")
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert "no timeline.png: matplotlib is not installed (pip install matplotlib)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out"),
        (("--out", "{file}"), "{file} is a file; name a directory"),
        (("--out", "{file}/in/it"), "{file} is a file; name a directory"),
        (("--out", "{folder}", "--batch", "0"), "batch is 0"),
        (
            ("--out", "{folder}", "--batch", "1000000000"),
            "batch is 1000000000, of 1 prompts; trace from 1 to 4096 requests at once",
        ),
        (("--out", "{folder}", "--depth", "3"), "depth is 3"),
        (("--out", "{folder}", "--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--out", "{folder}", "--model", "/nowhere"), "/nowhere"),
        (("--out", "{folder}", "--nvtx"), "nvtx=True needs a torch with CUDA"),
    ],
)
def test_mistakes_are_told_in_one_line_with_exit_code_two(
    capsys: pytest.CaptureFixture[str],
    model: str,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "file"
    file.write_text("here already")
    filled = [part.format(file=file, folder=tmp_path / "out") for part in arguments]
    code, out, err = run(
        capsys, "trace", "--model", model, "--device", "cpu", "--prompt", "w5", *filled
    )
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message.format(file=file) in err


def test_a_file_in_the_way_is_told_before_the_work_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    (tmp_path / "timeline.png").mkdir()
    code, printed, err = run(capsys, *on(model, tmp_path))
    assert (code, printed) == (2, "")
    assert "timeline.png" in err
    assert "name a directory that can be written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]
