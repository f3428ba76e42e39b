"""benchmarks.kernels on a tiny model and the CPU: every case runs, is checked, and a wrong or
impossible one fails alone."""

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels, report
from benchmarks.common.environment import REPOSITORY
from benchmarks.common.models import TINY
from benchmarks.common.replay import Patience, Rotation, _rounds, time_runs
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.kernel_cases import attention
from benchmarks.kernel_cases.case import Case, Plan, Setting, compare
from benchmarks.kernel_cases.linears import projections
from photon_ext import reference

CPU = torch.device("cpu")
SETTING = Setting(TINY, CPU, torch.float32, Rotation(1 << 20, 8))
SMALL = "--models tiny --device cpu --quick --floor-gib 0.01 --batches 1,3"
SMALL += " --contexts 16,40 --chunks 8,32"
MATRICES = ("qkv", "o", "gate_up", "down", "lm_head")
ATTENTIONS = ("fused_attention_decode_into", "paged_attention_into")
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
    entries: list[dict[str, Any]] = json.loads(path.read_text())["entries"]
    return code, entries[1:]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def entries(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    code, found = run(tmp_path_factory.mktemp("results") / "kernels.json", "--dtype", request.param)
    assert code == 0
    return found


def test_every_op_is_measured_at_every_size(entries: list[dict[str, Any]]) -> None:
    assert {entry["status"] for entry in entries} == {"ok"}
    assert {entry["op"] for entry in entries} == {"chain", *EVERY_OP}
    assert len(EVERY_OP) >= 20
    linear = [(entry["what"], entry["batch"]) for entry in entries if entry["op"] == "linear_into"]
    assert linear == [(what, batch) for what in MATRICES for batch in (1, 3)]
    decodes = (e for e in entries if e["op"] == "fused_attention_decode_into")
    assert {(e["batch"], e["context"]) for e in decodes} == {(1, 16), (3, 16), (1, 40), (3, 40)}
    chunks = (e for e in entries if e["op"] == "paged_attention_into")
    assert {(e["chunk"], e["context"]) for e in chunks} == {(8, 16), (8, 40), (32, 40)}


def test_figures_belong_together(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        us, loss = entry["us"], entry["loss_us"]
        assert 0 < entry["us_best"] <= us <= entry["us_worst"]
        assert entry["tb_per_s"] == pytest.approx(entry["bytes"] / us * 1e-6, rel=1e-4)
        assert loss == pytest.approx(us * (1 - entry["share"]), rel=1e-3, abs=1e-3)
        per_dependency = loss / entry["dependencies"]
        assert entry["loss_us_per_dependency"] == pytest.approx(per_dependency, rel=1e-4)
        assert entry["checked"]["error"] <= 3 * entry["checked"]["bound"]
        assert "error" not in entry.get("baseline", {})
        if "ratio" in entry:
            assert entry["ratio"] == pytest.approx(entry["baseline"]["us"] / us, rel=1e-4)
    compared = {entry["op"] for entry in entries if "ratio" in entry}
    assert compared >= {"linear_into", "sample_into", "rms_norm_into", *ATTENTIONS}


def test_bytes_are_those_of_the_operands(entries: list[dict[str, Any]]) -> None:
    size = 4 if entries[0]["checked"]["bound"] < 1e-3 else 2

    def nbytes(op: str, **sizes: object) -> int:
        found = (e for e in entries if e["op"] == op and {**e, **sizes} == e)
        return int(next(found)["bytes"])

    qkv = projections(TINY)[0]
    linear = qkv.n * qkv.k + 3 * (qkv.n + qkv.k)
    assert nbytes("linear_into", what="qkv", batch=3) == size * linear
    attention = 3 * (2 * 40 * TINY.kv_size + 2 * TINY.q_size + 2 * TINY.kv_size)
    assert nbytes(ATTENTIONS[0], context=40, batch=3) == size * attention


def test_a_wrong_result_is_an_error_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.linear_into
    wrong = lambda out, x, weight: right(out, 1.1 * x, weight)  # noqa: E731
    monkeypatch.setattr(reference, "linear_into", wrong)
    ops = ("--ops", "linear_into,rms_norm_into,attention")
    code, entries = run(tmp_path / "k.json", *ops, "--dtype", "float32")
    assert code == 1
    failed = [entry for entry in entries if entry["status"] == "failed"]
    assert {(e["op"], e["what"]) for e in failed} == {("linear_into", what) for what in MATRICES}
    assert all("relative error 0.09" in entry["error"] for entry in failed)
    good = {entry["op"] for entry in entries if entry["status"] == "ok"}
    assert good >= {"rms_norm_into", ATTENTIONS[0]}


def test_a_device_that_is_lost_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked how much memory is free such a device raises as well."""

    def lost(*given: object) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    result = ResultFile("kernels", Namespace(), tmp_path / "k.json")
    bench = kernels.Bench(SETTING, Patience(3, 0.01), 1e9)
    assert bench.add("tiny", Plan(("linear_into",), "x", SETTING, lost), result) is None
    monkeypatch.setattr(kernels, "available_bytes", lost)
    assert bench.add("tiny", Plan(("linear_into",), "y", SETTING, lost), result) is None
    assert [entry["status"] for entry in result.entries] == ["failed", "failed"]
    assert "earlier entry left the CUDA device unusable" in result.entries[1]["error"]


def test_short_runs_fill_a_graph_and_long_ones_do_not() -> None:
    assert [_rounds(2, us) for us in (3.0, 80.0, 200.0, 2e3, 1e5)] == [8, 7, 3, 1, 1]
    assert _rounds(100, 3.0) == 1


def test_a_torch_that_cannot_do_it_costs_the_ratio_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("not on this chip")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    code, entries = run(tmp_path / "k.json", "--ops", "attention")
    assert code == 0
    measured = [entry for entry in entries if entry["status"] == "ok"]
    assert measured
    assert all(
        entry["ratio"] is None and "not on this chip" in entry["baseline"]["error"]
        for entry in measured
    )


def test_chunk_attention_is_compared_with_flash_attention_alone() -> None:
    seen = []

    def run() -> None:
        cuda = torch.backends.cuda
        seen.append((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))

    for each in (run, attention._by_flash(run)):
        each()
    assert seen[1] == (True, False) != seen[0]


def test_what_memory_has_no_room_for_is_skipped(tmp_path: Path) -> None:
    result = ResultFile("kernels", Namespace(), tmp_path / "k.json")
    bench = kernels.Bench(SETTING, Patience(3, 0.01), 1e9)

    def never(_: Setting) -> Case:
        raise AssertionError("was made")

    assert bench.add("tiny", Plan(("rms_norm_into",), "x", SETTING, never, 1 << 60), result) is None
    assert [entry["status"] for entry in result.entries] == ["skipped"]
    assert not result.failed


def test_copies_are_larger_than_the_cache() -> None:
    rotation = Rotation(cache_bytes=50 << 20, most=4096)
    assert rotation.copies(1 << 20) == 200
    assert rotation.copies(1 << 30) == 2
    assert rotation.cold(1 << 20)
    assert rotation.cold(1 << 30)
    assert rotation.copies(256) == 4096
    assert not rotation.cold(256)


def test_every_run_has_its_turn() -> None:
    calls: list[int] = []
    timing = time_runs([lambda: calls.append(0), lambda: calls.append(1)], CPU, Patience(4, 10.0))
    assert timing.replays == 4
    assert calls == [0, 1] * 5


def test_comparisons_see_what_is_wrong() -> None:
    exact = torch.ones(100)
    assert compare("x", exact.clone(), exact) == 0
    with pytest.raises(BenchmarkError, match="NaN or inf"):
        compare("x", torch.full((100,), float("nan")), exact)
    with pytest.raises(BenchmarkError, match=r"relative error 0\.001"):
        compare("x", exact * 1.001, exact)
    with pytest.raises(BenchmarkError, match="1 of 2 integers"):
        compare("x", torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_the_report_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "k.json", "--ops", "linear_into,sample_into")
    capsys.readouterr()
    assert report.main([str(tmp_path / "k.json"), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## tiny"
    assert sum(line.startswith("| linear_into | down | plain |") for line in lines) == 2


@pytest.mark.gpu
def test_replays_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    given = f"--models tiny --quick --batches 1,3 --contexts 40 --chunks 8 --json {path}"
    assert kernels.main(given.split()) == 0


@pytest.mark.gpu
def test_a_replay_is_divided_by_the_runs_in_it() -> None:
    """A kernel that spins for 200,000 clocks takes 0.1 to 0.2 ms, however many there are."""
    runs = [partial(torch.cuda._sleep, 200_000)] * 5
    timing = time_runs(runs, torch.device("cuda"), Patience(7, 10.0))
    assert timing.replays == 7
    assert 60 < timing.us < 400
