"""Wrong arguments: each error names the op, the argument, what it has and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from photon_ext import ops
from photon_ext.layout import ROW_COLUMNS
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat
from tests.ops.test_opcheck import CASES, overload

TOKENS = 3
BHLD = torch.zeros(9, 2, 7, 8)  # a cache that was not transposed


def call(name: str, changes: dict[int, Any], device: str = "cpu") -> None:
    """Calls an op with good arguments, but for those at the given places."""
    arguments = list(CASES[name](device, TOKENS))
    for place, value in changes.items():
        arguments[place] = value(arguments[place]) if callable(value) else value
    overload(name)(*arguments)


def narrower(x: torch.Tensor) -> torch.Tensor:
    return x[..., :-1].contiguous()


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind a whole vector."""
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x[:1]])


def changed(
    place: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A change of one tensor of a list."""
    return lambda given: [*given[:place], change(given[place]), *given[place + 1 :]]


def gapped(x: torch.Tensor) -> torch.Tensor:
    """The same shape, elements two apart."""
    return torch.stack([x, x], dim=-1)[..., 0]


# (changes, message) by op
WRONG: dict[str, list[tuple[dict[int, Any], str]]] = {
    "rms_norm_into": [
        ({2: narrower}, "weight has shape [5], expected [6] ([hidden of x])"),
        ({2: torch.Tensor.half}, "weight has dtype float16, expected float32, the dtype of x"),
        ({1: torch.Tensor.double}, "x has dtype float64, expected float32, float16 or bfloat16"),
        ({1: torch.Tensor.flatten}, "x has shape [18], expected 2 dimensions [tokens, hidden]"),
        ({0: longer}, "out has shape [4, 6], expected [3, 6] (the shape of x)"),
        ({0: gapped}, "out has strides [12, 2], expected the last one to be 1"),
        ({0: lambda x: x[:1].expand(3, 6)}, "out has strides [0, 1], expected none to be 0"),
        ({3: -1.0}, "eps is -1, expected a finite number, 0 or more"),
        ({3: float("nan")}, "eps is nan, expected a finite number"),
    ],
    "add_rms_norm_into": [
        ({1: narrower}, "residual has shape [3, 5], expected [3, 6] (the shape of x)"),
    ],
    "linear_into": [
        ({2: narrower}, "weight has shape [5, 5], expected [*, 6] ([n, k of x])"),
        ({3: longer}, "bias has shape [6], expected [5] ([n of weight])"),
        ({4: torch.Tensor.long}, "counts has dtype int64, expected int32"),
        (
            {4: torch.zeros(0, dtype=torch.int32)},
            "counts has shape [0], expected dimension 0 to be at least 1",
        ),
    ],
    "quantize_fp8_into": [
        ({0: lambda out: out.float()}, "out has dtype float32, expected float8_e4m3fn"),
        ({1: longer}, "scale has shape [4], expected [3] ([tokens of out])"),
        ({1: torch.Tensor.half}, "scale has dtype float16, expected float32"),
        ({2: narrower}, "x has shape [3, 5], expected [3, 6] (the shape of out)"),
        ({2: torch.Tensor.long}, "x has dtype int64, expected float32, float16 or bfloat16"),
    ],
    "gemv_into": [
        ({1: gapped}, "x has shape [6] with strides [2], expected a contiguous tensor"),
    ],
    "silu_mul_into": [
        (
            {1: narrower},
            "gate_up has shape [3, 7], expected dimension 1 to be even (gate, then up)",
        ),
        (
            {0: narrower},
            "gate_up has shape [3, 8], expected [3, 6] ([tokens of out, 2 x width of out])",
        ),
        ({1: torch.Tensor.char}, "gate_up has dtype int8, expected float32, float16 or bfloat16"),
    ],
    "fused_mlp_into": [
        ({3: narrower}, "gate_up_weight has shape [8, 5], expected [8, 6]"),
        ({1: narrower}, "act has shape [3, 3], expected [3, 4]"),
    ],
    "lora_shrink_into": [
        ({2: narrower}, "a has shape [2, 4, 5], expected [*, *, 6]"),
        ({3: longer}, "decode_meta has shape [4, 4], expected [3, 4]"),
        ({4: narrower}, "row_state has shape [4, 31], expected [*, 32]"),
    ],
    "lora_expand_": [
        ({2: torch.Tensor.flatten}, "b has shape [40], expected 3 dimensions"),
        ({1: narrower}, "h has 5 columns, expected a multiple of the rank of b, 2"),
        (
            {5: 5},
            "first_rows is 5, expected so many of the 10 rows of b that the rest is 2 equal parts",
        ),
    ],
    "lora_link_": [
        ({3: None}, "before goes with b, and after with a: give both or neither"),
        ({3: None, 4: None}, "act goes with b"),
        ({0: torch.Tensor.float}, "x has dtype float32, expected bfloat16"),
        ({0: narrower}, "x is not made of whole vectors: its address, width and"),
        ({3: shifted}, "before is not made of whole vectors: its address, width and"),
        ({3: narrower}, "before has 19 columns, expected 4 more than a multiple of"),
        ({5: 17}, "first_rows is 17, expected so many of the 16 rows of b that"),
        ({7: None}, "a follows one part, or act"),
        ({8: narrower}, "after has shape [1, 3, 11], expected [1, 3, 12]"),
        ({9: lambda a: a[:, :, :7]}, "a has shape [2, 8, 7], expected [2, *, 8]"),
        ({10: longer}, "norm_weight has shape [9], expected [8] ([columns of a])"),
    ],
    "spatial_features_into": [
        (
            {0: lambda x: x[:, :11].contiguous()},
            "out has shape [3, 11], expected dimension 1 to be at least 12",
        ),
        ({1: longer}, "decode_meta has shape [4, 4], expected [3, 4]"),
        ({5: 1}, "vocab is 40 and there are 1 bins, expected"),
    ],
    "choose_value_": [
        ({1: narrower}, "logits has 14 columns, expected 3 x bins"),
        ({4: 2**31 - 1}, "vocab is 2147483647 and there are 5 bins, expected"),
    ],
    "norm_linear_into": [
        ({1: torch.Tensor.flatten}, "x has shape [18], expected 2 dimensions [tokens, k]"),
        ({1: gapped}, "x has strides [12, 2], expected the last one to be 1"),
        ({2: narrower}, "norm_weight has shape [5], expected [6] ([k of x])"),
        ({2: gapped}, "norm_weight has shape [6] with strides [2], expected a contiguous tensor"),
        ({3: -1.0}, "eps is -1, expected a finite number, 0 or more"),
        ({4: narrower}, "weight has shape [5, 5], expected [*, 6] ([n, k of x])"),
        ({4: torch.Tensor.half}, "weight has dtype float16, expected float32, the dtype of x"),
        ({0: longer}, "out has shape [4, 5], expected [3, 5] ([tokens of x, n of weight])"),
        ({5: longer}, "bias has shape [6], expected [5] ([n of weight])"),
        ({6: torch.Tensor.long}, "counts has dtype int64, expected int32"),
        ({9: torch.Tensor.bfloat16}, "workspace has dtype bfloat16, expected float32"),
        ({9: lambda words: words[1:]}, "workspace has shape [80], expected"),
    ],
    "norm_swiglu_into": [
        (
            {9: lambda words: words[1:].view(2, -1)},
            "workspace has shape [2, 40], expected 1 dimension [words]",
        ),
        (
            {0: narrower},
            (
                "gate_up_weight has shape [8, 6], expected [6, 6] "
                "([2 x intermediate of out, hidden of x])"
            ),
        ),
        ({0: longer}, "out has shape [4, 4], expected [3, *] ([tokens of x, intermediate])"),
        ({2: narrower}, "norm_weight has shape [5], expected [6] ([hidden of x])"),
        ({3: float("inf")}, "eps is inf, expected a finite number, 0 or more"),
        (
            {4: gapped},
            "gate_up_weight has shape [8, 6] with strides [12, 2], expected a contiguous tensor",
        ),
        (
            {4: lambda weight: weight[:-1]},
            "gate_up_weight has shape [7, 6], expected dimension 0 to be even (gate,",
        ),
        (
            {4: torch.Tensor.flatten},
            "gate_up_weight has shape [48], expected 2 dimensions [2 x intermediate, hidden]",
        ),
        ({5: narrower}, "bias has shape [7], expected [8] ([2 x intermediate of out])"),
        ({5: gapped}, "bias has shape [8] with strides [2], expected a contiguous tensor"),
        (
            {6: lambda counts: counts[None]},
            "counts has shape [1, 1], expected 1 dimension [tokens to compute]",
        ),
    ],
    "linear_residual_": [
        ({1: torch.Tensor.double}, "x has dtype float64, expected float32, float16 or bfloat16"),
        ({2: gapped}, "weight has strides [12, 2], expected the last one to be 1"),
        ({0: narrower}, "residual has shape [3, 4], expected [3, 5] ([tokens of x, n of weight])"),
        (
            {0: torch.Tensor.bfloat16},
            "residual has dtype bfloat16, expected float32, the dtype of x",
        ),
        ({0: lambda x: x[:1].expand(3, 5)}, "residual has strides [0, 1], expected none to be 0"),
        ({3: torch.Tensor.half}, "bias has dtype float16, expected float32, the dtype of x"),
        (
            {4: torch.zeros(0, dtype=torch.int32)},
            "counts has shape [0], expected dimension 0 to be at least 1",
        ),
        ({7: lambda words: words[1:]}, "workspace has shape [80], expected"),
    ],
    "swiglu_into": [
        (
            {0: narrower},
            (
                "gate_up_weight has shape [8, 6], expected [6, 6] "
                "([2 x intermediate of out, hidden of x])"
            ),
        ),
    ],
    "linear_norm_into": [
        ({0: narrower}, "out has shape [3, 4], expected [3, 5] ([tokens of x, n of weight])"),
        ({1: longer}, "residual has shape [4, 5], expected [3, 5] ([tokens of x, n of weight])"),
        ({4: narrower}, "norm_weight has shape [4], expected [5] ([n of weight])"),
        ({5: -1.0}, "eps is -1, expected a finite number, 0 or more"),
        ({10: lambda words: words[1:]}, "workspace has shape [59], expected"),
    ],
    "embedding_into": [
        (
            {2: torch.Tensor.bfloat16},
            "out has dtype float32, expected bfloat16, the dtype of weight",
        ),
        ({1: narrower}, "decode_meta has shape [3, 3], expected [*, 4] ([tokens, 4])"),
        (
            {3: narrower},
            "embeds has shape [3, 5], expected [*, 6] ([embeddings, hidden of weight])",
        ),
    ],
    "select_tokens_into": [
        ({2: longer}, "out has shape [3, 6], expected [4, 6] ([segments, hidden of x])"),
    ],
    "begin_step_": [
        (
            {0: changed(0, narrower)},
            f"tables[0] (row_state) has shape [4, {ROW_COLUMNS - 1}], expected [*, {ROW_COLUMNS}]",
        ),
        (
            {0: changed(1, longer)},
            "tables[1] (page_table) has shape [5, 3], expected [4, *] ([rows, pages per row])",
        ),
        (
            {0: changed(2, torch.Tensor.long)},
            "tables[2] (stop_ids) has dtype int64, expected int32",
        ),
        (
            {0: changed(3, longer)},
            "tables[3] (biases) has shape [5, 4], expected [4, *] ([rows, words of a row])",
        ),
        (
            {0: changed(3, gapped)},
            "tables[3] (biases) has shape [4, 4] with strides [8, 2], expected a contiguous tensor",
        ),
        (
            {0: changed(0, lambda table: table[:0])},
            f"tables[0] (row_state) has shape [0, {ROW_COLUMNS}], expected dimension 0 to be at",
        ),
        (
            {0: lambda tables: tables[:2]},
            "tables has 2 tensors, expected 3 to 8 (kMaxTables): row_state, page_table, stop_ids",
        ),
        (
            {0: lambda tables: [*tables, *[tables[3].clone() for _ in range(2)]]},
            "tables has 9 tensors, expected 3 to 8 (kMaxTables)",
        ),
        (
            {0: changed(3, lambda table: table.to("meta"))},
            "tables[3] (biases) is on meta, tables[0] (row_state) is on cpu",
        ),
        (
            {1: torch.zeros(3, dtype=torch.int32)},
            "deltas has shape [3], expected dimension 0 to be at least 4 (the header)",
        ),
        ({3: torch.Tensor.long}, "staged_ids has dtype int64, expected int32"),
        ({4: longer}, "decode_meta has shape [4, 4], expected [3, 4] ([tokens of staged_ids, 4])"),
    ],
    "publish_": [
        ({0: lambda tables: tables[:1]}, "tables has 1 tensors, expected 3 to 8"),
        ({1: narrower}, "out_record has shape [3, 4], expected dimension 1 to be at least 5"),
    ],
    "rope_append_kv_": [
        ({12: torch.Tensor.long}, "counts has dtype int64, expected int32"),
        ({1: narrower}, "k has shape [3, 2, 7], expected [3, 2, 8]"),
        ({0: narrower}, "q has head_dim 7, expected an even number, 2 to 256"),
        (
            {0: torch.zeros(3, 5, 8)},
            "q has 5 heads, expected a multiple of the KV heads, which are 2 (dimension 2 of",
        ),
        ({0: torch.zeros(3, 4, 258)}, "q has head_dim 258, expected an even number, 2 to 256"),
        (
            {4: torch.Tensor.half},
            "v_cache has dtype float16, expected float32, the dtype of k_cache",
        ),
        ({6: torch.Tensor.long}, "page_table has dtype int64, expected int32"),
        ({7: torch.Tensor.double}, "cos has dtype float64, expected float32"),
        ({8: longer}, "sin has shape [9, 8], expected [8, 8] (the shape of cos)"),
        ({9: narrower}, "q_norm has shape [7], expected [8] ([head_dim of q])"),
    ],
    "chunk_plan_into": [
        ({0: torch.Tensor.float}, "plan has dtype float32, expected int32"),
        (
            {0: narrower},
            "plan has shape [55], expected dimension 0 to be at least 56 (chunk_plan_words of the",
        ),
        ({0: gapped}, "plan has shape [56] with strides [2], expected a contiguous tensor"),
        ({6: narrower}, "workspace has shape [2623], expected dimension 0 to be at least 2624"),
        ({6: torch.Tensor.half}, "workspace has dtype float16, expected float32"),
        ({4: longer}, "decode_meta has shape [4, 4], expected [3, 4] ([tokens of q, 4])"),
    ],
    "paged_attention_into": [
        ({13: None}, "plan is None, expected what chunk_plan_into has written, because workspace"),
        ({13: narrower}, "plan has shape [55], expected dimension 0 to be at least 56 (chunk_plan"),
        (
            {9: lambda counts: counts[:0]},
            "counts has shape [0], expected dimension 0 to be at least 1 (the number of decode",
        ),
        (
            {2: BHLD, 3: BHLD},
            (
                "q has 4 heads, expected a multiple of the KV heads, which are 7 (dimension 2 of "
                "k_cache; a [B,"
            ),
        ),
        ({4: longer}, "decode_meta has shape [4, 4], expected [3, 4] ([tokens of q, 4])"),
        (
            {2: lambda k: k[:, :0], 3: lambda v: v[:, :0]},
            "k_cache has shape [9, 0, 2, 8], expected dimension 1",
        ),
        ({7: float("inf")}, "scale is inf, expected a finite number"),
    ],
    "fused_attention_decode_into": [
        (
            {17: lambda counts: counts[None]},
            "counts has shape [1, 3], expected 1 dimension [decode tokens]",
        ),
        (
            {17: lambda counts: gapped(counts)},
            "counts has shape [3] with strides [2], expected a contiguous tensor",
        ),
        ({3: longer}, "v has shape [4, 2, 8], expected [3, 2, 8] (the shape of k)"),
        (
            {14: None},
            "workspace is not given, expected float32 zeros [8192] or more (attention_workspace",
        ),
        ({14: narrower}, "workspace has shape [8191], expected dimension 0 to be at least 8192"),
        ({14: torch.Tensor.half}, "workspace has dtype float16, expected float32"),
        ({14: gapped}, "workspace has shape [8192] with strides [2], expected a contiguous tensor"),
    ],
    "carry_over_ids_": [
        ({2: longer}, "idx has shape [4], expected [3] ([n of next])"),
        ({1: torch.Tensor.float}, "prev has dtype float32, expected int32"),
    ],
    "decode_meta_set_": [
        ({2: narrower}, "positions has shape [2], expected [3] ([tokens of decode_meta])"),
    ],
    "apply_token_mask_": [
        ({1: narrower}, "mask has shape [3, 1], expected dimension 1 to be at least 2"),
        (
            {2: narrower},
            "mask_keys has shape [3, 2], expected [3, 3] ([segments, (row, position, place)])",
        ),
        ({5: longer}, "row_errors has shape [4], expected [3] ([segments])"),
    ],
    "sample_into": [
        ({0: torch.Tensor.long}, "out has dtype int64, expected int32"),
        ({1: torch.zeros(3, 0)}, "logits has shape [3, 0], expected dimension 1 to be at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_message(name: str, changes: dict[int, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{name}: {re.escape(message)}"):
        call(name, changes)


def sharing(name: str, written: int, other: int) -> Callable[[], None]:
    arguments = list(CASES[name]("cpu", TOKENS))
    arguments[written] = arguments[other].reshape(arguments[written].shape)
    return lambda: overload(name)(*arguments)


@pytest.mark.parametrize(
    ("name", "written", "other", "message"),
    [
        ("rms_norm_into", 0, 1, "out shares memory with x, expected separate tensors"),
        ("add_rms_norm_into", 1, 2, "residual shares memory with x"),
        ("carry_over_ids_", 0, 2, "next shares memory with idx"),
        ("begin_step_", 2, 4, "decode_meta shares memory with segments"),
        ("paged_attention_into", 0, 1, "out shares memory with q"),
        ("embedding_into", 0, 0, None),
    ],
)
def test_written_tensors_are_apart(
    name: str, written: int, other: int, message: str | None
) -> None:
    run = sharing(name, written, other)
    if message is None:
        run()
    else:
        with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
            run()


@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 2), (2, 3)])
def test_tables_are_apart(first: int, second: int) -> None:
    tables, *others = CASES["begin_step_"]("cpu", TOKENS)
    words = tables[first].numel()
    memory = torch.zeros(words + 4, dtype=torch.int32)
    tables[first] = memory[:words].view(tables[first].shape)
    tables[second] = memory[-8:].view(4, 2)
    message = rf"^begin_step_: tables\[{first}\] .* shares memory with tables\[{second}\]"
    with pytest.raises(RuntimeError, match=message):
        overload("begin_step_")(tables, *others)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("norm_linear_into", {1: "x", 2: "norm_weight", 4: "weight", 5: "bias", 6: "counts"}),
        ("linear_residual_", {1: "x", 2: "weight", 3: "bias", 4: "counts"}),
        (
            "norm_swiglu_into",
            {1: "x", 2: "norm_weight", 4: "gate_up_weight", 5: "bias", 6: "counts"},
        ),
    ],
)
def test_a_fused_linear_writes_apart_from_all_it_reads(name: str, others: dict[int, str]) -> None:
    """Each argument in turn begins inside the written one."""
    for place, argument in others.items():
        arguments = list(CASES[name]("cpu", TOKENS))
        buffer = torch.zeros(
            2 * max(tensor.numel() for tensor in (arguments[0], arguments[place])) + 1
        )
        written, read = arguments[0], arguments[place]
        arguments[0] = buffer[: written.numel()].view(written.shape)
        arguments[place] = buffer[1:].view(read.dtype)[: read.numel()].view(read.shape)
        with pytest.raises(
            RuntimeError,
            match=f"^{name}: (out|residual) shares memory with {argument}, expected separate "
            "tensors",
        ):
            overload(name)(*arguments)


def test_neighbours_in_one_buffer_are_apart() -> None:
    """Halves of a buffer, and interleaved views of a fused projection, share a storage but no
    element.
    """
    buffer = torch.zeros(2, 3, 6)
    call("rms_norm_into", {0: buffer[0], 1: buffer[1]})
    fused = torch.zeros(3, 8, 8)
    call("rope_append_kv_", {0: fused[:, :4], 1: fused[:, 4:6], 2: fused[:, 6:]})


def test_devices_may_not_be_mixed() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^rms_norm_into: x is on meta, out is on cpu; expected all tensors on one device",
    ):
        call("rms_norm_into", {1: lambda x: x.to("meta")})


@pytest.mark.gpu
def test_cpu_and_cuda_may_not_be_mixed() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^rms_norm_into: x is on cpu, out is on cuda:0; expected all tensors on one device",
    ):
        call("rms_norm_into", {1: torch.Tensor.cpu}, device="cuda")


@pytest.mark.parametrize("name", CASES)
def test_none_in_the_place_of_a_tensor_is_named(name: str) -> None:
    """torch hands it to an op all the same, and the wrappers do not look."""
    for place, argument in enumerate(overload(name)._schema.arguments):
        if str(argument.type) == "Tensor":
            with pytest.raises(
                RuntimeError, match=f"^{name}: {argument.name} is None, expected a tensor"
            ):
                call(name, {place: None})


def test_an_error_leaves_the_op_usable() -> None:
    with pytest.raises(RuntimeError):
        call("linear_into", {2: narrower})
    call("linear_into", {})


def test_a_tensor_whose_storage_is_gone_is_refused() -> None:
    x, weight, out = torch.randn(4, 16), torch.randn(8, 16), torch.empty(4, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"^linear_into: x has shape \[4, 16\] and no memory"):
        torch.ops.photon_ext.linear_into(out, x, weight)


def test_views_of_one_layout_that_begin_together_share_memory() -> None:
    buffer = torch.randn(4, 20)
    view = buffer[:, :16]
    with pytest.raises(RuntimeError, match=r"^linear_into: out shares memory with x"):
        torch.ops.photon_ext.linear_into(view, view, torch.randn(16, 16))


@pytest.mark.parametrize(
    "call_functional",
    [
        lambda x: ops.linear(x, torch.ones(3, 4)),
        lambda x: ops.rms_norm(x, torch.ones(4), 1e-6),
        lambda x: ops.silu_mul(x),
        lambda x: ops.embedding(torch.zeros(1, 4, dtype=torch.int32), x),
        lambda x: ops.select_tokens(x, torch.zeros(1, 4, dtype=torch.int32)),
        lambda x: ops.fused_mlp(x, torch.ones(6, 4), torch.ones(4, 3)),
        lambda x: ops.norm_linear(x, torch.ones(4), 1e-6, torch.ones(3, 4)),
        lambda x: ops.norm_swiglu(x, torch.ones(4), 1e-6, torch.ones(6, 4)),
    ],
)
def test_a_functional_refuses_to_lose_a_gradient(
    call_functional: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"requires grad.*torch\.no_grad\(\), or detach\(\)"):
        call_functional(x)
    with torch.no_grad():
        call_functional(x)
    call_functional(x.detach())


def test_a_functional_refuses_to_lose_a_tangent() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(
        RuntimeError, match=r"^silu_mul: an input has a tangent .* pass its detach\(\)"
    ):
        torch.func.jvp(ops.silu_mul, (x,), (x,))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match=r"^linear: an input has a tangent"):
            ops.linear(x, dual)
        torch.testing.assert_close(ops.linear(x, dual.detach()), torch.full((2, 2), 4.0))


TABLES = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, ROW_COLUMNS, dtype=torch.int32)
SCALAR = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("call_functional", "message"),
    [
        (
            lambda: ops.sample(SCALAR, *TABLES),
            "sample_into: logits has shape [], expected 2 dimensions [segments, vocab]",
        ),
        (
            lambda: ops.embedding(TABLES[0], torch.ones(5)),
            "embedding_into: weight has shape [5], expected 2 dimensions [vocab, hidden]",
        ),
        (
            lambda: ops.embedding(SCALAR.int(), torch.ones(5, 4)),
            "embedding_into: decode_meta has shape [], expected [*, 4]",
        ),
        (
            lambda: ops.rms_norm(SCALAR, torch.ones(4), 0.0),
            "rms_norm_into: x has shape [], expected 2 dimensions [tokens, hidden]",
        ),
        (
            lambda: ops.linear(SCALAR, torch.ones(4, 4)),
            "linear_into: x has shape [], expected 2 dimensions [tokens, k]",
        ),
        (
            lambda: ops.linear(torch.ones(2, 4), SCALAR),
            "linear_into: weight has shape [], expected [*, 4]",
        ),
        (
            lambda: ops.silu_mul(SCALAR),
            "silu_mul_into: gate_up has shape [], expected 2 dimensions [tokens, 2 x width]",
        ),
        (
            lambda: ops.silu_mul(torch.ones(6)),
            "silu_mul_into: gate_up has shape [6], expected 2 dimensions [tokens, 2 x width]",
        ),
        (
            lambda: ops.fused_mlp(SCALAR, torch.ones(6, 4), torch.ones(4, 3)),
            "fused_mlp_into: x has shape [], expected 2 dimensions",
        ),
        (
            lambda: ops.fused_mlp(torch.ones(2, 4), torch.ones(6, 4), torch.ones(4)),
            "fused_mlp_into: down_weight has shape [4], expected",
        ),
        (
            lambda: ops.norm_linear(SCALAR, torch.ones(4), 0.0, torch.ones(4, 4)),
            "norm_linear_into: x has shape [], expected 2 dimensions",
        ),
        (
            lambda: ops.norm_linear(torch.ones(2, 4), torch.ones(4), 0.0, SCALAR),
            "norm_linear_into: weight has shape [], expected [*, 4]",
        ),
        (
            lambda: ops.norm_swiglu(SCALAR, torch.ones(4), 0.0, torch.ones(4, 4)),
            "norm_swiglu_into: x has shape [], expected 2 dimensions",
        ),
        (
            lambda: ops.norm_swiglu(torch.ones(2, 4), torch.ones(4), 0.0, SCALAR),
            "norm_swiglu_into: gate_up_weight has shape [], expected",
        ),
        (
            lambda: ops.paged_attention(
                SCALAR, torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), *[TABLES[0]] * 2, None, 1.0
            ),
            "paged_attention_into: q has shape [], expected 3 dimensions",
        ),
    ],
)
def test_a_functional_leaves_wrong_shapes_to_the_checks(
    call_functional: Callable[[], torch.Tensor], message: str
) -> None:
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        call_functional()


@pytest.mark.parametrize(
    ("name", "place", "argument"),
    [("rms_norm_into", 0, "out"), ("linear_into", 1, "x"), ("sample_into", 1, "logits")],
)
def test_a_negated_view_is_refused(name: str, place: int, argument: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=rf"^{name}: {argument} is a negated view, expected plain memory; "
        rf".*{argument}\.resolve_neg\(\)",
    ):
        call(name, {place: torch._neg_view})


def test_a_negated_view_in_a_list_is_refused_by_its_place() -> None:
    with pytest.raises(RuntimeError, match=r"^begin_step_: tables\[2\] is a negated view"):
        call("begin_step_", {0: changed(2, torch._neg_view)})


@pytest.mark.parametrize("eps", [1e39, 1e300, -1e300, float("inf")])
def test_an_epsilon_beyond_float32_is_refused(eps: float) -> None:
    with pytest.raises(RuntimeError, match="eps is "):
        ops.norm_linear(torch.ones(2, 8), torch.ones(8), eps, torch.ones(3, 8))


@pytest.mark.parametrize(
    ("name", "workspace", "place", "argument"),
    [
        *(
            (name, 9, place, argument)
            for name in ("norm_linear_into", "norm_swiglu_into")
            for place, argument in ((0, "out"), (1, "x"), (2, "norm_weight"))
        ),
        *(("linear_residual_", 7, place, name) for place, name in enumerate(("residual", "x"))),
        *(
            ("linear_norm_into", 10, place, argument)
            for place, argument in ((0, "out"), (1, "residual"), (2, "x"), (4, "norm_weight"))
        ),
    ],
)
def test_a_linear_has_its_workspace_apart(
    name: str, workspace: int, place: int, argument: str
) -> None:
    arguments = list(CASES[name]("cpu", TOKENS))
    memory, other = torch.zeros(128), arguments[place]
    arguments[workspace] = memory[: arguments[workspace].numel()]
    arguments[place] = memory[1 : 1 + other.numel()].view(other.shape)
    with pytest.raises(RuntimeError, match=f"^{name}: workspace shares memory with {argument}"):
        overload(name)(*arguments)


def test_linear_norm_has_its_output_apart_from_the_residual() -> None:
    arguments = list(CASES["linear_norm_into"]("cpu", TOKENS))
    arguments[0] = arguments[1]
    with pytest.raises(RuntimeError, match=r"^linear_norm_into: out shares memory with residual"):
        overload("linear_norm_into")(*arguments)


@pytest.mark.parametrize(("num_tokens", "n"), [(-1, 64), (1, -64)])
def test_sums_of_no_size_have_no_workspace(num_tokens: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {num_tokens}, n {n}; neither may be negative"):
        ops.linear_norm_workspace_words(num_tokens, n)


@pytest.mark.parametrize(("num_tokens", "k"), [(-1, 64), (1, -64)])
def test_a_workspace_of_no_size_is_refused(num_tokens: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {num_tokens}, k {k}; neither may be negative"):
        ops.linear_workspace_words(num_tokens, k)


@pytest.mark.parametrize("written", ["out", "k_cache", "workspace"])
def test_decode_attention_writes_apart_from_its_norms(written: str) -> None:
    cache, table, words = (
        torch.zeros(1, 8, 1, 64),
        torch.zeros(8, 64),
        ops.attention_workspace_words(1, 1, 1, 64),
    )
    parts = {"out": torch.zeros(1, 1, 64), "k_cache": cache, "workspace": torch.zeros(words)}
    q, k, v = torch.zeros(3, 1, 1, 64)
    meta = torch.tensor([[1, 0, 1, 0]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"{written} shares memory with q_norm"):
        ops.fused_attention_decode_into(
            *(parts["out"], q, k, v, cache, torch.zeros_like(cache), meta, None, table, table, 0.1),
            q_norm=parts[written].view(-1)[:64],
            workspace=parts["workspace"],
        )


def test_what_is_no_weight_is_refused_by_name() -> None:
    x, numbers, scale = torch.ones(1, 128), torch.ones(8, 128), torch.ones(8, 1)
    fp8 = numbers.to(torch.float8_e4m3fn)
    bad: list[tuple[Any, type[Exception], str]] = [
        (None, TypeError, "a weight is None"),
        (Weight(fp8, "fp8", scale), TypeError, "a weight is 'fp8'"),  # type: ignore[arg-type]
        (Weight(fp8, WeightFormat.FP8, scale.requires_grad_()), RuntimeError, "requires grad"),
    ]
    for weight, error, message in bad:
        with pytest.raises(error, match=message):
            ops.linear(x, weight)
