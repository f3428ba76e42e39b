"""What counts as a launch, a wait, an allocation or a copy, and what is a fault in a steady
step."""

import pytest

from benchmarks.cuda_calls.counts import Counts
from photon_ext.observe.api import CallKind, classify, is_api_call

KINDS = {
    CallKind.GRAPH_LAUNCH: "cudaGraphLaunch cuGraphLaunch_ptsz cudaGraphLaunch_v10000",
    CallKind.KERNEL_LAUNCH: "cudaLaunchKernel cudaLaunchKernelExC_v11060 cuLaunchKernelEx",
    CallKind.EVENT_WAIT: "cudaEventSynchronize cuEventSynchronize",
    CallKind.SYNC: "cudaStreamSynchronize cudaDeviceSynchronize cuCtxSynchronize cudaMemcpy "
    "cuStreamSynchronize_ptsz cuMemcpyHtoD_v2 cudaMemcpy2D cudaMemset cuMemcpyDtoH_v2",
    CallKind.ALLOCATION: "cudaMalloc cudaFree cudaMallocAsync cudaFreeAsync cudaHostAlloc "
    "cudaFreeHost cudaMallocHost cuMemAlloc_v2 cuMemFree_v2 cuMemCreate cuMemMap cuMemHostAlloc "
    "cuMemAddressReserve cudaHostRegister cuMemAllocHost_v2",
    CallKind.COPY: "cudaMemcpyAsync cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cudaMemcpy2DAsync "
    "cuMemcpyAsync cudaMemcpyBatchAsync_v12080",
    CallKind.OTHER: "cudaEventRecord cudaStreamWaitEvent cudaEventQuery cuMemGetInfo_v2 "
    "cudaMemsetAsync cuPointerGetAttribute cudaGraphInstantiate begin_step_kernel",
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names.split()]
)
def test_kind_of_call(kind: CallKind, name: str) -> None:
    assert classify(name) is kind


def test_api_calls_are_told_from_other_records() -> None:
    assert is_api_call("cudaLaunchKernel")
    assert is_api_call("cuLaunchKernel")
    assert not is_api_call("cublasGemm")
    assert not is_api_call("custom_op")
    assert not is_api_call("aten::mm")


def steady(steps: int) -> Counts:
    counts = Counts("test", steps)
    calls = ("cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaEventRecord")
    counts.calls.update(calls * steps)
    counts.copies["DtoH Device -> Pinned"] = steps
    return counts


def test_a_steady_window_has_no_faults() -> None:
    assert steady(10).faults(quiet_steps=10) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("cudaGraphLaunch", "graph launches"),
        ("cuLaunchKernel", "outside of graphs"),
        ("cuEventSynchronize", "event waits"),
        ("cudaStreamSynchronize", "sync: "),
        ("cudaMalloc", "allocation: "),
    ],
)
def test_one_call_too_many_is_a_fault(name: str, fault: str) -> None:
    counts = steady(10)
    counts.calls[name] += 1
    assert [fault in found for found in counts.faults(quiet_steps=10)] == [True]


def test_a_missing_wait_is_a_fault() -> None:
    counts = steady(10)
    counts.calls["cudaEventSynchronize"] -= 1
    assert len(counts.faults(quiet_steps=10)) == 1


def test_copies_to_the_device_are_faults() -> None:
    counts = steady(10)
    counts.copies["HtoD Pinned -> Device"] += 1
    counts.copied_bytes["HtoD Pinned -> Device"] += 64
    assert counts.host_to_device_bytes == 64
    assert counts.faults(quiet_steps=10) == ["1 copies to the device in quiet steps (64 bytes)"]
    assert counts.faults(quiet_steps=9) == ["only 9 of 10 steps were quiet"]
    counts.copies["HtoD Pageable -> Device"] += 1
    assert counts.host_to_device_bytes is None
    assert counts.pageable == 1
    assert "1 copies of pageable memory" in counts.faults(quiet_steps=10)
