"""Which kernels a plan asks for and what the ops make of it, without a GPU; and that an exact
engine refuses models that Hopper kernels do not take whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import photon_ext
from photon_ext import ops
from photon_ext.checks import Backend
from photon_ext.cli.step_kernels import Entry, Setting, step_kernels
from photon_ext.engine import Engine, EngineOptions
from photon_ext.engine.parts import check_exact, make_model
from photon_ext.errors import ConfigError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import (
    ALL,
    BATCH_TOKENS,
    NARROW_BATCH_TOKENS,
    STORED_BATCH_TOKENS,
    ExecutionMode,
    ExecutionModes,
    KernelPlan,
    Target,
    balanced_attention_unsupported,
    batch_unsupported,
    gpu_target,
    hopper_unsupported,
    kept_config,
    linears_unsupported,
    link_unsupported,
    plan_for,
    plan_kernels,
    plan_projection,
    roomy_config,
)
from photon_ext.models.layers import attention
from photon_ext.models.projections import layer_projections
from photon_ext.models.quantization import ModuleFormats, StoredFormat
from photon_ext.models.requantize import in_groups, requantized
from photon_ext.models.shapes import NAMED_SHAPES, in_q4_k_m, in_q8_0
from photon_ext.models.weights import random_weights
from photon_ext.weight_format import WeightFormat

H200, A100, B200 = (gpu_target(capability) for capability in ((9, 0), (8, 0), (10, 0)))
SMOLLM2 = ModelConfig(Family.LLAMA, 576, 30, 9, 3, 64, 1536, 49152, tied_embeddings=True)
CONFIG = ModelConfig(Family.QWEN3, 192, 2, 6, 2, 64, 320, 203)
CPU = torch.device("cpu")
NOT_9_0 = "the device's compute capability is not 9.0"
LINEARS = ("q, k, v", "o", "gate, up", "down", "head")


def table(
    config: ModelConfig,
    target: Target = H200,
    dtype: str = "bfloat16",
    backend: Backend | None = None,
    exact: bool = False,
) -> list[Entry]:
    plan = plan_kernels(config, target, dtype, backend, exact)
    return step_kernels(Setting(config, target, dtype, plan))


def runs(entries: list[Entry], step: str, op: str) -> list[tuple[int, int | None, str]]:
    """Kernels by the range of tokens."""
    found = [entry for entry in entries if (entry.step, entry.op) == (step, op)]
    return [(entry.least, entry.most, entry.kernel) for entry in found]


@pytest.mark.parametrize("step", ["decode", "chunks"])
@pytest.mark.parametrize("name", [*NAMED_SHAPES, "smollm2"])
def test_on_an_h200_published_models_run_hopper_kernels_and_then_torchs_products(
    name: str, step: str
) -> None:
    entries = table(NAMED_SHAPES.get(name, SMOLLM2))
    most = 256 if name in ("qwen3-0.6b", "qwen2.5-0.5b", "smollm2") else 128
    few, many = (1, 8, "narrow"), (most + 1, None, "cuBLAS")
    for op in LINEARS[:-1]:
        assert runs(entries, step, op) == [few, (9, 32, "mid"), (33, most, "batch"), many]
    assert runs(entries, step, "head") == [few, (9, 32, "mid"), (33, None, "cuBLAS")]
    norms = [(1, 32, "-"), (33, most, "sum_norm"), (most + 1, None, "rms_norm")]
    assert runs(entries, step, "norms") == norms
    assert runs(entries, step, "swiglu") == [(1, most, "-"), (most + 1, None, "silu_mul")]
    assert runs(entries, step, "sampling") == [(1, None, "sample (clusters)")]
    many = [("attention of chunks", 4097, "a step of more than 4,096 tokens")]
    assert [(entry.op, entry.least, entry.why) for entry in entries if entry.why] == many


@pytest.mark.parametrize(
    ("name", "by_warps"),
    [("qwen3-0.6b", True), ("qwen3-4b", True), ("llama-3.2-1b", False), ("smollm2", False)],
)
@pytest.mark.parametrize(
    ("exact", "most", "kernel"), [(True, 96, "warp_attention"), (False, 32, "batch_attention")]
)
def test_many_rows_attend_by_one_warp_ctas_where_heads_have_128_dims(
    name: str, by_warps: bool, exact: bool, most: int, kernel: str
) -> None:
    """Where bits may depend on the step, in an order of its own, which pays from fewer rows on."""
    entries = table(NAMED_SHAPES.get(name, SMOLLM2), exact=exact)
    expected: list[tuple[int, int | None, str]] = [(1, None, "split_attention")]
    if by_warps:
        expected = [(1, most, "split_attention"), (most + 1, None, kernel)]
    assert runs(entries, "decode", "attention") == expected
    assert runs(entries, "chunks", "attention of decode rows") == expected
    assert runs(entries, "decode", "rotation") == [(1, None, "-")]
    assert runs(entries, "chunks", "rotation") == [(1, None, "rope_append_kv")]


def test_chunks_attend_balanced_and_with_exact_by_cuts_that_are_always_the_same() -> None:
    """In pages of whole runs of 16, heads of 64 or 128 dims, and on devices with the kernels."""
    config = NAMED_SHAPES["qwen3-4b"]
    op = "chunks", "attention of chunks"
    plan = plan_kernels(config, H200, "bfloat16")
    assert (plan.balanced_attention, plan.exact_attention, plan.batch_attention) == (1, 0, 1)
    exact = plan_kernels(config, H200, "bfloat16", exact=True)
    assert (exact.balanced_attention, exact.exact_attention, exact.batch_attention) == (1, 1, 0)
    balanced = [(1, 4096, "balanced_attention"), (4097, None, "chunk_attention")]
    assert runs(step_kernels(Setting(config, H200, "bfloat16", plan, 32)), *op) == balanced
    otherwise = [(1, None, "chunk_attention")]
    assert runs(table(config, exact=True), *op) == balanced
    assert runs(step_kernels(Setting(config, H200, "bfloat16", plan, 24)), *op) == otherwise
    assert runs(table(replace(config, head_dim=96)), *op) == otherwise
    assert not plan_kernels(config, H200, "bfloat16", "portable").balanced_attention
    why = balanced_attention_unsupported(config, H200, "bfloat16", 24)
    assert why == "the page size is not a multiple of 16 (24)"


def test_exact_attention_has_a_workspace_where_no_step_would_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the bits of a token would depend on how many others its step has."""
    config = NAMED_SHAPES["qwen3-4b"]
    monkeypatch.setattr(attention, "target_of", lambda _: H200)

    def words(tokens: int, exact: bool, page_size: int = 16) -> tuple[int, int]:
        plan = plan_kernels(config, H200, "bfloat16", exact=exact)
        sizes = plan, tokens, 8, page_size, torch.bfloat16, CPU, False
        return attention.attention_words(config, *sizes)[1:]

    ctas = attention.most_ctas(CPU)
    for exact in (False, True):
        room = ops.chunk_workspace_words(128, ctas, exact)
        assert words(4096, exact) == (room, ops.chunk_plan_words(4096, ctas, exact))
        assert words(4096, exact, page_size=24) == (0, 0)
    assert words(4097, exact=True) == (0, 0)
    assert words(4097, exact=False) != (0, 0)


