"""KernelPlan: which kernels the steps of a model ask for, as data that a pure function makes.

Host data only, no torch: a plan can be made, printed and compared for a GPU that is not there. The
decoder goes by its plan alone, and takes another one in its place. Which of an op's kernels then
runs follows from the number of tokens and the shape, in the op; kernel_table.py says what both come
to, and `photon-ext info --plan MODEL` prints it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from photon_ext.checks import Backend, check_backend, check_count, check_flag
from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from photon_ext.models.weights import DecoderWeights

ALL = sys.maxsize  # tokens: a bound that no step reaches
OWN_TOKENS = 32  # CUDA steps of more tokens than this multiply through torch (cuBLAS)
# the same with the Hopper linears, which read each weight once for so many tokens
FUSED_TOKENS = 64
# And steps of so many go through the Hopper linears for a batch instead: faster than the fused ones
# and than torch's products up to the size of a 4B, and as fast with an 8B (FINDINGS)
LEAST_BATCH_TOKENS, BATCH_TOKENS = 33, 128
# And of so many where a layer has no more weights than that, and a product is mostly its begin and
# its end: a 0.6B gains 4 to 7 %, a 1B and a 4B lose
NARROW_BATCH_TOKENS, NARROW_LAYER_WEIGHTS = 256, 32 << 20
BATCH_CAPABILITY = (9, 0)
HEAD_DIMS = (64, 96, 128, 256)  # those of split_attention.h and chunk_attention.h
# those of even_attention.h; and its pages hold a multiple of so many positions
EVEN_HEAD_DIMS, EVEN_PAGE = (64, 128), 16
MOST_SHARERS = 64  # query heads of a KV head: kRows of the small plans in chunk_attention.cu
COLUMNS = 64  # the widths that the Hopper linears take are multiples of it: hopper_columns.h
VECTOR = 8  # elements of 16 bytes
MOST_NORM_COLUMNS = 16384  # and where they normalize at most this: hopper_columns.h
CHUNK_CAPABILITY = (8, 0)  # from here on chunks attend by matrix instructions
DTYPES = ("float32", "float16", "bfloat16")
GPUS = {"h200": (9, 0), "h100": (9, 0), "b200": (10, 0), "l40s": (8, 9), "a100": (8, 0)}


@dataclass(frozen=True)
class Target:
    """What a plan asks of a device.

    Attributes:
        capability: compute capability; None: a CPU.
        runs_hopper: what `photon_ext.hopper_runs` says there.
    """

    capability: tuple[int, int] | None = None
    runs_hopper: bool = False


def gpu_target(capability: tuple[int, int], hopper_on_10: bool = False) -> Target:
    """A GPU of this compute capability; `hopper_on_10`: PHOTON_HOPPER_ON_10 is 1."""
    runs = capability == (9, 0) or (hopper_on_10 and capability == (10, 0))
    return Target(capability, runs)


def target_of(device: torch.device) -> Target:
    """A device that is there."""
    import torch

    from photon_ext import hopper_runs

    on_cuda = device.type == "cuda"
    with torch.cuda.device(device) if on_cuda else nullcontext():
        capability = torch.cuda.get_device_capability() if on_cuda else None
        return Target(capability, hopper_runs())


class Way(Enum):
    """How a step goes through the linears of its layers, and through the head."""

    FUSED = "fused ops"  # with their norms, SwiGLU and residuals, by Hopper kernels where they fit
    BATCH = "a batch's linears"  # which sum in an order that depends on the number of tokens
    OWN = "op by op"
    TORCH = "op by op, products by torch"


@dataclass(frozen=True)
class Ways:
    """Steps of up to `fused_tokens` tokens go the way FUSED, others of up to `own_tokens` OWN, and
    those of more TORCH; but from `LEAST_BATCH_TOKENS` up to `batch_tokens` BATCH. ConfigError: one
    is no integer from 0 on.
    """

    fused_tokens: int = 0
    own_tokens: int = ALL
    batch_tokens: int = 0

    def __post_init__(self) -> None:
        for name, tokens in vars(self).items():
            checked = check_count(f"Ways: {name}", tokens, ALL, least=0)
            object.__setattr__(self, name, checked)

    @property
    def uses_torch(self) -> bool:
        """Whether steps of some number of tokens multiply through torch."""
        return max(self.fused_tokens, self.own_tokens, self.batch_tokens) < ALL

    def of(self, tokens: int) -> Way:
        if LEAST_BATCH_TOKENS <= tokens <= self.batch_tokens:
            return Way.BATCH
        return self.besides_batch(tokens)

    def besides_batch(self, tokens: int) -> Way:
        """The way of what a batch's linears do not do: the head, and steps with adapters."""
        if tokens <= self.fused_tokens:
            return Way.FUSED
        return Way.OWN if tokens <= self.own_tokens else Way.TORCH


