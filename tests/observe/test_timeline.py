"""`timeline()` around real code here: what it records, that it is off by default, what it costs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import photon_ext
from photon_ext import _C
from photon_ext.engine import Engine
from photon_ext.errors import ConfigError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.weights import random_weights
from photon_ext.observe import Timeline, timeline
from photon_ext.observe.records import Commit, DeviceKind, DeviceSpan, HostSpan, Launch, OpKind
from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.forked import run_script
from tests.observe.planted import STEPS, open_pipeline

SIZES = {"hidden": 32, "layers": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 512}
CONFIG = ModelConfig(family=Family.LLAMA, intermediate=48, tied_embeddings=True, **SIZES)
WEIGHTS = random_weights(CONFIG, torch.float32)
NEW = 20
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def engine(depth: int = 2, **options: object) -> Engine:
    sizes = {"max_rows": 2, "max_len": 64, "chunk": 8, "buckets": (1, 2)}
    return Engine.from_weights(CONFIG, WEIGHTS, depth=depth, **sizes, **options)


def traced(depth: int, params: SamplingParams = PLAIN) -> Timeline:
    with engine(depth) as served:
        served.generate([[1, 2, 3]] * 2, params)
        with timeline() as recording:
            served.generate([[1, 2, 3]] * 2, params)
    return recording


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_of_an_engine_is_there_with_its_phases(depth: int) -> None:
    recording = traced(depth)
    records, steps = recording.records, recording.report.steps.steps
    assert (records.backend, records.dropped) == ("host", 0)
    # one prefill, which samples, then one step per token
    assert len(steps) == len(records.launches) == NEW
    assert [step.launch.slot for step in steps if step.launch] == [s % depth for s in range(NEW)]
    kinds = [launch.kind for launch in records.launches]
    assert kinds == ["prefill", *["decode"] * (NEW - 1)]
    assert [commit.rows for commit in records.commits] == [2] * NEW
    assert {span.phase for span in records.host} >= set(Phase) - {Phase.MASK, Phase.COLLECT}
    for wait in (span for span in records.host if span.phase is Phase.WAIT):
        assert wait.step is not None
        assert wait.depth == 1  # inside the engine's commit


def test_host_and_device_are_on_one_clock() -> None:
    """No step runs before its launch begins, or after the wait for it is over; and every kernel
    lies inside a replay."""
    recording = traced(2)
    records = recording.records
    waits = {span.step: span.end for span in records.host if span.phase is Phase.WAIT}
    for step in recording.report.steps.steps:
        assert step.launch is not None
        assert step.launch.start <= step.start <= step.end <= waits[step.launch.step]
    replays = {s.correlation: s for s in records.device if s.kind is DeviceKind.GRAPH}
    assert len(replays) == NEW
    for kernel in (span for span in records.device if span.kind is DeviceKind.KERNEL):
        replay = replays[kernel.correlation]
        assert replay.start <= kernel.start <= kernel.end <= replay.end
    assert all(records.start <= span.start <= span.end for span in records.device)


def test_late_sampling_is_two_replays_of_one_step_with_masks_between() -> None:
    allowed = from_allowed_ids(range(100))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, constraint=allowed)
    recording = traced(2, params)
    records, report = recording.records, recording.report
    assert sum(span.kind is DeviceKind.GRAPH for span in records.device) == 2 * NEW
    assert len(report.steps.steps) == NEW
    assert all(step.launch is not None and step.launch.split for step in report.steps.steps)
    assert {span.phase for span in records.host} >= {Phase.MASK, Phase.FINALIZE}
    assert "split gap" in {gap.kind.value for gap in report.gaps}


def test_two_runs_in_one_window_are_kept_apart_by_rest() -> None:
    with engine() as served:
        served.generate([[1, 2, 3]], PLAIN)
        with timeline() as recording:
            served.generate([[1, 2, 3]], PLAIN)
            time.sleep(0.2)
            served.generate([[1, 2, 3]], PLAIN)
    records, report = recording.records, recording.report
    (rest,) = (gap.ns for gap in report.gaps if gap.kind.value == "no work")
    assert rest > 150e6
    assert report.wall_us < (records.end - records.start) / 1e3 - 150e3


def test_a_window_may_begin_while_steps_are_in_flight() -> None:
    pipeline = open_pipeline(2)
    pipeline.tick()
    with timeline() as recording:
        while pipeline.busy:
            pipeline.tick()
    steps = recording.report.steps.steps
    known = {step.launch.step: step for step in steps if step.launch is not None}
    assert sorted(known) == [launch.step for launch in recording.records.launches]
    assert len(steps) in (STEPS - 1, STEPS)  # the first may have run before the window began
    assert all(s.launch is not None and s.start >= s.launch.start for s in known.values())


def test_eager_steps_are_recorded_too() -> None:
    """Without graphs everything runs at the call, on the caller's thread."""
    with engine(graph=False) as served, timeline() as recording:
        served.generate([[1, 2, 3]], PLAIN)
    assert len(recording.report.steps.steps) == NEW
    assert all(step.launch is not None for step in recording.report.steps.steps)


