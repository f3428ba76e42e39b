"""KernelPlan: which kernels the steps of a model ask for, as data that a pure function makes.

Host data only, no torch: a plan can be made, printed and compared for a GPU that is not there. The
decoder goes by its plan alone, and takes another one in its place. Which of an op's kernels then
runs, and what a kernel does not take, is said in csrc/common/linear_plan.h and attention_plan.h,
which are asked here; `photon-ext info --plan MODEL` prints what both come to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from photon_ext import _C
from photon_ext.checks import (
    Activations,
    Backend,
    check_activations,
    check_backend,
    check_count,
    check_flag,
)
from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.projections import (
    BATCH_OPS,
    FUSED_OPS,
    TITLES,
    Epilogue,
    ProjectionShape,
    Segment,
    head_projection,
    layer_projections,
)
from photon_ext.models.quantization import StoredFormat
from photon_ext.models.requantize import in_groups, requantized
from photon_ext.weight_format import WeightFormat

if TYPE_CHECKING:
    import torch

    from photon_ext.models.weights import DecoderWeights

ALL = sys.maxsize  # tokens: a bound that no step reaches
OWN_TOKENS = 32  # CUDA steps of more tokens than this multiply through torch (cuBLAS)
# the same with the Hopper linears, which read each weight once for up to this many tokens
FUSED_TOKENS = 64
# Steps of these numbers of tokens go through the Hopper linears for a batch instead: faster than
# the fused ones and than torch's products up to the size of a 4B, as fast with an 8B (FINDINGS)
LEAST_BATCH_TOKENS, BATCH_TOKENS = 33, 128
# So do steps of up to NARROW_BATCH_TOKENS where a layer has no more weights than the second number:
# a product is mostly its begin and its end there. A 0.6B gains 4 to 7 %, a 1B and a 4B lose
NARROW_BATCH_TOKENS, NARROW_LAYER_WEIGHTS = 256, 32 << 20
# And of weights of fewer bits, which torch reads when they have been decoded: an 8B's steps of 256
# tokens take 0.8 to 0.9 times as long. Where few columns share a scale, the fused linears of more
# than 16 tokens take longer than those of a batch
STORED_BATCH_TOKENS, LEAST_GROUPED_BATCH_TOKENS = 256, 17
LEAST_FP8_BATCH_TOKENS = 9  # where all layers multiply weights in fp8 by tokens in fp8
FP8_PRODUCT_MULTIPLE = 16  # of n and of k, that torch's product of fp8 asks for
ANY_PAGE = 16  # tokens of a page, for what does not ask
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

    @property
    def gpu(self) -> _C.Gpu:
        """As kernels see it. A CPU that runs the Hopper kernels emulates them: as 9.0."""
        major, minor = self.capability or ((9, 0) if self.runs_hopper else (0, 0))
        return _C.Gpu(major, minor, self.runs_hopper)


def gpu_target(capability: tuple[int, int], hopper_on_10: bool = False) -> Target:
    """A GPU of this compute capability; `hopper_on_10`: PHOTON_HOPPER_ON_10 is 1, and so was
    PHOTON_SM_100 when the extension was built.
    """
    runs = _C.hopper_unsupported(_C.Gpu(*capability, hopper_on_10)) is None
    return Target(capability, runs)


def target_of(device: torch.device) -> Target:
    """A device that is there."""
    import torch

    from photon_ext import hopper_runs

    on_cuda = device.type == "cuda"
    with torch.cuda.device(device) if on_cuda else nullcontext():
        capability = torch.cuda.get_device_capability() if on_cuda else None
        return Target(capability, hopper_runs())


class ExecutionMode(Enum):
    """How a step goes through the linears of its layers, and through the head."""

    FUSED = "fused ops"  # with their norms, SwiGLU and residuals, by Hopper kernels where they fit
    BATCH = "a batch's linears"  # which sum in an order that depends on the number of tokens
    OWN = "op by op"
    TORCH = "op by op, products by torch"


@dataclass(frozen=True)
class ExecutionModes:
    """The mode of a step by its tokens: BATCH from `least_batch_tokens` to `batch_tokens`, else
    FUSED up to `fused_tokens`, else OWN up to `own_tokens`, else TORCH. ConfigError: a field is not
    an integer from 0 on.
    """

    fused_tokens: int = 0
    own_tokens: int = ALL
    batch_tokens: int = 0
    least_batch_tokens: int = LEAST_BATCH_TOKENS

    def __post_init__(self) -> None:
        for name, tokens in vars(self).items():
            checked = check_count(f"ExecutionModes: {name}", tokens, ALL, least=0)
            object.__setattr__(self, name, checked)

    @property
    def uses_torch(self) -> bool:
        """Whether steps of some number of tokens multiply through torch."""
        return max(self.fused_tokens, self.own_tokens, self.batch_tokens) < ALL

    def of(self, tokens: int) -> ExecutionMode:
        if self.least_batch_tokens <= tokens <= self.batch_tokens:
            return ExecutionMode.BATCH
        return self.besides_batch(tokens)

    def besides_batch(self, tokens: int) -> ExecutionMode:
        """The mode where BATCH is ruled out: a head with few segments, and steps with adapters."""
        if tokens <= self.fused_tokens:
            return ExecutionMode.FUSED
        return ExecutionMode.OWN if tokens <= self.own_tokens else ExecutionMode.TORCH

    def head(self, segments: int, layers: ExecutionMode, is_dense: bool) -> ExecutionMode:
        """The mode of the head behind layers that ran in mode `layers`; `is_dense`: it has the
        dtype of the model. Behind BATCH and TORCH the input is normalized already. Then torch's
        product of a dense head takes less time than the fused linear, and one of few bits goes
        through the linears of a batch, for torch would have it decoded.
        """
        batch = self.of(segments) is ExecutionMode.BATCH
        if batch and not is_dense and layers in (ExecutionMode.BATCH, ExecutionMode.TORCH):
            return ExecutionMode.BATCH
        if batch and layers is ExecutionMode.BATCH:
            return ExecutionMode.TORCH
        return self.besides_batch(segments)


@dataclass(frozen=True)
class KernelPlan:
    """Which kernels the steps of a model ask for. As it stands: the portable ones, op by op, which
    give a token the same bits in every step.

    Attributes:
        hopper: attention and sampling ask for their Hopper kernels.
        decode: decode steps.
        chunks: steps with chunks of prompts.
        balanced_attention: with `hopper`, attention of chunks deals the work of a step evenly to
            all SMs, so that a token's bits depend on what else is in the step.
        exact_attention: with `balanced_attention`, it cuts contexts at positions that are always
            the same, so that they do not.
        batch_attention: with `hopper`, attention of many decode tokens sums in the order that is
            fastest, so that their bits depend on their number.
        fp8_activations: in the mode BATCH weights in fp8 are multiplied by tokens that are rounded
            to fp8, in the mode TORCH those with one scale a row (`takes_fp8_product`). In other
            modes, and of other weights, it changes nothing.

    ConfigError: one is of another type.
    """

    hopper: bool = False
    decode: ExecutionModes = ExecutionModes()
    chunks: ExecutionModes = ExecutionModes()
    balanced_attention: bool = False
    exact_attention: bool = False
    batch_attention: bool = False
    fp8_activations: bool = False

    def __post_init__(self) -> None:
        check_flag("KernelPlan: hopper", self.hopper)
        check_flag("KernelPlan: balanced_attention", self.balanced_attention)
        check_flag("KernelPlan: exact_attention", self.exact_attention)
        check_flag("KernelPlan: batch_attention", self.batch_attention)
        check_flag("KernelPlan: fp8_activations", self.fp8_activations)
        for name, modes in (("decode", self.decode), ("chunks", self.chunks)):
            if not isinstance(modes, ExecutionModes):
                raise ConfigError(f"KernelPlan: {name} is {shown(modes)}; give ExecutionModes(...)")


def plan_kernels(
    config: ModelConfig,
    target: Target,
    dtype: str,
    backend: Backend | None = None,
    exact: bool = False,
    activations: Activations | None = None,
) -> KernelPlan:
    """The plan of a model with weights of `dtype` ("bfloat16") on a device. To change parts of it,
    use dataclasses.replace.

    `backend`: None is hopper where it runs. `exact`: nothing goes through torch or a batch's
    linears, because the order in which their products sum depends on the number of tokens, no
    decode token attends as a batch, and contexts of chunks are cut as `exact_attention` has it.
    Whether the Hopper kernels take all of the model, which an exact engine asks,
    `hopper_unsupported` says.

    Fused linears give a token the same bits in every step; attention by Hopper kernels gives it
    others in a chunk than where it decodes. What else is in the step changes no bits, unless
    `balanced_attention` is set without `exact_attention`, or `batch_attention` is.
    Steps with chunks are fused only where Hopper kernels take all linears. Where weights are stored
    in fewer bits (`ModelConfig.quantization`), no step is, unless Hopper kernels take all linears:
    steps go op by op through the portable ones. Those of more tokens than a batch's linears take go
    through torch, for which weights are decoded; attention and sampling stay as they are.
    `activations`: "fp8" sets `fp8_activations`; where all linears of layers are in fp8, those of a
    batch begin at fewer tokens.
    ConfigError: a value that `dtype`, `backend`, `exact` or `activations` cannot have; activations
    in fp8 are asked for, and the model or the device has no kernels for them, or with `exact`.
    """
    check_backend(backend)
    check_flag("exact", exact)
    check_activations(activations)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {shown(dtype)}; give {', '.join(map(repr, DTYPES))}")
    if activations is not None:
        _check_fp8_activations(config, target, dtype, backend, exact)
    is_gpu = target.capability is not None
    torch_too = is_gpu and not exact
    plain = ExecutionModes(0, OWN_TOKENS if torch_too else ALL)
    if choose_backend(backend, target, dtype) == "portable":
        return KernelPlan(False, plain, plain)
    attention = is_gpu, is_gpu and exact, torch_too
    fits = linears_unsupported(config, target, dtype) is None
    batch = torch_too and batch_unsupported(config, target, dtype) is None
    most = FUSED_TOKENS if torch_too else ALL
    if config.quantization is not None:
        few_bits = ExecutionModes(most, plain.own_tokens)
        if batch:
            least = least_stored_batch_tokens(config)
            if activations is not None and all(map(is_fp8, _stored_formats(config))):
                least = LEAST_FP8_BATCH_TOKENS
            few_bits = replace(few_bits, batch_tokens=STORED_BATCH_TOKENS, least_batch_tokens=least)
        modes = few_bits if fits else plain
        return KernelPlan(True, modes, modes, *attention, activations is not None)
    fused = ExecutionModes(most, plain.own_tokens, most_batch_tokens(config) if batch else 0)
    chunks = fused if fits else plain
    return KernelPlan(True, fused, chunks, *attention)


def _check_fp8_activations(
    config: ModelConfig, target: Target, dtype: str, backend: Backend | None, exact: bool
) -> None:
    """ConfigError: the model's steps cannot have them."""
    check_not_exact(exact)
    if target.capability is None:
        why: str | None = "there is no GPU"
    elif choose_backend(backend, target, dtype) == "hopper":
        why = fp8_activations_unsupported(config, target, dtype)
    else:
        portable = "the backend is portable" if backend else f"the model is in {dtype}"
        why = _C.hopper_unsupported(target.gpu) or portable
    if why is not None:
        raise ConfigError(
            f'activations is "fp8", and no kernel reads them so: {why}; change that, or leave '
            "activations out"
        )