@dataclass(frozen=True)
class KernelPlan:
    """Which kernels the steps of a model ask for. As it stands: the portable ones, op by op, which
    give a token the same bits in every step.

    Attributes:
        hopper: attention and sampling ask for their Hopper kernels.
        decode: decode steps.
        chunks: steps with chunks of prompts.
        even: with `hopper`, attention of chunks deals the work of a step evenly to all SMs, so that
            a token's bits depend on what else is in the step.
        batch_attention: with `hopper`, so do those of many decode tokens, whose attention sums in
            the order that is fastest.

    ConfigError: one is of another type.
    """

    hopper: bool = False
    decode: Ways = Ways()
    chunks: Ways = Ways()
    even: bool = False
    batch_attention: bool = False

    def __post_init__(self) -> None:
        check_flag("KernelPlan: hopper", self.hopper)
        check_flag("KernelPlan: even", self.even)
        check_flag("KernelPlan: batch_attention", self.batch_attention)
        for name, ways in (("decode", self.decode), ("chunks", self.chunks)):
            if not isinstance(ways, Ways):
                raise ConfigError(f"KernelPlan: {name} is {shown(ways)}; give Ways(...)")


def plan_kernels(
    config: ModelConfig,
    target: Target,
    dtype: str,
    backend: Backend | None = None,
    exact: bool = False,
) -> KernelPlan:
    """The plan of a model with weights of `dtype` ("bfloat16") on a device. To change parts of it,
    use dataclasses.replace.

    `backend`: None is hopper where it runs. `exact`: nothing goes through torch or a batch's
    linears, because the order in which their products sum depends on the number of tokens, and
    nothing is dealt evenly or attends as a batch, which depends on the step. It does not say
    whether the Hopper kernels take all of the model, which an exact engine asks: `hopper_misfit`
    does.

    Fused linears give a token the same bits in every step; attention by Hopper kernels gives it
    others in a chunk than where it decodes, but, unless `even` or `batch_attention`, no others for
    what rides beside it.
    Steps with chunks are fused only where Hopper kernels take all linears. ConfigError: a value
    that `dtype`, `backend` or `exact` cannot have.
    """
    check_backend(backend)
    check_flag("exact", exact)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {shown(dtype)}; give {', '.join(map(repr, DTYPES))}")
    torch_too = target.capability is not None and not exact
    plain = Ways(0, OWN_TOKENS if torch_too else ALL)
    if choose_backend(backend, target, dtype) == "portable":
        return KernelPlan(False, plain, plain)
    fits = linears_misfit(config, target, dtype) is None
    batch = torch_too and batch_misfit(config, target, dtype) is None
    most = most_batch_tokens(config) if batch else 0
    fused = Ways(FUSED_TOKENS if torch_too else ALL, plain.own_tokens, most)
    chunks = fused if fits else plain
    return KernelPlan(True, fused, chunks, even=torch_too, batch_attention=torch_too)


def most_batch_tokens(config: ModelConfig) -> int:
    """Steps of up to so many tokens go through a batch's linears."""
    weights = config.hidden * (config.qkv_size + config.q_size + 3 * config.intermediate)
    return NARROW_BATCH_TOKENS if weights <= NARROW_LAYER_WEIGHTS else BATCH_TOKENS


def plan_for(
    config: ModelConfig,
    weights: DecoderWeights,
    backend: Backend | None = None,
    exact: bool = False,
) -> KernelPlan:
    """`plan_kernels` for weights where they are."""
    target, dtype = target_of(weights.device), dtype_name(weights.dtype)
    return plan_kernels(config, target, dtype, backend, exact)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def choose_backend(backend: Backend | None, target: Target, dtype: str) -> Backend:
    """`backend`, where None is hopper if this is a GPU that runs its kernels with this dtype."""
    runs = target.capability is not None and target.runs_hopper and dtype == "bfloat16"
    return backend or ("hopper" if runs else "portable")