def test_any_torch_code_can_be_looked_at() -> None:
    def ask_the_device() -> None:
        torch.ones(8, 8).matmul(torch.ones(8, 8)).sum().item()

    with photon_ext.observe.timeline(stacks=True) as recording:
        for _ in range(5):
            with torch.profiler.record_function("one step"):
                ask_the_device()
    records = recording.records
    assert records.backend is None
    steps = [op for op in records.ops if op.name == "one step"]
    assert [op.kind for op in steps] == [OpKind.ANNOTATION] * 5
    assert sum(op.name == "aten::item" for op in records.ops) == 5
    functions = [op.name for op in records.ops if op.kind is OpKind.PYTHON]
    assert any("ask_the_device" in name for name in functions)
    assert "no steps were found on the device" in recording.report.text()


def test_what_raises_inside_passes_and_the_records_are_kept() -> None:
    recording = timeline()

    def fail() -> None:
        with recording:
            torch.ones(3).add(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert probe.active is None
    assert any(op.name == "aten::add" for op in recording.records.ops)
    with timeline():  # and the next one can begin
        pass


def test_one_at_a_time_and_not_inside_a_profile() -> None:
    with timeline(), pytest.raises(ConfigError, match="one at a time"):
        timeline().__enter__()
    with torch.profiler.profile() as profile:
        with pytest.raises(ConfigError, match="profiler is running"):
            timeline().__enter__()
        torch.ones(3).add(1)
    assert any(event.key == "aten::add" for event in profile.key_averages())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"capacity": value}, f"capacity is {value!r}") for value in (0, True, 1.5, "x", 2**40)),
        *(({"bytes_per_step": value}, f"bytes_per_step is {value!r}") for value in (-1, "x", 0.5)),
        ({"bytes_per_step": 10**400}, "bytes_per_step is .*; give an integer from 1 to"),
        ({"marker": ""}, "marker is ''; give a part of a kernel's name"),
        ({"marker": 10**5000}, "marker is an integer of 16610 bits"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        timeline(**arguments)


def test_bytes_that_are_set_later_are_looked_at_by_the_report() -> None:
    with timeline() as recorded:
        torch.ones(3).sum()
    recorded.bytes_per_step = "x"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="bytes_per_step is 'x'"):
        recorded.report  # noqa: B018
    recorded.bytes_per_step = 1000
    assert recorded.report.text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="NVTX is there")
def test_nvtx_without_cuda_says_so() -> None:
    with pytest.raises(ConfigError, match="nvtx=True needs a torch with CUDA"):
        timeline(nvtx=True)


def test_what_does_not_fit_is_counted() -> None:
    with engine() as served, timeline(capacity=30) as recording:
        served.generate([[1, 2, 3]], PLAIN)
    records = recording.records
    lost = sum(span.kind is DeviceKind.DESCHEDULED for span in records.device)
    assert (len(records.host), len(records.device) - lost) == (30, 30)
    assert records.dropped > 100
    assert "found no room" in recording.report.text()


def test_threads_may_serve_while_timelines_come_and_go() -> None:
    """An engine thread between the check and the call must not see the observer vanish."""
    with engine() as served:
        done = threading.Event()
        failed: list[str] = []

        def serve() -> None:
            while not done.is_set():
                outputs = served.generate([[1, 2, 3]], PLAIN)
                failed.extend(output.error for output in outputs if output.error)

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(15):
            with timeline(ops=False):
                time.sleep(0.002)
        done.set()
        thread.join()
    assert failed == []


# --- off -----------------------------------------------------------------------------------------