def check_not_exact(exact: bool) -> None:
    """ConfigError: it is, with activations in fp8."""
    if exact:
        raise ConfigError(
            'activations is "fp8", and exact is True: steps of few tokens do not round them, so '
            "that answers depend on the traffic; leave out one of the two"
        )


def most_batch_tokens(config: ModelConfig) -> int:
    """Steps of up to how many tokens go through a batch's linears."""
    weights = sum(one.n * one.k for one in layer_projections(config).values())
    return NARROW_BATCH_TOKENS if weights <= NARROW_LAYER_WEIGHTS else BATCH_TOKENS


def least_stored_batch_tokens(config: ModelConfig) -> int:
    """From how many tokens on steps of weights of fewer bits go through a batch's linears."""
    small = any(map(has_small_groups, _stored_formats(config)))
    return LEAST_GROUPED_BATCH_TOKENS if small else LEAST_BATCH_TOKENS


def _stored_formats(config: ModelConfig) -> Iterator[StoredFormat | None]:
    """Of all modules of all layers."""
    layers = (layer_projections(config, index) for index in range(config.layers))
    return (one for shapes in layers for shape in shapes.values() for one in shape.stored)


def has_small_groups(stored: StoredFormat | None) -> bool:
    """Whether so few columns share a scale of integers that the fused linears of more than 16
    tokens wait for each group.
    """
    if stored is None or stored.columns is None:
        return False
    least = {WeightFormat.INT4: 128, WeightFormat.INT8: 32}.get(stored.format, 0)
    return stored.columns < least


