"""torch.library.opcheck on every op, with its whole set of checks: schema, autograd
registration, fake tensors, dynamic shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from photon_ext import ops
from photon_ext.layout import RowColumn
from photon_ext.weight_format import WeightFormat
from tests.ops.caches import paged_cache, rotary_tables, tokens_and_segments
from tests.ops.numeric import ints, randn
from tests.ops.tables import SAMPLE, empty_step, row_state

Arguments = tuple[Any, ...]
SIZES = [0, 1, 9]  # tokens or segments: none, one, several
CHECKS = (
    "test_schema",
    "test_faketensor",
    "test_autograd_registration",
    "test_aot_dispatch_dynamic",
)
COMPARING = ("test_schema",)


def floats(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32, device=device, seed=seed)


def rows_and_segments(device: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    state = row_state(
        device, {row: {RowColumn.REMAINING: 3} for row in range(1, count + 1)}, count + 1
    )
    return state, ints([[row, row - 1, 1, SAMPLE] for row in range(1, count + 1)], device).reshape(
        -1, 4
    )


def begin_step(device: str, size: int) -> Arguments:
    state, segments = rows_and_segments(device, size)
    return empty_step(device, state, segments.tolist(), num_tokens=size).arguments()


def carry_over_ids(device: str, size: int) -> Arguments:
    return (
        ints([1] * size, device),
        ints([5, 6], device),
        ints([i % 3 - 1 for i in range(size)], device),
    )


def decode_meta_set(device: str, size: int) -> Arguments:
    return (
        ints([[9] * 4] * size, device).reshape(-1, 4),
        ints([3] * size, device),
        ints([*range(size)], device),
        None,
    )


def publish(device: str, size: int) -> Arguments:
    state, segments = rows_and_segments(device, size)
    record, side = ints([[7] * 5] * size, device).reshape(-1, 5), ints([[0]] * (size + 1), device)
    tables = [state, side, side.clone()]
    return tables, record, ints([4] * size, device), segments, ints([0] * size, device)


def apply_token_mask(device: str, size: int) -> Arguments:
    state, segments = rows_and_segments(device, size)
    keys = ints([[row, 0, row - 1] for row in range(1, size + 1)], device).reshape(-1, 3)
    return (
        floats(size, 40, device=device),
        ints([[-1, 3]] * size, device).reshape(-1, 2),
        keys,
        segments,
        state,
        ints([5] * size, device),
    )


def sample(device: str, size: int) -> Arguments:
    state, segments = rows_and_segments(device, size)
    step = empty_step(device, state, [], num_tokens=0)
    return (
        ints([8] * size, device),
        floats(size, 40, device=device),
        segments,
        state.clone(),
        ints([0] * size, device),
        False,
        step.tables,
    )


def embedding(device: str, size: int) -> Arguments:
    meta, _ = tokens_and_segments([(1, 0, size)], device)
    table, embeds = floats(10, 6, device=device, seed=1), floats(3, 6, device=device, seed=2)
    return floats(size, 6, device=device), meta, table, embeds


def select_tokens(device: str, size: int) -> Arguments:
    _, segments = rows_and_segments(device, size)
    return floats(size, 6, device=device), floats(size, 6, device=device, seed=1), segments


def rms_norm(device: str, size: int) -> Arguments:
    return (
        floats(size, 6, device=device),
        floats(size, 6, device=device, seed=1),
        floats(6, device=device, seed=2),
        1e-5,
    )


def add_rms_norm(device: str, size: int) -> Arguments:
    return (
        floats(size, 6, device=device),
        floats(size, 6, device=device, seed=3),
        *rms_norm(device, size)[1:],
    )


def linear(device: str, size: int) -> Arguments:
    x, weight, bias = (floats(*shape, device=device, seed=1) for shape in ((size, 6), (5, 6), (5,)))
    return floats(size, 5, device=device), x, weight, bias, ints([size, 1], device)


def gemv(device: str, size: int) -> Arguments:
    return (
        floats(size, device=device),
        floats(6, device=device, seed=1),
        floats(size, 6, device=device, seed=2),
        None,
    )


def silu_mul(device: str, size: int) -> Arguments:
    return floats(size, 4, device=device), floats(size, 8, device=device, seed=1)


def fused_mlp(device: str, size: int) -> Arguments:
    out, act, x = (floats(size, width, device=device, seed=width) for width in (6, 4, 6))
    return (
        out,
        act,
        x.clone(),
        floats(8, 6, device=device, seed=1),
        floats(6, 4, device=device, seed=2),
        None,
    )


def norm_linear(device: str, size: int) -> Arguments:
    out, x, weight, bias, counts = linear(device, size)
    words = torch.zeros(ops.linear_workspace_words(size, 6), device=device)
    norm = floats(6, device=device, seed=3)
    return out, x, norm, 1e-5, weight, bias, counts, True, False, words


def linear_residual(device: str, size: int) -> Arguments:
    words = torch.zeros(ops.linear_workspace_words(size, 6), device=device)
    return *linear(device, size), True, False, words


def norm_swiglu(device: str, size: int) -> Arguments:
    out, x, norm = (floats(*shape, device=device, seed=3) for shape in ((size, 4), (size, 6), (6,)))
    return (
        out,
        x,
        norm,
        1e-5,
        floats(8, 6, device=device, seed=1),
        floats(8, device=device, seed=2),
        ints([size], device),
        False,
        False,
        torch.zeros(ops.linear_workspace_words(size, 6), device=device),
    )


def swiglu(device: str, size: int) -> Arguments:
    out, x, _, _, weight, bias, counts, *_ = norm_swiglu(device, size)
    return out, x, weight, bias, counts, True


def linear_norm(device: str, size: int) -> Arguments:
    residual, x, weight, bias, counts = linear(device, size)
    out, norm = torch.zeros_like(residual), floats(5, device=device, seed=4)
    words = torch.zeros(ops.linear_norm_workspace_words(size, 5), device=device)
    return out, residual, x, weight, norm, 1e-5, bias, counts, True, False, words


def lora_rows(device: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    meta, _ = tokens_and_segments([(row, 2, 1) for row in range(1, size + 1)], device)
    slots = {row: {RowColumn.LORA_SLOT: row % 3} for row in range(1, size + 1)}
    return meta, row_state(device, slots, size + 1)


def lora_shrink(device: str, size: int) -> Arguments:
    out, x = (floats(size, width, device=device, seed=width) for width in (4, 6))
    return out, x, floats(2, 4, 6, device=device, seed=1), *lora_rows(device, size)


def lora_expand(device: str, size: int) -> Arguments:
    out, h = (floats(size, width, device=device, seed=width) for width in (10, 6))
    return out, h, floats(2, 10, 2, device=device, seed=1), *lora_rows(device, size), 4


def lora_link(device: str, size: int) -> Arguments:
    """All that it does: gate and up of 8 columns each, ranks of 8."""
    bf16 = torch.bfloat16
    x, act = (floats(size, width, device=device, seed=width).to(bf16) for width in (16, 8))
    b, a = (floats(2, *shape, device=device, seed=1).to(bf16) for shape in ((16, 8), (8, 8)))
    before = floats(1, size, 20, device=device, seed=2).abs()
    after, norm = floats(1, size, 12, device=device), floats(8, device=device, seed=3).to(bf16)
    return x, *lora_rows(device, size), before, b, 8, 1e-5, act, after, a, norm


def spatial_features(device: str, size: int) -> Arguments:
    meta, _ = tokens_and_segments([(row, 2, 1) for row in range(1, size + 1)], device)
    meta[:, 0] = torch.arange(size) * 3 + 38
    out, turns = floats(size, 14, device=device), floats(2, 3, device=device, seed=1)
    return out, meta, floats(2, device=device, seed=2), turns, 40, 5


def choose_value(device: str, size: int) -> Arguments:
    rows = {row: {RowColumn.OBJECT_VALUES: row % 4} for row in range(1, size + 1)}
    segments = [[row, row - 1, 1, 1] for row in rows]
    step = empty_step(device, row_state(device, rows, size + 1), segments, size)
    sampled = torch.zeros(size, dtype=torch.int32, device=device)
    return sampled, floats(size, 15, device=device), step.segments, step.tables, 40


def attention_parts(device: str, size: int) -> dict[str, Any]:
    cache = paged_cache(size + 1, 2, 4, 2, 8, torch.float32, device)
    cache.k.fill_(0.5)
    cache.v.fill_(0.25)
    meta, segments = tokens_and_segments([(row, 2, 1) for row in range(1, size + 1)], device)
    q, k, v = (floats(size, heads, 8, device=device, seed=heads) for heads in (4, 2, 2))
    cos, sin = rotary_tables(8, 8, device)
    return {
        "cache": cache,
        "meta": meta,
        "segments": segments,
        "qkv": (q, k, v),
        "tables": (cos, sin),
    }


def rope_append_kv(device: str, size: int) -> Arguments:
    parts = attention_parts(device, size)
    cache, norm = parts["cache"], floats(8, device=device, seed=7)
    return (
        *parts["qkv"],
        cache.k,
        cache.v,
        parts["meta"],
        cache.page_table,
        *parts["tables"],
        norm,
        None,
        1e-6,
        ints([size // 2, size, size], device),
    )


def chunk_plan(device: str, size: int) -> Arguments:
    parts = attention_parts(device, size)
    cache, workspace, plan = parts["cache"], *chunk_memory(device, size)
    step = parts["meta"], cache.page_table, workspace
    return plan, parts["qkv"][0], cache.k, cache.v, *step, ints([size // 2, size, size], device)


def chunk_memory(device: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Workspace and plan of one CTA."""
    workspace = torch.zeros(ops.chunk_workspace_words(8, 1), device=device)
    return workspace, ints([0] * ops.chunk_plan_words(size, 1), device)


