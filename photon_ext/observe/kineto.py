"""torch.profiler as a recorder of API calls, kernels (inside replayed graphs, too), copies, ops.

Its Chrome trace is read, not its event objects: only there a copy has its size and a kernel its
stream. Kernel records inside a graph slow its replay down: they explain steps, no more.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig

from photon_ext.errors import ConfigError
from photon_ext.observe.api import is_api_call, plain_name
from photon_ext.observe.clock_sync import MARK
from photon_ext.observe.records import ApiCall, DeviceKind, DeviceSpan, Op, OpKind

_DEVICE = {
    "kernel": DeviceKind.KERNEL,
    "gpu_memcpy": DeviceKind.COPY,
    "gpu_memset": DeviceKind.FILL,
}
_OPS = {
    "cpu_op": OpKind.TORCH,
    "user_annotation": OpKind.ANNOTATION,
    "python_function": OpKind.PYTHON,
}
_CALLS = ("cuda_runtime", "cuda_driver")
_NAME = re.compile(r'(?<="name": ")(.*?)(?=",?$|", "pid": )', re.MULTILINE)
_BARE_QUOTE = re.compile(r'(?<!\\)"')

_recording: torch.autograd.profiler.profile | None = None  # there is one at a time
_ending = threading.Lock()


class KinetoRecords(NamedTuple):
    """What one profile holds, by start, in the profiler's nanoseconds; marks are (start, end)."""

    device: list[DeviceSpan]
    calls: list[ApiCall]
    ops: list[Op]
    marks: list[tuple[int, int]]

    def shifted(self, to_ours: Callable[[int], int]) -> KinetoRecords:
        """The records on our clock; marks stay as they were."""

        def moved(items: Iterable[Any]) -> list[Any]:
            return [
                item._replace(start=to_ours(item.start), end=to_ours(item.end)) for item in items
            ]

        return KinetoRecords(moved(self.device), moved(self.calls), moved(self.ops), self.marks)


class Recorder:
    """torch's profiler, started and stopped.

    Args:
        ops: record torch ops and the user's record_function ranges of all threads.
        stacks: record Python functions, too; slow.
    """

    def __init__(self, ops: bool, stacks: bool) -> None:
        # A profiler that tears CUPTI down and starts it again does not survive captured graphs.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks on stderr
        on_host, on_cuda = bool(ops or stacks), torch.cuda.is_available()
        self._profile = None
        if on_host or on_cuda:
            # Not torch.profiler.profile, which is a schedule around this: torch 2.11's warns of
            # lost cycles though there is one, and with acc_events=True, which silences that, torch
            # 2.13's makes a Python object of every event at the end.
            self._profile = torch.autograd.profiler.profile(
                use_kineto=True,
                use_cpu=on_host,
                use_device="cuda" if on_cuda else None,
                with_stack=stacks,
                experimental_config=_ExperimentalConfig(profile_all_threads=on_host),
            )

    def start(self) -> None:
        global _recording
        if self._profile is not None:
            self._profile.__enter__()
            _recording = self._profile

    def stop(self, idents: Mapping[int, int]) -> KinetoRecords:
        """Ends the recording. `idents`: see `parse`."""
        if self._profile is None:
            return KinetoRecords([], [], [], [])
        if not _end_recording() and self._profile.kineto_results is None:
            raise ConfigError(
                "the timeline's profile was ended by another one; start no torch.profiler inside a "
                "timeline"
            )
        results = self._profile.kineto_results
        if results is None:
            raise RuntimeError(
                "torch.profiler returned no records; this torch was built without kineto"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            results.save(str(path))
            return parse(decode(path.read_text(errors="replace")), idents)


def _end_recording() -> bool:
    """Whether there was a recording to end. Torch crashes where it stops what is not running."""
    global _recording
    with _ending:
        profile, _recording = _recording, None
        if profile is None or not torch.autograd.profiler._is_profiler_enabled:
            return False
        profile.__exit__(None, None, None)
        return True


atexit.register(_end_recording)  # torch crashes, too, where the process ends inside a recording


def decode(text: str) -> Any:
    """A Chrome trace of torch.profiler as JSON.

    Torch writes names as they are: a quote in that of a range or a thread ends the string, and a
    tab or another control character stands there as it is.
    """
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        quoted = _NAME.sub(lambda name: _BARE_QUOTE.sub(r"\"", name[0]), text)
        return json.loads(quoted, strict=False)


def parse(document: Mapping[str, Any], idents: Mapping[int, int] | None = None) -> KinetoRecords:
    """Reads a Chrome trace of torch.profiler.

    Args:
        document: the decoded JSON.
        idents: native thread ids by the low 32 bits of the pthread id, which is how CUPTI names a
            thread that the profiler has not met.
    """
    base = int(document.get("baseTimeNanoseconds", 0))
    known = idents or {}
    found = KinetoRecords([], [], [], [])
    for event in document.get("traceEvents", ()):
        if event.get("ph") != "X" or "ts" not in event:
            continue
        category, name, args = event.get("cat", ""), event["name"], event.get("args", {})
        start = base + round(float(event["ts"]) * 1e3)
        end = start + round(float(event.get("dur", 0)) * 1e3)
        correlation, tid = int(args.get("correlation", 0)), event["tid"]
        if category in _DEVICE:
            where = (int(args.get("stream", tid)), correlation, int(args.get("bytes", 0)))
            span = DeviceSpan(_device_name(name), _DEVICE[category], start, end, *where)
            found.device.append(span)
        elif category in _CALLS and is_api_call(name):
            call = ApiCall(plain_name(name), start, end, _thread(tid, known), correlation)
            found.calls.append(call)
        elif name == MARK:
            found.marks.append((start, end))
        elif category in _OPS:
            found.ops.append(Op(name, _OPS[category], start, end, _thread(tid, known)))
    found.device.sort(key=attrgetter("start"))
    found.ops.sort(key=attrgetter("start"))
    found.marks.sort()
    return found._replace(calls=outermost(found.calls))


def outermost(calls: Iterable[ApiCall]) -> list[ApiCall]:
    """Calls that are not part of another call of the same thread, by start.

    A runtime call and the driver call inside it count once.
    """
    kept: list[ApiCall] = []
    ends: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: (call.start, -call.end)):
        if call.start >= ends.get(call.thread, call.start):
            kept.append(call)
            ends[call.thread] = call.end
    return kept


def _device_name(name: str) -> str:
    """ "Memcpy HtoD (Pinned -> Device)" is "HtoD Pinned -> Device"; kernels keep their names."""
    bare = name.removeprefix("Memcpy ")
    return name if bare == name else bare.replace("(", "").replace(")", "")


def _thread(tid: object, idents: Mapping[int, int]) -> int:
    number = int(tid) if isinstance(tid, (int, float)) else 0
    return idents.get(number & 0xFFFFFFFF, number)