def plan_for(
    config: ModelConfig,
    weights: DecoderWeights,
    backend: Backend | None = None,
    exact: bool = False,
    activations: Activations | None = None,
) -> KernelPlan:
    """`plan_kernels` for weights where they are."""
    target, dtype = target_of(weights.device), dtype_name(weights.dtype)
    return plan_kernels(config, target, dtype, backend, exact, activations)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def choose_backend(backend: Backend | None, target: Target, dtype: str) -> Backend:
    """`backend`, where None is hopper if this is a GPU that runs its kernels with this dtype."""
    runs = target.capability is not None and target.runs_hopper and dtype == "bfloat16"
    return backend or ("hopper" if runs else "portable")


# --- why Hopper kernels do not take a model; None: they do ----------------------------------------


def linears_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of any linear of a layer that is fused; the head counts where weights are of few bits. Blocks
    of a GGUF file would be regrouped, so that what stands in the way of that is named.
    """
    found = _first_unsupported(ExecutionMode.FUSED, config, target, dtype)
    grouped = in_groups(config)
    if found is None or grouped == config:
        return found
    return _first_unsupported(ExecutionMode.FUSED, grouped, target, dtype) or found


def kept_config(config: ModelConfig, target: Target, dtype: str) -> ModelConfig:
    """How weights that a file has in few bits lie in the memory of a GPU, "stored": as they are, or
    where the Hopper kernels then read all of them, blocks of a GGUF file as groups of integers.
    """
    grouped = in_groups(config)
    return config if linears_unsupported(grouped, target, dtype) else grouped


def roomy_config(config: ModelConfig, target: Target, dtype: str) -> ModelConfig:
    """The same where the GPU has room for more, and nothing was asked for: those that the Hopper
    kernels do not read are expanded.
    """
    kept = kept_config(config, target, dtype)
    return requantized(config, "none") if linears_unsupported(kept, target, dtype) else kept


def batch_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of the linears for a batch, or of what runs beside them."""
    found = _first_unsupported(ExecutionMode.BATCH, config, target, dtype)
    return found or linears_unsupported(config, target, dtype)


