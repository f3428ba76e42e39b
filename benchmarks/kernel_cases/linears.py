"""The projections of a layer and of the lm head: alone, and fused with the norm before or the
residual after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import Case, Plan, Setting, rotated_case
from photon_ext import ops
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    LEAST_BATCH_TOKENS,
    LEAST_FP8_BATCH_TOKENS,
    LEAST_GROUPED_BATCH_TOKENS,
    NARROW_BATCH_TOKENS,
    STORED_BATCH_TOKENS,
    has_small_groups,
)
from photon_ext.models.loading.regroup import regrouped
from photon_ext.models.loading.round_to_nearest import fp8_rows, int4_groups
from photon_ext.models.projections import (
    BATCH_OPS,
    FUSED_OPS,
    Epilogue,
    head_projection,
    layer_projections,
)
from photon_ext.models.quantization import StoredFormat
from photon_ext.models.requantize import GROUPED, GROUPS
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

WAYS = ("portable", "hopper")
MANY_TOKENS = 65  # from here on only the kernels made for so many are measured
MLP_MEMORY = 1 << 30


class Projection(NamedTuple):
    """A weight [n, k] of a model, and the fused ops that read it in a decode step: of few tokens,
    and of a batch.
    """

    what: str
    n: int
    k: int
    fused: str
    batch: str = ""


def projections(config: ModelConfig) -> list[Projection]:
    """Every weight matrix of a layer, and the lm head."""
    shapes = layer_projections(config) | {"lm_head": head_projection(config)}
    batch = BATCH_OPS | {Epilogue.STORE: ""}  # that one is measured anyway
    return [
        Projection(name, one.n, one.k, FUSED_OPS[one.epilogue], batch[one.epilogue])
        for name, one in shapes.items()
    ]


def linear_groups(setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """One group per weight matrix, whose cases share its copies."""
    for each in projections(setting.config):
        n, k, what = each.n, each.k, each.what
        weights = cache(partial(setting.stack, n, k, deviation=k**-0.5))  # for the first case
        memory = setting.rotation.copies(setting.nbytes(n, k)) * setting.nbytes(n, k)
        plans = []
        for batch in batches:
            ways = [("linear_into", "plain"), *((each.fused, way) for way in WAYS)]
            if batch >= MANY_TOKENS:
                ways = [(each.fused, "hopper")]
            if batch == 1:
                ways.append(("gemv_into", "plain"))
            makes: list[tuple[str, str, Callable[..., Case]]]
            makes = [(op, way, _linear) for op, way in ways]
            if each.batch and batch <= NARROW_BATCH_TOKENS:
                of_batch = WAYS if batch < MANY_TOKENS else ("hopper",)
                makes += [(each.batch, way, _batch_linear) for way in of_batch]
            for op, way, made in makes:
                make, at = partial(made, op, weights), setting._replace(batch=batch, way=way)
                plans.append(Plan((op,), what, at, make, memory))
        yield plans
    sizes = [setting._replace(batch=batch) for batch in batches if batch < MANY_TOKENS]
    yield [Plan(("fused_mlp_into",), "mlp", at, _mlp, MLP_MEMORY) for at in sizes]


def stored_groups(setting: Setting, batches: list[int], formats: list[str]) -> Iterator[list[Plan]]:
    """The ops of a decode step on weights of fewer bits, and those turned into numbers, as products
    of many tokens need them: a group per matrix and format whose whole blocks its rows are. Hopper
    kernels read blocks of GGUF files as they are regrouped for them.
    """
    for each, form in product(projections(setting.config), map(WeightFormat, formats)):
        if each.k % max(form.columns, 32):
            continue
        weights = cache(partial(_stored_copies, setting, each, form))
        grouped = cache(partial(_grouped_copies, weights)) if form in GROUPED else weights
        size, kinds = each.n * form.row_bytes(each.k), 2 if form in GROUPED else 1
        memory = kinds * setting.rotation.copies(size) * size + 2 * setting.nbytes(each.n, each.k)
        at = setting._replace(form=form.value)
        is_read = form is WeightFormat.FP8 or form.is_int or form in GROUPED
        ways = WAYS if is_read else WAYS[:1]
        plans = []
        settings = [at._replace(batch=batch, way=way) for batch in batches for way in ways]
        if form is WeightFormat.FP8:
            most = range(LEAST_FP8_BATCH_TOKENS, STORED_BATCH_TOKENS + 1)
            fp8 = at._replace(way="hopper", fp8_tokens=True)
            settings += [fp8._replace(batch=batch) for batch in batches if batch in most]
        for one in settings:
            op, made = _stored_op(each, one)
            read = grouped if one.way == "hopper" else weights
            plans.append(Plan((op,), each.what, one, partial(made, op, read), memory))
        decoded = partial(_dequantize, weights)
        yield [
            *plans,
            Plan(("dequantize_into",), each.what, at._replace(way="plain"), decoded, memory),
        ]


def _stored_op(each: Projection, at: Setting) -> tuple[str, Callable[..., Case]]:
    """What a decode step of so many tokens runs on a weight of fewer bits."""
    form = WeightFormat(at.form)
    stored = GROUPED.get(form)
    if form is WeightFormat.INT4:
        stored = StoredFormat(form, columns=_group(each.k))
    small = has_small_groups(stored)
    least = LEAST_GROUPED_BATCH_TOKENS if small else LEAST_BATCH_TOKENS
    least = LEAST_FP8_BATCH_TOKENS if at.fp8_tokens else least
    is_batch = least <= at.batch <= STORED_BATCH_TOKENS
    if at.way != "hopper" or not is_batch:
        return each.fused, _linear
    return (each.batch, _batch_linear) if each.batch else ("linear_into", _linear)


def _dequantize(weights: Callable[[], Sequence[Weight]], at: Setting) -> Case:
    every = weights()
    out = at.unwritten(every[0].n, every[0].k)
    moved = every[0].nbytes + out.nbytes
    return rotated_case(at, "dequantize_into", every, lambda w: (out, w), (0,), moved)


def _stored_copies(at: Setting, projection: Projection, form: WeightFormat) -> list[Weight]:
    """As many copies of a weight as are to be rotated."""
    made = _stored(at, projection.n, projection.k, form)
    return [
        replace(
            made,
            data=made.data.clone(),
            scale=None if made.scale is None else made.scale.clone(),
        )
        for _ in range(at.rotation.copies(made.nbytes))
    ]


def _grouped_copies(blocks: Callable[[], Sequence[Weight]]) -> list[Weight]:
    return [regrouped(one) for one in blocks()]


def _stored(at: Setting, n: int, k: int, form: WeightFormat) -> Weight:
    """Rounded random numbers; of mxfp4 and nvfp4 random codes. Of a GGUF file's block random bytes
    of which any two are a float16 below 0.125, so that its scales are sane wherever they lie.
    """
    if form is WeightFormat.FP8:
        data, scale = fp8_rows(at.normal(n, k, deviation=k**-0.5))
        return Weight(data, form, scale)
    if form is WeightFormat.INT4:
        data, scale = int4_groups(at.normal(n, k, deviation=k**-0.5), _group(k))
        return Weight(data, form, scale)
    if form is WeightFormat.INT8:
        return regrouped(_stored(at, n, k, WeightFormat.Q8_0))
    generator = torch.Generator(device=at.device).manual_seed(0)
    data = torch.empty(n, form.row_bytes(k), dtype=torch.uint8, device=at.device)
    data.random_(0, 256, generator=generator)
    if form.is_fp4:
        return _fp4(data, form, k)
    return Weight(data.bitwise_and_(0x2F), form)


def _group(k: int) -> int:
    """Of int4, as `quantize=` chooses it."""
    return next(group for group in GROUPS if k % group == 0)


def _fp4(data: torch.Tensor, form: WeightFormat, k: int) -> Weight:
    """Scales are 2^-7, those of NVFP4 as 1 that is divided."""
    n, is_e8m0 = len(data), form is WeightFormat.MXFP4
    scale = torch.full((n, k // form.columns), 120 if is_e8m0 else 0x38, dtype=torch.uint8)
    scale = scale.to(data.device)
    if is_e8m0:
        return Weight(data, form, scale)
    divisor = torch.full((n, 1), 128.0, device=data.device)
    return Weight(data, form, scale.view(torch.float8_e4m3fn), divisor=divisor)


def _sizes(weight: torch.Tensor | Weight) -> tuple[int, int]:
    """Outputs and inputs."""
    if isinstance(weight, Weight):
        return weight.n, weight.k
    n, k = weight.shape
    return n, k


def _bytes(x: torch.Tensor | Fp8Tokens) -> int:
    return x.nbytes if isinstance(x, torch.Tensor) else sum(part.nbytes for part in x)


def _linear(op: str, weights: Callable[[], Sequence[torch.Tensor | Weight]], at: Setting) -> Case:
    """One op on each weight matrix in turn; torch has the same for dense ones alone."""
    every, eps, batch = weights(), at.config.rms_eps, at.batch
    stored = isinstance(every[0], Weight)
    n, k = _sizes(every[0])
    shape = {"gemv_into": (n,), "norm_swiglu_into": (batch, n // 2)}.get(op, (batch, n))
    x = at.normal(k) if op == "gemv_into" else at.tokens(k)
    residual = op == "linear_residual_"
    out = at.normal(*shape, seed=1) if residual else at.unwritten(*shape)
    gain = at.gain(k)
    options: dict[str, object] = {}
    is_fused = op in ("norm_linear_into", "linear_residual_", "norm_swiglu_into")
    if is_fused and (stored or (batch >= MANY_TOKENS and not residual)):
        words = ops.linear_workspace_words(batch, k)
        options["workspace"] = torch.zeros(words, dtype=torch.float32, device=at.device)
    nbytes = every[0].nbytes + _bytes(x) + (1 + residual) * out.nbytes

    def case(name: str, call: Callable[[torch.Tensor], object], *before: object) -> Case:
        moved = nbytes + (gain.nbytes if before else 0)
        arguments = (out, x, *before)
        calls = None if stored else (name, call)
        made = rotated_case(at, op, every, lambda w: (*arguments, w), (0,), moved, calls, options)
        return replace(made, flops=2 * batch * n * k if batch >= MANY_TOKENS else 0)

    if op == "linear_into":
        return case("torch.mm", lambda w: torch.mm(x, w.t(), out=out))
    if op == "gemv_into":
        return case("torch.mv", lambda w: torch.mv(w, x, out=out))
    if op == "linear_residual_":
        return case("torch.addmm", lambda w: torch.addmm(out, x, w.t(), out=out))
    if op == "norm_linear_into":
        name, norm = "F.rms_norm, torch.mm", partial(F.rms_norm, x, (k,), gain, eps)
        return case(name, lambda w: torch.mm(norm(), w.t(), out=out), gain, eps)

    def swiglu(weight: torch.Tensor) -> None:
        gate, up = torch.mm(F.rms_norm(x, (k,), gain, eps), weight.t()).chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    return case("F.rms_norm, torch.mm, F.silu, torch.mul", swiglu, gain, eps)


def _batch_linear(
    op: str, weights: Callable[[], Sequence[torch.Tensor | Weight]], at: Setting
) -> Case:
    """One op of those that steps of a batch have, on each weight matrix in turn; torch has the same
    for dense ones alone.
    """
    every, eps, batch = weights(), at.config.rms_eps, at.batch
    stored = isinstance(every[0], Weight)
    n, k = _sizes(every[0])
    x = at.tokens(k)
    if op == "swiglu_into":
        act = at.unwritten(batch, n // 2)

        def swiglu(weight: torch.Tensor) -> None:
            gate, up = torch.mm(x, weight.t()).chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=act)

        moved = every[0].nbytes + _bytes(x) + act.nbytes
        calls = None if stored else ("torch.mm, F.silu, torch.mul", swiglu)
        return rotated_case(at, op, every, lambda w: (act, x, w), (0,), moved, calls)
    out, residual, gain = at.unwritten(batch, n), at.normal(batch, n, seed=1), at.gain(n)
    words = ops.linear_norm_workspace_words(batch, n)
    workspace = torch.zeros(words, dtype=torch.float32, device=at.device)

    def added(weight: torch.Tensor) -> None:
        torch.addmm(residual, x, weight.t(), out=residual)
        out.copy_(F.rms_norm(residual, (n,), gain, eps))

    moved = every[0].nbytes + _bytes(x) + 3 * out.nbytes + gain.nbytes
    calls = None if stored else ("torch.addmm, F.rms_norm", added)
    options = {"workspace": workspace}
    arguments = out, residual, x
    return rotated_case(
        at, op, every, lambda w: (*arguments, w, gain, eps), (0, 1), moved, calls, options
    )


def _mlp(at: Setting) -> Case:
    """Both matrices of a layer's MLP, copied together."""
    _, _, up, down, _ = projections(at.config)
    shapes = [(each.n, each.k) for each in (up, down)]
    copies = at.rotation.copies(sum(at.nbytes(*shape) for shape in shapes))
    pairs = [tuple(at.normal(*s, deviation=s[1] ** -0.5) for s in shapes) for _ in range(copies)]
    x, act = at.normal(at.batch, at.config.hidden), at.unwritten(at.batch, at.config.intermediate)
    out = torch.empty_like(x)

    def composed(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        gate, up = torch.mm(x, pair[0].t()).chunk(2, dim=-1)
        torch.mm(torch.mul(F.silu(gate), up, out=act), pair[1].t(), out=out)

    calls = "torch.mm, F.silu, torch.mul, torch.mm", composed
    nbytes, op = sum(tensor.nbytes for tensor in (*pairs[0], x, out)), "fused_mlp_into"
    case = rotated_case(at, op, pairs, lambda p: (out, act, x, *p), (0, 1), nbytes, calls)
    return replace(case, dependencies=2)