def paged_attention(device: str, size: int) -> Arguments:
    parts = attention_parts(device, size)
    cache, q = parts["cache"], parts["qkv"][0]
    workspace, plan = chunk_memory(device, size)
    return (
        torch.zeros_like(q),
        q,
        cache.k,
        cache.v,
        parts["meta"],
        parts["segments"],
        cache.page_table,
        0.3,
        False,
        ints([size // 2, size, size], device),
        workspace,
        False,
        None,
        plan,
    )


def fused_attention_decode(device: str, size: int) -> Arguments:
    parts = attention_parts(device, size)
    cache, q = parts["cache"], parts["qkv"][0]
    workspace = torch.zeros(ops.attention_workspace_words(size, 4, 2, 8), device=device)
    inputs = *parts["qkv"], cache.k, cache.v, parts["meta"], cache.page_table, *parts["tables"]
    counts = ints([size // 2, size, size], device)
    return torch.zeros_like(q), *inputs, 0.3, None, None, 1e-6, workspace, True, False, counts


def dequantize(device: str, size: int) -> Arguments:
    """With scales and all that may be beside them, but zero points."""
    codes = torch.full((size, 16), 60, dtype=torch.uint8, device=device)
    scale = torch.full((size, 1), 127, dtype=torch.uint8, device=device)
    code, divisor = WeightFormat.MXFP4.code, torch.ones(size, 1, device=device)
    return torch.zeros(size, 32, device=device), codes, scale, code, None, divisor


def quantize_fp8(device: str, size: int) -> Arguments:
    out = torch.zeros(size, 6, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale, x = torch.zeros(size, device=device), floats(size, 6, device=device)
    return out, scale, x, ints([size // 2, size, size], device)


CASES: dict[str, Callable[[str, int], Arguments]] = {
    "begin_step_": begin_step,
    "carry_over_ids_": carry_over_ids,
    "decode_meta_set_": decode_meta_set,
    "publish_": publish,
    "apply_token_mask_": apply_token_mask,
    "sample_into": sample,
    "embedding_into": embedding,
    "select_tokens_into": select_tokens,
    "rms_norm_into": rms_norm,
    "add_rms_norm_into": add_rms_norm,
    "linear_into": linear,
    "gemv_into": gemv,
    "silu_mul_into": silu_mul,
    "fused_mlp_into": fused_mlp,
    "norm_linear_into": norm_linear,
    "linear_residual_": linear_residual,
    "norm_swiglu_into": norm_swiglu,
    "swiglu_into": swiglu,
    "linear_norm_into": linear_norm,
    "dequantize_into": dequantize,
    "quantize_fp8_into": quantize_fp8,
    "lora_shrink_into": lora_shrink,
    "lora_expand_": lora_expand,
    "lora_link_": lora_link,
    "spatial_features_into": spatial_features,
    "choose_value_": choose_value,
    "rope_append_kv_": rope_append_kv,
    "chunk_plan_into": chunk_plan,
    "paged_attention_into": paged_attention,
    "fused_attention_decode_into": fused_attention_decode,
}


def overload(name: str) -> Any:
    return getattr(torch.ops.photon_ext, name).default


def test_every_op_has_a_case_a_wrapper_and_a_reference() -> None:
    from photon_ext import reference

    registered = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("photon_ext::")
    }
    assert registered == set(CASES)
    for name in CASES:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"photon_ext::{name}", key)
    wrappers = {
        name: function
        for name, function in vars(ops).items()
        if inspect.isfunction(function) and hasattr(reference, name)
    }
    assert set(wrappers) >= set(CASES)
    for name, wrapper in wrappers.items():
        assert inspect.signature(getattr(reference, name)) == inspect.signature(wrapper), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_opcheck(device: str, name: str, size: int) -> None:
    """All four checks of several tokens; of none and of one those that do not compile. Those that
    compare what is written are left out where that is fp8, which torch does not compare.
    """
    arguments = CASES[name](device, size)
    checks = CHECKS if size == SIZES[-1] else CHECKS[:2]
    if getattr(arguments[0], "dtype", None) is torch.float8_e4m3fn:
        checks = tuple(check for check in checks if check not in COMPARING)
    results = torch.library.opcheck(overload(name), arguments, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


def on_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [on_meta(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_run_the_checks_and_nothing_else(name: str) -> None:
    arguments = [on_meta(value) for value in CASES[name]("cpu", 2)]
    assert overload(name)(*arguments) is None
    first = arguments[0]
    arguments[0] = first[:2] if isinstance(first, list) else first.new_empty(*first.shape, 3)
    with pytest.raises(RuntimeError, match=f"^{name}: "):
        overload(name)(*arguments)