# --- why a Hopper kernel does not take a model; None: it does -------------------------------------


def linears_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of any linear of the model."""
    inputs = {"hidden": True, "q_size": False, "intermediate": False}
    found = (linear_misfit(config, target, dtype, *each) for each in inputs.items())
    return next((why for why in found if why is not None), None)


def linear_misfit(
    config: ModelConfig, target: Target, dtype: str, columns: str, normalizes: bool
) -> str | None:
    """Of a linear whose input has so many elements as `columns` of the config says, and is
    normalized, or whose output is added to the residual.
    """
    if (why := _basic_misfit(target, dtype)) is not None:
        return why
    size, most = getattr(config, columns), f" up to {MOST_NORM_COLUMNS}" if normalizes else ""
    if size % COLUMNS or (normalizes and size > MOST_NORM_COLUMNS):
        return f"{columns} is {size}, not a multiple of {COLUMNS}{most}"
    if not normalizes and config.hidden % 8:
        return f"hidden is {config.hidden}, not a multiple of 8"
    return None


def batch_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of the linears for a batch."""
    if target.capability != BATCH_CAPABILITY:
        return "the device's compute capability is not 9.0"
    if config.qkv_size % VECTOR:
        return f"qkv_size is {config.qkv_size}, not a multiple of {VECTOR}"
    return linears_misfit(config, target, dtype)


def decode_attention_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    return _basic_misfit(target, dtype) or _heads_misfit(config)


def chunk_attention_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    if target.capability is not None and target.capability < CHUNK_CAPABILITY:
        return f"the device's compute capability is below {CHUNK_CAPABILITY[0]}.0"
    if config.q_heads > MOST_SHARERS * config.kv_heads:
        sharers = f"{config.q_heads} query heads share {config.kv_heads} KV heads"
        return f"{sharers}, more than {MOST_SHARERS} each"
    return _dtype_misfit(dtype) or _heads_misfit(config)


def even_attention_misfit(
    config: ModelConfig, target: Target, dtype: str, page_size: int
) -> str | None:
    """Of attention of chunks as KernelPlan.even has it; where it does not take the model, chunks
    attend as without.
    """
    why = chunk_attention_misfit(config, target, dtype) or _basic_misfit(target, dtype)
    if why is not None:
        return why
    if config.head_dim not in EVEN_HEAD_DIMS:
        return f"head_dim is {config.head_dim}, none of {', '.join(map(str, EVEN_HEAD_DIMS))}"
    if page_size % EVEN_PAGE:
        return f"the page size is {page_size}, not a multiple of {EVEN_PAGE}"
    return None


def link_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of `lora_link_`, which stands between fused linears in steps with adapters; where it does not
    take the model, such steps go the way OWN. A CPU has it, too.
    """
    why = _dtype_misfit(dtype) if target.capability is None else _basic_misfit(target, dtype)
    if why is not None:
        return why
    sizes = "hidden", "q_size", "kv_size", "intermediate"
    odd = next((name for name in sizes if getattr(config, name) % VECTOR), None)
    return odd and f"{odd} is {getattr(config, odd)}, not a multiple of {VECTOR}"


def hopper_misfit(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of any op of the model's steps."""
    misfits = linears_misfit, decode_attention_misfit, chunk_attention_misfit
    found = (misfit(config, target, dtype) for misfit in misfits)
    return next((why for why in found if why is not None), None)


def _basic_misfit(target: Target, dtype: str) -> str | None:
    if not target.runs_hopper:
        only = (
            " without PHOTON_SM_100 and PHOTON_HOPPER_ON_10" if target.capability == (10, 0) else ""
        )
        return f"the device does not run the Hopper kernels{only}"
    return _dtype_misfit(dtype)


def _dtype_misfit(dtype: str) -> str | None:
    return None if dtype == "bfloat16" else f"the weights are {dtype}, not bfloat16"


def _heads_misfit(config: ModelConfig) -> str | None:
    if config.head_dim in HEAD_DIMS:
        return None
    return f"head_dim is {config.head_dim}, none of {', '.join(map(str, HEAD_DIMS))}"