def test_one_warp_ctas_need_pages_of_whole_tiles_and_few_query_heads() -> None:
    config = NAMED_SHAPES["qwen3-4b"]
    plan = plan_kernels(config, H200, "bfloat16")
    odd_pages = step_kernels(Setting(config, H200, "bfloat16", plan, page_size=24))
    assert runs(odd_pages, "decode", "attention") == [(1, None, "split_attention")]
    many = table(replace(config, q_heads=40))
    assert runs(many, "decode", "attention") == [(1, None, "split_attention")]


def test_exact_engines_run_large_linears_and_nothing_through_torch() -> None:
    entries = table(NAMED_SHAPES["qwen3-4b"], exact=True)
    large = [(1, 8, "narrow"), (9, 64, "mid"), (65, None, "large")]
    for step in ("decode", "chunks"):
        assert {tuple(runs(entries, step, op)) for op in LINEARS} == {tuple(large)}
        assert runs(entries, step, "norms") == [(1, 64, "-"), (65, None, "norm")]
    portable = table(NAMED_SHAPES["qwen3-4b"], exact=True, backend="portable")
    assert runs(portable, "chunks", "down") == [(1, None, "tile")]


def test_a_narrow_mlp_has_no_workspace_for_large_linears() -> None:
    entries = table(replace(CONFIG, hidden=576, intermediate=192), exact=True)
    assert runs(entries, "decode", "q, k, v")[1:] == [(9, 64, "mid"), (65, None, "mid")]
    assert runs(entries, "decode", "o")[-1] == (65, None, "large")
    (why,) = {entry.why for entry in entries if entry.why and entry.op in LINEARS}
    assert why == "in groups of 64 tokens, for want of a workspace"


