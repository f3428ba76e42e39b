"""The CUPTI callback counter, fed by hand: there need not be a driver."""

import ctypes
from collections.abc import Sequence

import pytest

from benchmarks.cuda_calls import callbacks as api_counter
from benchmarks.cuda_calls.callbacks import (
    ApiCounter,
    CallbackData,
    CopyParams,
    CuptiError,
    copy_name,
)
from photon_ext.observe.api import CallKind

ENTER, EXIT = 0, 1


def call(
    counter: ApiCounter,
    domain: int,
    name: str,
    params: CopyParams | None = None,
    *,
    inside: Sequence[str] = (),
) -> None:
    """What CUPTI does around one API call that makes others."""
    for site in (ENTER, EXIT):
        address = ctypes.addressof(params) if params is not None else None
        data = CallbackData(site, name.encode(), address)
        counter._callback(None, domain, 1, ctypes.addressof(data))
        if site == ENTER:
            for inner in inside:
                call(counter, api_counter.DRIVER_API, inner)


def test_a_call_is_counted_once_whatever_it_calls() -> None:
    counter, inside = ApiCounter(), ("cuGraphLaunch", "cuCtxGetCurrent")
    for _ in range(3):
        call(counter, api_counter.RUNTIME_API, "cudaGraphLaunch", inside=inside)
        call(counter, api_counter.DRIVER_API, "cuEventSynchronize")
    assert dict(counter.calls) == {"cudaGraphLaunch": 3, "cuEventSynchronize": 3}
    assert counter.counts(3).of(CallKind.GRAPH_LAUNCH) == 3


def test_copies_are_told_apart_by_where_their_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {1: "Pageable", 2: "Pinned", 3: "Device"}
    monkeypatch.setattr(api_counter, "memory_kind", kinds.__getitem__)
    counter, runtime, driver = ApiCounter(), api_counter.RUNTIME_API, api_counter.DRIVER_API
    call(counter, runtime, "cudaMemcpyAsync", CopyParams(dst=3, src=1, nbytes=64))
    call(counter, driver, "cuMemcpyHtoDAsync_v2", CopyParams(dst=3, src=2, nbytes=100))
    call(counter, runtime, "cudaMemcpyAsync_ptsz", CopyParams(dst=2, src=3, nbytes=32))
    call(counter, api_counter.RUNTIME_API, "cudaMemcpy2DAsync")
    counts = counter.counts(1)
    assert counts.copies["HtoD Pageable -> Device"] == 1
    assert counts.copied_bytes == {
        "HtoD Pageable -> Device": 64,
        "HtoD Pinned -> Device": 100,
        "DtoH Device -> Pinned": 32,
    }
    assert counts.pageable == 1
    assert counts.host_to_device_bytes is None  # the 2D copy's direction and size are not known
    assert counts.of(CallKind.COPY) == 4


def test_names_are_those_of_activity_records() -> None:
    assert copy_name("Pinned", "Device") == "HtoD Pinned -> Device"
    assert copy_name("Device", "Device") == "DtoD Device -> Device"


class Refusing:
    """A libcupti that has another subscriber."""

    def __init__(self) -> None:
        self.unsubscribed = 0

    def cuptiSubscribe(self, *_: object) -> int:
        return 39

    def cuptiGetResultString(self, _result: int, text: object) -> int:
        text._obj.value = b"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"  # type: ignore[attr-defined]
        return 0


def test_a_refusal_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_counter, "load_cupti", Refusing)
    words = r"NOT_SUPPORTED \(39\); .*torch\.profiler, which stays.*count in a process of its own"
    with pytest.raises(CuptiError, match=words), ApiCounter():
        pass


def test_no_library_says_which_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_counter, "LIBRARIES", ("libnone.so.1", "libnone.so.2"))
    with pytest.raises(CuptiError, match=r"libnone\.so\.1.*libnone\.so\.2"), ApiCounter():
        pass
