"""What counts as a launch, a wait, an allocation or a copy, by the name of an API call."""

import pytest

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