@pytest.mark.parametrize("target", [A100, B200])
def test_other_gpus_run_portable_kernels(target: Target) -> None:
    entries = table(NAMED_SHAPES["qwen3-4b"], target)
    for step in ("decode", "chunks"):
        assert runs(entries, step, "down") == [(1, 32, "tile"), (33, None, "cuBLAS")]
    assert runs(entries, "decode", "attention") == [(1, None, "attention")]
    assert runs(entries, "decode", "sampling") == [(1, None, "sample")]


def test_an_a100_that_is_asked_for_hopper_attends_to_chunks_by_matrix_instructions() -> None:
    entries = table(NAMED_SHAPES["qwen3-4b"], A100, backend="hopper")
    assert runs(entries, "chunks", "attention of chunks") == [(1, None, "chunk_attention")]
    others = [entry for entry in entries if entry.op in (*LINEARS, "attention", "sampling")]
    assert {entry.why for entry in others if entry.kernel != "cuBLAS"} == {NOT_9_0}


def test_hopper_kernels_run_on_10_where_the_environment_says_so() -> None:
    allowed = gpu_target((10, 0), hopper_on_10=True)
    assert plan_kernels(CONFIG, allowed, "bfloat16").hopper
    assert not plan_kernels(CONFIG, B200, "bfloat16").hopper
    assert not gpu_target((10, 3), hopper_on_10=True).runs_hopper


def test_a_model_whose_linears_do_not_all_fit_is_fused_where_it_decodes_alone() -> None:
    """With portable kernels for those, which say why; in steps with chunks for all."""
    config = replace(CONFIG, q_heads=7, kv_heads=1, head_dim=96)
    entries, why = table(config), "the number of columns is no multiple of 64 (672)"
    plan = KernelPlan(
        True,
        ExecutionModes(64, 32),
        ExecutionModes(0, 32),
        balanced_attention=True,
        batch_attention=True,
    )
    assert plan_kernels(config, H200, "bfloat16") == plan
    assert runs(entries, "decode", "o") == [(1, 64, "tile"), (65, None, "cuBLAS")]
    assert runs(entries, "decode", "down")[0] == (1, 8, "narrow")
    assert runs(entries, "chunks", "down") == [(1, 32, "tile"), (33, None, "cuBLAS")]
    uneven = "head_dim is neither 64 nor 128 (96)"
    assert {entry.why for entry in entries} == {None, why, f"o: {why}", uneven}
    assert {entry.op for entry in entries if entry.why and entry.step == "decode"} == {"o"}


def test_heads_that_attention_does_not_take_are_named() -> None:
    entries = table(replace(CONFIG, head_dim=32))
    found = {(entry.op, entry.kernel, entry.why) for entry in entries if entry.why}
    why = "head_dim is none of 64, 96, 128 and 256 (32)"
    ops = ("attention", "attention of chunks", "attention of decode rows")
    assert found == {(op, "attention", why) for op in ops}