def test_off_nothing_of_it_is_imported() -> None:
    program = """
import sys
import photon_ext.engine.engine, photon_ext.cli
names = [name for name in sys.modules if name.startswith("photon_ext.observe.")]
print(names, "matplotlib" in sys.modules, "prometheus_client" in sys.modules)
"""
    done = run_script(program)
    expected = "['photon_ext.observe.request_meter', 'photon_ext.observe.meter'] False False"
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_off_no_span_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in Python nor by the host streams: the types are counted while an engine serves."""
    made: list[type] = []
    for kind in (HostSpan, DeviceSpan, Launch, Commit):
        create = kind.__new__

        def counted(
            cls: type, *args: object, create: Callable[..., object] = create, **kwargs: object
        ) -> object:
            made.append(cls)
            return create(cls, *args, **kwargs)

        monkeypatch.setattr(kind, "__new__", counted)
    with engine() as served:
        served.generate([[1, 2, 3]] * 2, PLAIN)
        assert made == []
        with timeline(ops=False):  # the count works
            served.generate([[1, 2, 3]], PLAIN)
        assert {HostSpan, DeviceSpan, Launch, Commit} <= set(made)
        served.generate([[1, 2, 3]], PLAIN)  # the engine thread is past what it recorded last
        made.clear()
        served.generate([[1, 2, 3]] * 2, PLAIN)  # off again
        assert made == []
    _C.start_host_trace(10)
    assert _C.stop_host_trace() == ([], 0)


# --- files and life cycle ------------------------------------------------------------------------


def test_saved_files_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    names = {path.name for path in traced(2).save(folder)}
    assert names >= {"trace.json", "timeline.html", "summary.txt", "summary.json"}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step_count"], summary["backend"]) == (NEW, "host")
    keys = "active step_gap node_gap waited_us zombies calls shares excluded descheduled_us"
    assert set(summary) >= set(keys.split())
    assert summary["excluded"][0]["why"] == "prefill"


def test_a_timeline_that_has_recorded_nothing_says_so_and_one_records_once(tmp_path: Path) -> None:
    recording = timeline()
    asks = (lambda: recording.report, lambda: recording.save(tmp_path), lambda: recording.records)
    for ask in asks:
        with pytest.raises(ConfigError, match="nothing yet; ask after the `with` block"):
            ask()
    with pytest.raises(ConfigError, match="is not recording"):
        recording.__exit__(None, None, None)
    with recording:
        torch.ones(3)
    with pytest.raises(ConfigError, match="has recorded already"), recording:
        pass


def test_a_recording_says_nothing_on_stderr() -> None:
    done = run_script("""
import torch
from photon_ext.observe import timeline
with timeline(): torch.ones(3).sum()
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_profile_inside_a_timeline_is_an_error_and_no_crash() -> None:
    done = run_script("""
import torch
from photon_ext.observe import timeline
try:
    with timeline():
        with torch.profiler.profile(): torch.ones(3).sum()
except ValueError as error: print(error)
with timeline() as after: torch.ones(3).sum()
print(len(after.records.ops) > 0)
""")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "start no torch.profiler inside a timeline" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize(
    "opened",
    [
        "timeline().__enter__()",
        "threading.Thread(target=hold, daemon=True).start(); begun.wait()",
        "stack = ExitStack(); atexit.register(stack.close); stack.enter_context(timeline())",
        "generator = held(); next(generator)",
    ],
    ids=["never ended", "in a thread", "ended at exit", "ended after exit"],
)
def test_a_process_that_ends_inside_a_timeline_ends_as_it_would(opened: str) -> None:
    done = run_script(f"""
import atexit, sys, threading
from contextlib import ExitStack
import torch
from photon_ext.observe import timeline
begun = threading.Event()
def hold():
    with timeline():
        begun.set()
        threading.Event().wait()
def held():
    with timeline():
        yield
{opened}
torch.ones(3).sum()
sys.exit(3)
""")
    assert done.returncode == 3, done.stderr[-2000:]
    assert "Error in atexit" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_timeline_warns_of_nothing() -> None:
    done = run_script("""
import warnings, torch
from photon_ext.observe import timeline
warnings.simplefilter("error")
for options in ({}, {"ops": False}, {"stacks": True}):
    with timeline(**options) as after: torch.ones(3).sum()
""")
    assert done.returncode == 0, done.stderr[-2000:]