def fp8_activations_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of linears that multiply weights in fp8 by tokens in fp8."""
    if (found := batch_unsupported(config, target, dtype)) is not None:
        return found
    shapes = [*_projections(config, ExecutionMode.BATCH)]
    if not any(map(is_fp8, _stored_formats(config))):
        return 'no layer has weights in fp8 (quantize="fp8" rounds them)'
    return _first_refused(shapes, ExecutionMode.BATCH, target, dtype, fp8_activations=True)


def takes_fp8_product(n: int, k: int) -> bool:
    """Whether torch multiplies weights in fp8 of this size by tokens in fp8; the others, and those
    with scales of blocks, it multiplies decoded, by tokens as they are.
    """
    return n % FP8_PRODUCT_MULTIPLE == k % FP8_PRODUCT_MULTIPLE == 0


def is_fp8(stored: StoredFormat | None) -> bool:
    return stored is not None and stored.format is WeightFormat.FP8


def _first_unsupported(
    mode: ExecutionMode, config: ModelConfig, target: Target, dtype: str
) -> str | None:
    device = _C.hopper_unsupported(target.gpu)
    if device is not None:
        return device  # of none in particular
    return _first_refused(_projections(config, mode), mode, target, dtype)


def _first_refused(
    shapes: Iterable[tuple[str, ProjectionShape]],
    mode: ExecutionMode,
    target: Target,
    dtype: str,
    fp8_activations: bool = False,
) -> str | None:
    for title, shape in shapes:
        kernel, why = plan_projection(
            shape, mode, target, dtype, 1, fp8_activations=fp8_activations
        )
        if kernel == "tile":
            return f"{title}: {why}"
    return None


def _projections(config: ModelConfig, mode: ExecutionMode) -> Iterator[tuple[str, ProjectionShape]]:
    """Those that differ and run in steps of the mode, by what people call them."""
    alike = config.quantization is None
    layers = (layer_projections(config, index) for index in range(1 if alike else config.layers))
    yield from dict.fromkeys((TITLES[name], one) for all in layers for name, one in all.items())
    head = head_projection(config)
    if not alike and not (mode is ExecutionMode.BATCH and head.is_dense):  # see ExecutionModes.head
        yield "head", head


def plan_projection(
    shape: ProjectionShape,
    mode: ExecutionMode,
    target: Target,
    dtype: str,
    tokens: int,
    workspace: bool = True,
    fp8_activations: bool = False,
) -> tuple[str, str | None]:
    """The kernel of a projection in steps of the mode FUSED or BATCH, and why it is not the one
    that was asked for. One whose modules are stored in several ways runs segment by segment: "tile"
    if any segment does, else the kernels that differ, as "narrow + mid". `fp8_activations`: as in
    KernelPlan.
    """
    op = (BATCH_OPS if mode is ExecutionMode.BATCH else FUSED_OPS)[shape.epilogue]
    segments = shape.segments()
    if len(segments) > 1 and shape.epilogue is not Epilogue.STORE:
        return "tile", "its modules are stored in several ways"
    sizes = tokens, shape.k, workspace, fp8_activations and mode is ExecutionMode.BATCH
    plans = [_plan_segment(segment, op, target, dtype, *sizes) for segment in segments]
    refused = next((plan for plan in plans if plan[0] == "tile"), None)
    kernels = dict.fromkeys(kernel for kernel, _ in plans)
    reasons = (why for _, why in plans)
    return refused or (" + ".join(kernels), next(filter(None, reasons), None))


def _plan_segment(
    segment: Segment,
    op: str,
    target: Target,
    dtype: str,
    tokens: int,
    k: int,
    workspace: bool,
    fp8_activations: bool,
) -> tuple[str, str | None]:
    sizes, stored = (tokens, sum(segment.rows), k, workspace), segment.stored
    if stored is None:
        return _C.plan_linear(target.gpu, op, dtype, *sizes)
    kept = stored.format.value, stored.columns or k, stored.scale_dtype
    return _C.plan_linear(
        target.gpu,
        op,
        dtype,
        *sizes,
        *kept,
        stored.zeros,
        stored.offsets,
        stored.rows,
        fp8_activations and is_fp8(stored),
    )


def linear_workspace_words(config: ModelConfig, plan: KernelPlan, tokens: int) -> int:
    """Of a workspace for any fused linear of up to so many tokens: those of few bits all use one,
    dense ones where they normalize.
    """
    tokens = min(tokens, max(plan.decode.fused_tokens, plan.chunks.fused_tokens))
    shapes = layer_projections(config).values()
    few_bits = config.quantization is not None
    return _C.linear_workspace_words(
        tokens, max(shape.k for shape in shapes) if few_bits else config.hidden
    )


def has_spare_workspace(
    config: ModelConfig,
    plan: KernelPlan,
    tokens: int,
    segments: int = 1,
    itemsize: int = 2,
) -> bool:
    """Whether the buffer of gate and up, of `tokens` tokens, has room for the workspace of fused
    linears of up to so many tokens or `segments`. A narrow MLP may have too little.
    """
    words = tokens * layer_projections(config)["gate_up"].n * itemsize // 4
    return words >= linear_workspace_words(config, plan, max(tokens, segments))


def decode_attention_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    heads = config.q_heads, config.kv_heads, config.head_dim
    return _C.plan_decode_attention(target.gpu, dtype, 1, *heads, ANY_PAGE)[1]


def chunk_attention_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    heads = config.q_heads, config.kv_heads, config.head_dim
    return _C.plan_paged_attention(target.gpu, dtype, 1, *heads, ANY_PAGE, workspace=False)[1]


def balanced_attention_unsupported(
    config: ModelConfig,
    target: Target,
    dtype: str,
    page_size: int,
    fp8_kv: bool = False,
    tokens: int = 1,
) -> str | None:
    """Of attention of chunks as KernelPlan.balanced_attention has it, in steps of so many tokens;
    where it does not take the model, or keys and values in fp8, chunks attend as without.
    """
    heads = config.q_heads, config.kv_heads, config.head_dim
    return _C.plan_paged_attention(target.gpu, dtype, tokens, *heads, page_size, fp8_kv=fp8_kv)[1]


def link_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of `lora_link_`, which stands between fused linears in steps with adapters; where it does not
    take the model, such steps run in the mode OWN. A CPU has it, too.
    """
    if target.capability is not None and not target.runs_hopper:
        return _C.hopper_unsupported(target.gpu)
    shapes = layer_projections(config)
    if len(shapes["gate_up"].rows) == 1:
        return "gate and up are one module, of which adapters have one part"
    widths = (width for one in shapes.values() for width in (one.k, *one.rows))
    return _C.link_unsupported(dtype, [*dict.fromkeys(widths)])


def hopper_unsupported(config: ModelConfig, target: Target, dtype: str) -> str | None:
    """Of any op of the model's steps."""
    checks = linears_unsupported, decode_attention_unsupported, chunk_attention_unsupported
    found = (check(config, target, dtype) for check in checks)
    return next((why for why in found if why is not None), None)