@pytest.mark.parametrize("exact", [False, True])
def test_keys_and_values_in_fp8_are_read_by_split_and_chunk_attention(exact: bool) -> None:
    """Everything else stays as it is, but for CTAs of one warp; nor is there a workspace to deal
    chunks out evenly.
    """
    config = NAMED_SHAPES["qwen3-4b"]
    plan = plan_kernels(config, H200, "bfloat16", exact=exact)
    entries = step_kernels(Setting(config, H200, "bfloat16", plan, fp8_kv=True))
    why = "keys and values are fp8, which balanced attention does not read"
    attention = [entry for entry in entries if entry.op.startswith("attention")]
    assert {(entry.op, entry.kernel, entry.why) for entry in attention} == {
        ("attention", "split_attention", None),
        ("attention of chunks", "chunk_attention", why),
        ("attention of decode rows", "split_attention", None),
    }
    others = [entry for entry in table(config, exact=exact) if not entry.op.startswith("attention")]
    assert [entry for entry in entries if entry not in attention] == others
    assert balanced_attention_unsupported(config, H200, "bfloat16", 16, fp8_kv=True) == why
    portable = replace(plan, hopper=False)
    entries = step_kernels(Setting(config, H200, "bfloat16", portable, fp8_kv=True))
    assert all(entry.why is None for entry in entries if entry.op.startswith("attention"))


def test_keys_and_values_in_fp8_of_other_heads_and_gpus() -> None:
    config = NAMED_SHAPES["qwen3-4b"]
    op = "chunks", "attention of chunks"

    def entries(config: ModelConfig, target: Target) -> list[Entry]:
        plan = plan_kernels(config, target, "bfloat16", "hopper", exact=True)
        return step_kernels(Setting(config, target, "bfloat16", plan, fp8_kv=True))

    for head_dim in (64, 96):
        found = entries(replace(config, head_dim=head_dim), H200)
        assert runs(found, *op) == [(1, None, "chunk_attention")]
    found = entries(replace(config, head_dim=256), H200)
    assert runs(found, *op) == [(1, None, "attention")]
    (why,) = {entry.why for entry in found if entry.op == op[1]}
    assert why == "keys and values are fp8, and head_dim is none of 64, 96 and 128 (256)"
    assert runs(entries(config, A100), *op) == [(1, None, "chunk_attention")]


def test_on_a_cpu_nothing_goes_through_torch() -> None:
    assert plan_kernels(CONFIG, Target(), "float32") == KernelPlan()
    assert {ExecutionModes().of(tokens) for tokens in (1, 33, 4096)} == {ExecutionMode.OWN}
    hopper = plan_kernels(CONFIG, Target(runs_hopper=True), "bfloat16", "hopper")
    assert hopper == KernelPlan(True, ExecutionModes(ALL, ALL), ExecutionModes(ALL, ALL))


def test_a_batchs_linears_take_over_where_they_are_faster_but_not_the_head_nor_adapters() -> None:
    plan = plan_kernels(CONFIG, H200, "bfloat16")
    modes = plan.decode
    assert modes == plan.chunks == ExecutionModes(64, 32, NARROW_BATCH_TOKENS)
    wide = NAMED_SHAPES["qwen3-4b"]
    assert plan_kernels(wide, H200, "bfloat16").decode.batch_tokens == BATCH_TOKENS
    fused, batch, torch_ = ExecutionMode.FUSED, ExecutionMode.BATCH, ExecutionMode.TORCH
    assert [modes.of(n) for n in (32, 33, 256, 257)] == [fused, batch, batch, torch_]
    assert [modes.besides_batch(n) for n in (33, 64, 65)] == [fused, fused, torch_]
    assert [modes.head(n, batch, True) for n in (32, 33, 64)] == [fused, torch_, torch_]
    assert [modes.head(n, batch, False) for n in (32, 33, 64)] == [fused, batch, batch]
    assert [modes.head(n, fused, True) for n in (32, 33, 64)] == [fused] * 3  # with adapters
    assert [modes.head(n, torch_, True) for n in (64, 65)] == [fused, torch_]  # of a long prompt
    assert [modes.head(n, torch_, False) for n in (32, 33, 256, 257)] == [
        fused,
        batch,
        batch,
        torch_,
    ]
    assert modes.uses_torch
    assert plan_kernels(CONFIG, H200, "bfloat16", exact=True).decode.batch_tokens == 0
    allowed = gpu_target((10, 0), hopper_on_10=True)
    assert plan_kernels(CONFIG, allowed, "bfloat16").decode == ExecutionModes(64, 32)
    odd = replace(CONFIG, hidden=200)
    assert plan_kernels(odd, H200, "bfloat16").decode.batch_tokens == 0


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_batchs_linears_read_weights_of_fewer_bits_and_those_of_their_head(form: str) -> None:
    config = requantized(NAMED_SHAPES["qwen3-8b"], form)
    entries = table(config)
    fused = [(1, 16, "narrow"), (17, 32, "mid_stored")]
    most = STORED_BATCH_TOKENS
    for step in ("decode", "chunks"):
        for op in LINEARS:
            batch = (33, most, "batch_stored")
            assert runs(entries, step, op) == [*fused, batch, (most + 1, None, "cuBLAS")]
    exact = [entry for entry in table(config, exact=True) if entry.op in LINEARS]
    assert {entry.kernel for entry in exact} == {"narrow", "mid_stored"}


