"""benchmarks.kernels on a tiny model and the CPU: every op has a case, and a wrong one is found."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import kernels, report
from benchmarks.common.environment import REPOSITORY
from benchmarks.common.replay import Patience, time_runs
from benchmarks.common.result import read_runs
from photon_ext import reference

SMALL = "--models tiny --device cpu --quick --floor-gib 0.01 --batches 1,3"
SMALL += " --contexts 16,40 --chunks 8,32"
EVERY_OP = set(
    re.findall(r'"(\w+)\(Tensor', (REPOSITORY / "csrc" / "ops" / "schema.cpp").read_text())
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """torch's pool and ours wait for work by spinning: on few cores they would take turns at being
    in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(path: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    code = kernels.main([*SMALL.split(), *more, "--json", str(path)])
    (found,) = read_runs(path)
    return code, found["entries"][1:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_op_is_measured_and_checked(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, entries = run(tmp_path / "k.jsonl", "--dtype", dtype)
    assert code == 0
    assert {entry["status"] for entry in entries} == {"ok"}
    assert {entry["op"] for entry in entries} == {"chain", *EVERY_OP}
    assert len(EVERY_OP) >= 20
    for entry in entries:
        assert entry["tb_per_s"] == pytest.approx(entry["bytes"] / entry["us"] * 1e-6, rel=1e-4)
        assert entry["checked"]["error"] <= 3 * entry["checked"]["bound"]
        assert "error" not in entry.get("baseline", {})
    capsys.readouterr()
    assert report.main([str(tmp_path / "k.jsonl"), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## tiny\n")


def test_a_wrong_result_is_an_error_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.linear_into
    wrong = lambda out, x, weight: right(out, 1.1 * x, weight)  # noqa: E731
    monkeypatch.setattr(reference, "linear_into", wrong)
    code, entries = run(tmp_path / "k.jsonl", "--ops", "linear_into,rms_norm_into")
    assert code == 1
    errors = {entry["op"]: entry.get("error", "") for entry in entries}
    assert "relative error 0.09" in errors["linear_into"]
    assert errors["rms_norm_into"] == ""


def test_linears_of_fewer_bits_move_the_bytes_of_their_format(tmp_path: Path) -> None:
    """Of TINY o is [64, 64], and its input and twice its output are 64 numbers; no row of it is
    whole blocks of q4_k. Hopper kernels are given blocks in int4 and int8."""
    given = ("--formats", "fp8,int4,int8,mxfp4,nvfp4,q4_1,q5_1,q8_0,q4_k", "--ops", "o")
    code, entries = run(tmp_path / "k.jsonl", *given)
    assert code == 0
    linears = [e for e in entries if e["op"] == "linear_residual_" and e["batch"] == 1]
    moved = {(e["format"], e["way"]): e["bytes"] for e in linears if e.get("format")}
    vectors, blocks = 3 * 64 * 2, 64 * 2
    assert {form: size for (form, way), size in moved.items() if way == "hopper"} == {
        "fp8": 64 * 64 + 64 * 4 + vectors,
        "int4": 64 * 32 + 64 * 2 + vectors,
        "int8": 64 * 64 + blocks * 2 + vectors,
        "q4_1": 64 * 32 + blocks * 4 + vectors,
        "q8_0": 64 * 64 + blocks * 2 + vectors,
    }
    assert {form: size for (form, way), size in moved.items() if way == "portable"} == {
        "fp8": 64 * 64 + 64 * 4 + vectors,
        "int4": 64 * 32 + 64 * 2 + vectors,
        "int8": 64 * 64 + blocks * 2 + vectors,
        "mxfp4": 64 * 32 + 64 * 2 + vectors,
        "nvfp4": 64 * 32 + 64 * 4 + 64 * 4 + vectors,
        "q4_1": blocks * 20 + vectors,
        "q5_1": blocks * 24 + vectors,
        "q8_0": blocks * 34 + vectors,
    }


@pytest.mark.parametrize(("form", "least"), [("fp8", 33), ("int4", 17)])
def test_many_tokens_of_fewer_bits_are_a_batchs_linears(
    tmp_path: Path, form: str, least: int
) -> None:
    """Of fewer where few columns share a scale: in int4 64 do here."""
    given = ("--formats", form, "--ops", "o,gate_up,qkv", "--batches", f"{least - 1},{least}")
    code, entries = run(tmp_path / "k.jsonl", *given)
    assert code == 0
    ran = {(e["op"], e["batch"], e["way"]) for e in entries if e.get("format") == form}
    asked = {(op, batch) for op, batch, way in ran if way == "hopper"}
    fused = {"norm_linear_into", "linear_residual_", "norm_swiglu_into"}
    batch = {"linear_into", "linear_norm_into", "swiglu_into"}
    assert asked == {*((op, least - 1) for op in fused), *((op, least) for op in batch)}


class Overlapped(TorchDispatchMode):
    """Whether each op that ran, of those that may, was told to start before the one before ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[bool, bool]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = [each.name for each in func._schema.arguments]
        if {"hopper", "pdl"} <= set(names):
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.found.add((given.get("hopper", False), given.get("pdl", False)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pdl", [False, True])
def test_hopper_kernels_overlap_where_asked_for(pdl: bool, tmp_path: Path) -> None:
    ops = "qkv,o,gate_up,down,fused_attention_decode_into"
    more = ("--ops", ops, *(["--pdl"] if pdl else []))
    with Overlapped() as ran:
        code, _ = run(tmp_path / "k.jsonl", *more)
    assert code == 0
    # results are checked one at a time
    assert ran.found == {(False, False), (True, False), *([(True, True)] if pdl else [])}


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--formats", "fp8,q3"])
    assert "--formats q3: unknown; known are fp8, int4, int8, mxfp4" in capsys.readouterr().err


@pytest.mark.gpu
def test_replays_on_a_gpu(tmp_path: Path) -> None:
    given = (
        f"--models tiny --quick --batches 1,3 --contexts 40 --chunks 8 --json {tmp_path}/k.jsonl"
    )
    assert kernels.main(given.split()) == 0


@pytest.mark.gpu
def test_a_replay_is_divided_by_the_runs_in_it() -> None:
    """A kernel that spins for 200,000 clocks takes 0.1 to 0.2 ms, however many there are."""
    runs = [partial(torch.cuda._sleep, 200_000)] * 5
    timing = time_runs(runs, torch.device("cuda"), Patience(7, 10.0))
    assert timing.replays == 7
    assert 60 < timing.us < 400