def stored_as(**groups: int) -> ModelConfig:
    """A model whose modules of these names are in int4 with so many columns a scale; 0: in fp8."""
    config = replace(CONFIG, hidden=256)
    formats = {}
    for name, columns in groups.items():
        int4 = StoredFormat(WeightFormat.INT4, columns=columns, scale_dtype="float16")
        part = "self_attn" if name in ("q_proj", "k_proj", "v_proj") else "mlp"
        for index in range(config.layers):
            module = f"model.layers.{index}.{part}.{name}"
            formats[module] = int4 if columns else StoredFormat(WeightFormat.FP8)
    return replace(config, quantization=ModuleFormats(formats))


def test_a_projection_that_is_stored_runs_segment_by_segment() -> None:
    """By the kernels of all; where one is portable, that is the answer, and why."""
    mixed = stored_as(q_proj=0, k_proj=32, v_proj=64)
    qkv = layer_projections(mixed)["qkv"]
    fused, batch = ExecutionMode.FUSED, ExecutionMode.BATCH
    assert len(qkv.segments()) == 3
    assert plan_projection(qkv, fused, H200, "bfloat16", 4) == ("narrow", None)
    assert plan_projection(qkv, batch, H200, "bfloat16", 40) == ("batch_stored", None)
    half = layer_projections(stored_as(q_proj=0))["qkv"]
    assert plan_projection(half, fused, H200, "bfloat16", 12) == ("narrow + mid", None)
    assert plan_projection(half, batch, H200, "bfloat16", 40) == ("batch_stored + batch", None)
    for odd in ("q_proj", "v_proj"):
        why = "groups of int4 have not 32, 64 or 128 columns (16)"
        shape = layer_projections(stored_as(k_proj=0, **{odd: 16}))["qkv"]
        assert plan_projection(shape, fused, H200, "bfloat16", 4) == ("tile", why)
    narrow = replace(qkv, rows=(384, 4, 128))
    why = "the number of outputs is no multiple of 8 (4)"
    assert plan_projection(narrow, batch, H200, "bfloat16", 40) == ("tile", why)


def test_gate_and_up_that_are_stored_in_two_ways_are_not_fused() -> None:
    config = stored_as(gate_proj=0, up_proj=32)
    told = "gate, up: its modules are stored in several ways"
    assert linears_unsupported(config, H200, "bfloat16") == told
    assert batch_unsupported(config, H200, "bfloat16") == told


@pytest.mark.parametrize("of", [in_q4_k_m, in_q8_0])
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "llama-3.2-1b"])
def test_hopper_kernels_read_all_of_a_files_blocks_as_groups_of_integers(
    name: str, of: Callable[[ModelConfig], ModelConfig]
) -> None:
    """With values in other blocks than queries and keys, in half of the layers."""
    stored = of(NAMED_SHAPES[name])
    config = kept_config(stored, H200, "bfloat16")
    assert config == in_groups(stored) == roomy_config(stored, H200, "bfloat16")
    segments = [len(layer_projections(config, i)["qkv"].segments()) for i in range(config.layers)]
    assert set(segments) == ({1} if of is in_q8_0 else {1, 2})
    entries = table(config)
    assert not [entry for entry in entries if entry.op in LINEARS and entry.why]
    fused = [(1, 16, "narrow")] + [(17, 32, "mid_stored")] * (of is in_q8_0)
    assert runs(entries, "decode", "q, k, v") == [
        *fused,
        (fused[-1][1] + 1, STORED_BATCH_TOKENS, "batch_stored"),
        (STORED_BATCH_TOKENS + 1, None, "cuBLAS"),
    ]
    assert kept_config(stored, A100, "bfloat16") == stored
    assert roomy_config(stored, A100, "bfloat16") == NAMED_SHAPES[name]


def test_what_a_batchs_linears_do_not_take() -> None:
    assert batch_unsupported(CONFIG, H200, "bfloat16") is None
    assert batch_unsupported(CONFIG, A100, "bfloat16") == NOT_9_0
    assert batch_unsupported(CONFIG, H200, "float16") == "q, k, v: the dtype is not bfloat16"
    odd = replace(CONFIG, q_heads=96, kv_heads=1, head_dim=2)
    told = "q, k, v: the number of outputs is no multiple of 8 (196)"
    assert batch_unsupported(odd, H200, "bfloat16") == told


def test_a_plan_with_a_batchs_linears_for_a_model_that_they_do_not_take_says_why() -> None:
    config = replace(CONFIG, intermediate=100)
    plan = KernelPlan(True, ExecutionModes(0, 32, 128), ExecutionModes(0, 32, 128))
    entries = step_kernels(Setting(config, H200, "bfloat16", plan))
    own, batch, torch = (1, 32, "tile"), (33, 128, "tile"), (129, None, "cuBLAS")
    assert runs(entries, "decode", "down") == [own, batch, torch]
    assert runs(entries, "decode", "o")[1] == (33, 128, "batch")
    why = "the number of columns is no multiple of 64 (100)"
    found = {entry.least: entry.why for entry in entries if entry.op == "down"}
    assert found == {1: f"down: {why}", 33: why, 129: None}


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "linears", "attention"),
    [
        ({}, None, None),
        ({"hidden": 200}, "q, k, v: the number of columns is no multiple of 64 (200)", None),
        (
            {"hidden": 16448},
            "q, k, v: there are more than 16384 columns to normalize (16448)",
            None,
        ),
        ({"intermediate": 100}, "down: the number of columns is no multiple of 64 (100)", None),
        (
            {"q_heads": 7, "kv_heads": 1, "head_dim": 96},
            "o: the number of columns is no multiple of 64 (672)",
            None,
        ),
        ({"head_dim": 32}, None, "head_dim is none of 64, 96, 128 and 256 (32)"),
        ({"q_heads": 65, "kv_heads": 1}, None, "a KV head has more than 64 query heads (65)"),
    ],
)
def test_models_that_fit(
    changes: dict[str, int], linears: str | None, attention: str | None
) -> None:
    config = replace(CONFIG, **changes)
    assert linears_unsupported(config, H200, "bfloat16") == linears
    assert hopper_unsupported(config, H200, "bfloat16") == (linears or attention)


def test_links_between_fused_linears_take_whole_vectors_of_bfloat16() -> None:
    """On a GPU that runs the Hopper kernels, and on a CPU."""
    assert link_unsupported(CONFIG, H200, "bfloat16") is None
    assert link_unsupported(CONFIG, Target(), "bfloat16") is None
    assert link_unsupported(CONFIG, Target(), "float32") == "the dtype is not bfloat16"
    one_module = link_unsupported(NAMED_SHAPES["phi-4-mini"], H200, "bfloat16")
    assert one_module == "gate and up are one module, of which adapters have one part"
    assert link_unsupported(CONFIG, A100, "bfloat16") == NOT_9_0
    odd = replace(CONFIG, intermediate=324)
    assert link_unsupported(odd, H200, "bfloat16") == "a width is no multiple of 8 (324)"


def test_an_exact_engine_refuses_what_would_run_portable_kernels_here_and_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(photon_ext, "hopper_runs", lambda: True)
    check_exact(CONFIG, torch.bfloat16, CPU)
    told = (
        "the Hopper kernels do not take all of the model on cpu: q, k, v: the dtype is not "
        'bfloat16; pass backend="portable"'
    )
    with pytest.raises(ConfigError, match=told):
        check_exact(CONFIG, torch.float32, CPU)
    monkeypatch.setattr(photon_ext, "hopper_runs", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU"):
        check_exact(CONFIG, torch.bfloat16, CPU)


@pytest.mark.gpu
def test_an_engine_asks_before_it_is_made() -> None:
    weights = random_weights(CONFIG, torch.float32, "cuda")
    with pytest.raises(ConfigError, match=r'not bfloat16; pass backend="portable"'):
        Engine.from_weights(CONFIG, weights, exact=True, backend="hopper")
    with Engine.from_weights(CONFIG, weights, exact=True, max_len=64, max_rows=2) as engine:
        assert engine.generate([[1, 2, 3]])[0].token_ids


# --- a plan of one's own --------------------------------------------------------------------------


def test_an_engine_runs_the_plan_that_it_is_given() -> None:
    weights = random_weights(CONFIG, torch.float32)
    usual = plan_for(CONFIG, weights)
    plan = replace(usual, decode=ExecutionModes(fused_tokens=2))
    assert plan != usual
    options = EngineOptions(max_len=64, max_rows=4, kernel_plan=plan)
    assert make_model(options, CONFIG, weights)[1].plan is plan
    assert make_model(EngineOptions(max_len=64, max_rows=4), CONFIG, weights)[1].plan == usual


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"exact": True}, "exact is True: that"),
        ({"backend": "portable"}, "backend is 'portable': that"),
        ({"exact": True, "backend": "hopper"}, "exact is True and backend is 'hopper': that"),
    ],
)
def test_a_plan_beside_what_chooses_one_is_refused(
    others: dict[str, bool | Backend], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"kernel_plan is given, and {named} chooses a plan"):
        EngineOptions(kernel_plan=KernelPlan(), **others)


def test_products_by_torch_are_refused_in_a_graph_of_a_cpu() -> None:
    weights = random_weights(CONFIG, torch.float32)
    plan = replace(plan_for(CONFIG, weights), chunks=ExecutionModes(own_tokens=8))
    with pytest.raises(ConfigError, match=r"by torch .* which a graph on cpu cannot hold"):
        make_model(EngineOptions(max_len=64, max_rows=4, kernel_plan=plan), CONFIG, weights)
    eager = EngineOptions(max_len=64, max_rows=4, kernel_plan=plan, graph=False)
    assert make_model(eager, CONFIG, weights)[1].plan is plan


def test_a_plan_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel_plan is 'hopper'; give what"):
        EngineOptions(kernel_plan="hopper")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ExecutionModes(own_tokens=2.5),
            "ExecutionModes: own_tokens is 2.5; give an integer from 0 to",
        ),
        (lambda: ExecutionModes(-1), "fused_tokens is -1; give an integer from 0 to"),
        (lambda: ExecutionModes(True), "ExecutionModes: fused_tokens is True; give an integer"),
        (lambda: KernelPlan(hopper=1), "KernelPlan: hopper is 1; give True or False"),
        (
            lambda: KernelPlan(balanced_attention=1),
            "KernelPlan: balanced_attention is 1; give True or False",
        ),
        (
            lambda: KernelPlan(exact_attention=1),
            "KernelPlan: exact_attention is 1; give True or False",
        ),
        (
            lambda: KernelPlan(batch_attention=1),
            "KernelPlan: batch_attention is 1; give True or False",
        ),
        (lambda: KernelPlan(decode=8), r"KernelPlan: decode is 8; give ExecutionModes\(...\)"),
        (lambda: plan_kernels(CONFIG, H200, "int8"), "dtype is 'int8'; give 'float32', 'float16'"),
        (lambda: plan_kernels(CONFIG, H200, "bfloat16", "fast"), "backend is 'fast'"),
        (lambda: plan_kernels(CONFIG, H200, "bfloat16", None, 1), "exact is 1; give True or"),
    ],
)
def test_values_that_no_plan_has_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
