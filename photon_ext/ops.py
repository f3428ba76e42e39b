"""The ops, typed: thin wrappers over ``torch.ops.photon_ext.*``.

Names that end in ``_into`` write their first argument; names that end in ``_`` update what their
docstring says. Both return nothing, allocate nothing and never synchronize, so that they can be
captured in a graph. They run where their tensors are: CPU, CUDA (on torch's current stream) or Meta
(checks only). The functionals without a suffix allocate their result.

They may be called from any thread. On a CPU they run at the call, on the threads of
:func:`photon_ext.num_threads` (where those are busy with another thread's op, on the caller's
alone), but within a stream's ``claim()`` they are enqueued there: until they have run, whoever
calls keeps their tensors.

Words used below. A *token* is one position of one sequence in a step: ``decode_meta`` is int32 [T,
4], (id, position, length, row) a token; length 0 marks a dead token, which reads and writes no KV.
A *segment* is one row's tokens: ``segments`` is int32 [R, 4], (row, first token, number of tokens,
flags). A step's tokens are decode tokens first, each a segment whose id is carried over, and then
chunks, whose ids are staged. ``row_state`` is int32 [rows, 32]; rows that live are numbered from 1
on, row 0 is padding. :mod:`photon_ext.layout` says what each column and flag means, as Meta,
SegmentFlag, RowColumn, Count and RecordFlag.

All integer tensors are int32. Floating ones are float32, bfloat16 or float16, of one dtype a call,
but for cos/sin tables, scales and a workspace, which are float32, and for weights and caches with
scales.
Integer tensors, vectors and cos/sin tables are contiguous; all others have neighbouring elements in
the last dimension and free strides before it, where no more is said. T = 0 is fine everywhere. All
of it is for inference: no gradient is recorded, and the functionals refuse tensors that ask for one
or carry a tangent.

No two elements of what is written may be one in memory, nor may another argument hold any; columns
of one buffer side by side, as those of a fused projection, are apart.

A wrong argument raises RuntimeError that names the op, the argument, what it has and what was
expected (an ``eps`` is finite and not negative, a ``scale`` finite); Python and torch raise errors
of their own where it is of another type, or a sparse tensor. What only the device knows (tokens,
rows, pages, positions) is not waited for: each op says what comes of values that cannot be, and
none of them reads or writes outside its tensors. ``photon_ext.reference`` has every op in plain
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from photon_ext import _C, _fake, _library  # noqa: F401  _library loads what torch.ops.photon_ext needs
from photon_ext.errors import shown
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.layout import LINK_COLUMNS, LINK_SPARE, ROW_COLUMNS
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

if TYPE_CHECKING:
    from photon_ext.row_params import RowParams

_NAMES = (
    "begin_step_",
    "carry_over_ids_",
    "decode_meta_set_",
    "publish_",
    "apply_token_mask_",
    "sample_into",
    "embedding_into",
    "select_tokens_into",
    "rms_norm_into",
    "add_rms_norm_into",
    "linear_into",
    "gemv_into",
    "silu_mul_into",
    "fused_mlp_into",
    "norm_linear_into",
    "linear_residual_",
    "norm_swiglu_into",
    "swiglu_into",
    "linear_norm_into",
    "dequantize_into",
    "quantize_fp8_into",
    "lora_shrink_into",
    "lora_expand_",
    "lora_link_",
    "spatial_features_into",
    "choose_value_",
    "rope_append_kv_",
    "chunk_plan_into",
    "paged_attention_into",
    "fused_attention_decode_into",
)
_fake.register(_NAMES)
# Overloads, resolved once: a call through the packet looks the overload up again each time.
_op = {name: getattr(torch.ops.photon_ext, name).default for name in _NAMES}
_begin_step = _op["begin_step_"]
_carry_over_ids = _op["carry_over_ids_"]
_decode_meta_set = _op["decode_meta_set_"]
_publish = _op["publish_"]
_apply_token_mask = _op["apply_token_mask_"]
_sample = _op["sample_into"]
_embedding = _op["embedding_into"]
_select_tokens = _op["select_tokens_into"]
_rms_norm = _op["rms_norm_into"]
_add_rms_norm = _op["add_rms_norm_into"]
_linear = _op["linear_into"]
_gemv = _op["gemv_into"]
_silu_mul = _op["silu_mul_into"]
_fused_mlp = _op["fused_mlp_into"]
_norm_linear = _op["norm_linear_into"]
_linear_residual = _op["linear_residual_"]
_norm_swiglu = _op["norm_swiglu_into"]
_swiglu = _op["swiglu_into"]
_linear_norm = _op["linear_norm_into"]
_dequantize = _op["dequantize_into"]
_quantize_fp8 = _op["quantize_fp8_into"]
_lora_shrink = _op["lora_shrink_into"]
_lora_expand = _op["lora_expand_"]
_lora_link = _op["lora_link_"]
_spatial_features = _op["spatial_features_into"]
_choose_value = _op["choose_value_"]
_rope_append_kv = _op["rope_append_kv_"]
_chunk_plan = _op["chunk_plan_into"]
_paged_attention = _op["paged_attention_into"]
_fused_attention_decode = _op["fused_attention_decode_into"]


def _stored(weight: Tensor | Weight) -> tuple[Tensor, tuple[Tensor | int | None, ...]]:
    """The numbers of a weight, and what ops are given of it at their end."""
    if isinstance(weight, Tensor):
        return weight, ()
    if not isinstance(weight, Weight) or not isinstance(weight.format, WeightFormat):
        given = getattr(weight, "format", weight)
        raise TypeError(
            f"a weight is {shown(given)}, expected a tensor, or a photon_ext.Weight with a "
            "WeightFormat"
        )
    return weight.data, (weight.scale, weight.format.code, weight.zero, weight.divisor)


def _tokens(x: Tensor | Fp8Tokens) -> tuple[Tensor, Tensor | None]:
    """What linears are given of tokens: in fp8 also their scales."""
    return x if isinstance(x, Fp8Tokens) else (x, None)


def _weight_tensors(weight: Tensor | Weight) -> Iterator[Tensor]:
    """All that it is made of."""
    yield from weight.tensors() if isinstance(weight, Weight) else (weight,)


def _named_tensors(arguments: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a call's arguments, those of a list by their place in it."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))


def _negation_refused(name: str) -> Callable[..., None]:
    """For views whose memory holds the negative of their values: torch would copy them for the
    call, and back in vain.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        given = {
            **dict(
                zip((argument.name for argument in _op[name]._schema.arguments), args, strict=False)
            ),
            **kwargs,
        }
        found = next(name for name, tensor in _named_tensors(given) if tensor.is_neg())
        raise RuntimeError(
            f"{name}: {found} is a negated view, expected plain memory; pass a copy, "
            f"{found}.resolve_neg()"
        )

    return refuse


_rules = torch.library.Library("photon_ext", "FRAGMENT")
for _name in _NAMES:
    _rules.impl(_name, _negation_refused(_name), "Negative")


def _refuse_gradients(op: str, *inputs: Tensor | None) -> None:
    if forward_ad._current_level >= 0 and any(
        tensor is not None and _has_tangent(tensor) for tensor in inputs
    ):
        raise RuntimeError(
            f"{op}: an input has a tangent (forward-mode AD), and the result would have none; pass "
            "its detach()"
        )
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    ):
        raise RuntimeError(
            f"{op}: an input requires grad, and no gradient would be recorded; call it under "
            "torch.no_grad(), or detach()"
        )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _size(x: Tensor, dim: int) -> int:
    """Of a dimension that x may lack: a functional variant makes a result all the same, and
    leaves it to the op's checks to say what is wrong.
    """
    return x.shape[dim] if dim < x.dim() else 0


# --- step: the head and the tail ------------------------------------------------------------------


def begin_step_(
    tables: Sequence[Tensor],
    deltas: Tensor,
    segments: Tensor,
    staged_ids: Tensor,
    decode_meta: Tensor,
    counts: Tensor,
) -> None:
    """The head of a step: applies host deltas to the tables, carries tokens over, and fills
    decode_meta.

    A live row whose segment cannot be fed ends here: alive becomes 0, all tokens of the segment are
    dead. That is so where a staged id was consumed or never written, where the segment has no
    tokens or tokens outside decode_meta, and where a row that is to carry its last token over has
    more than one token, or positions would leave int32. Nothing of such a row is sampled, and
    :func:`publish_` marks it as dead instead of advancing it: a host that believes it alive learns
    that its tables are corrupt. Row 0 and rows outside the tables are dead.

    Segments must not overlap: no two of them name the same live row, or have a token in common.
    What overlapping ones give is undefined, and differs from device to device.

    Args:
        tables: three to eight device tables of the rows, all updated by the deltas: row_state int32
            [rows, 32], whose rows end where they cannot be fed; page_table int32 [rows, pages per
            row]; stop_ids int32 [rows, stop ids per row]; then extension tables, int32 [rows, words
            of a row] each, the first of which are those of layout.DeltaTable: staged tokens of the
            answers of rows with penalties are counted in TOKEN_COUNTS, and get a bit in SEEN_BITS.
        deltas: int32 [words], at least 4. Word 0 counts the runs and is zeroed; run i is words 4 +
            4i...: (table, offset, count, first payload word), where table is a place in tables
            (layout.DeltaTable names the first three), offset and count are words of it, and payload
            words are counted from the begin of deltas; a first payload word of -1 writes zeros.
            Runs must not overlap. A run that does not
            fit its table or this buffer is skipped.
        segments: int32 [R, 4]; with STAGED a segment's tokens are the staged_ids of its tokens,
            else its row's last token.
        staged_ids: int32 [T]; an id that is read is replaced by the mark of "no token"
            (layout.NO_TOKEN, -2**31).
        decode_meta: int32 [T, 4], written whole: (token, position, position + 1, row) for live
            tokens, zeros for dead ones.
        counts: int32 [3], written: 1 + the last live token that was carried over, 1 + the last live
            token, 1 + the last segment that is to be sampled and whose tokens are alive; see
            layout.Count.
    """
    _begin_step(tables, deltas, segments, staged_ids, decode_meta, counts)


def carry_over_ids_(next_ids: Tensor, prev: Tensor, idx: Tensor) -> None:
    """``next_ids[i] = prev[idx[i]]`` where idx[i] is an index of prev; elsewhere next_ids[i] stays.

    Stand-alone carry-over for engines with their own batches, which may shrink, grow and change
    order between two steps.

    Args:
        next_ids: int32 [n], updated.
        prev: int32 [m], the tokens sampled by the previous step; may be empty.
        idx: int32 [n], the place in the previous step's batch, or -1.
    """
    _carry_over_ids(next_ids, prev, idx)


def decode_meta_set_(
    decode_meta: Tensor, tokens: Tensor, positions: Tensor, rows: Tensor | None = None
) -> None:
    """Fills decode_meta without a RowTable: one token a token.

    Args:
        decode_meta: int32 [n, 4], written.
        tokens: int32 [n].
        positions: int32 [n]; below 0, or 2**31 - 1, makes a dead token.
        rows: int32 [n]; None: token i belongs to row i.
    """
    _decode_meta_set(decode_meta, tokens, positions, rows)


def publish_(
    tables: Sequence[Tensor],
    out_record: Tensor,
    sampled: Tensor,
    segments: Tensor,
    row_errors: Tensor | None = None,
    automata: Tensor | None = None,
) -> None:
    """The tail of a step: advances the rows, decides stops and caps, and writes what the host will
    read.

    The record of a row that is dead, or outside the tables, says so (RecordFlag.DEAD), and nothing
    else happens to it.

    Args:
        tables: as in :func:`begin_step_`. row_state is updated: last token, position, remaining,
            alive; and TOKEN_COUNTS and SEEN_BITS, if they are there, of rows with penalties.
        out_record: int32 [R, W >= 5], written: (row, generation, n_tokens, flags, tokens...,
            -1...); flags are layout.RecordFlag.
        sampled: int32 [R]; below 0: nothing was sampled, which ends a row that was to be sampled.
        segments: int32 [R, 4].
        row_errors: int32 [R] of record flags; not 0 ends the row. None: no errors.
        automata: int32 [words], as in :func:`sample_into`. The state of a row with an automaton
            moves on; the row ends where nothing may follow its token (RecordFlag.COMPLETE), and
            where the automaton does not allow it, which takes no token (AUTOMATON_ERROR). A stop
            id is not shown to the automaton.
    """
    _publish(tables, out_record, sampled, segments, row_errors, automata)


# --- sampling -------------------------------------------------------------------------------------


def apply_token_mask_(
    logits: Tensor,
    mask: Tensor,
    mask_keys: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor,
) -> None:
    """Makes the logits of disallowed ids -inf, where a segment's key is for its very row and
    position and names the place of a mask; else marks the row's error.

    Segments that are dead or not to be sampled stay as they are, and so does one without a mask
    whose row asks for none.

    Args:
        logits: [R, vocab], updated.
        mask: int32 [masks, >= ceil(vocab / 32)]; bit (id & 31) of word (id >> 5) set: id is
            allowed.
        mask_keys: int32 [R, 3], (row, position of the sampled token, place of its mask in `mask`);
            row 0: no mask.
        segments: int32 [R, 4].
        row_state: int32 [rows, 32].
        row_errors: int32 [R], written: 0, or RecordFlag.MASK_ERROR: the key is foreign, its place
            is none of `mask`, or it is missing where row_state asks for one.
    """
    _apply_token_mask(logits, mask, mask_keys, segments, row_state, row_errors)


def sample_into(
    out: Tensor,
    logits: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor | None = None,
    hopper: bool = False,
    tables: Sequence[Tensor] | None = None,
    logprobs: Tensor | None = None,
    automata: Tensor | None = None,
) -> None:
    """One token a segment: greedy (ties to the lowest id) or, as the row's parameters say,
    Gumbel-max with noise keyed by (seed, position, id), over the ids that the row's
    filters keep (see :func:`photon_ext.reference.kept_ids`), by logits with the row's biases and
    penalties (see :func:`photon_ext.reference.adjusted`).

    NaN and -inf are never chosen. Segments that are dead, not to be sampled, or in error get -1; so
    do those without any candidate, which are marked in row_errors. The noise is of Philox4x32-10,
    see :func:`photon_ext.reference.token_uniforms`.

    Args:
        out: int32 [R], written.
        logits: [R, vocab]; those of stop ids that a row may not sample yet become -inf.
        segments: int32 [R, 4].
        row_state: int32 [rows, 32]: sampling parameters and position. Without a Pipeline:
            :func:`row_state`.
        row_errors: int32 [R], updated: not 0 is in error; RecordFlag.NO_CANDIDATE is added. None:
            no errors in or out.
        hopper: on GPUs that run the Hopper kernels (hopper_runs) a cluster of blocks shares a row.
            The token is the same.
        tables: as in :func:`begin_step_`, for what rows keep outside of row_state: stop ids, which
            a row below its smallest number of tokens may not sample; biases, and the counts and
            seen bits of penalties. None: rows have none of them.
        logprobs: int32 [R, 1 + 2 n], written for segments that are sampled and whose rows ask for
            it: the bits of the float32 log-probability of the sampled id, then the n likeliest ids
            that the row asks for, 20 at most, in order (ties by id), each with the bits of its own;
            id -1: there are no more. Of the logits as they are given: without biases, penalties,
            scaling, filters, but with what a mask has made of them; or, as the row says, with
            all but filters. None: none are wanted.
        automata: int32 [words], the vocabulary and the automata of all rows (layout.VocabularyWord
            and layout.AutomatonWord). Logits that the state of a row's automaton forbids become
            -inf before all else; a row whose automaton is none is not sampled. None: rows have
            none.
    """
    _sample(out, logits, segments, row_state, row_errors, hopper, tables, logprobs, automata)


def sample(
    logits: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor | None = None,
    hopper: bool = False,
    tables: Sequence[Tensor] | None = None,
    logprobs: Tensor | None = None,
) -> Tensor:
    """:func:`sample_into` a new int32 [R]."""
    out = torch.empty(_size(logits, 0), dtype=torch.int32, device=logits.device)
    _sample(out, logits, segments, row_state, row_errors, hopper, tables, logprobs)
    return out


def row_state(
    params: Sequence[RowParams],
    positions: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The words of live rows, for ops without a Pipeline, which writes its own. Row 0 is padding,
    and row i + 1 has ``params[i]``.

    A row's stop ids, biases and counts stand in other tables (see :func:`begin_step_`). Parameters
    without a seed get a new one.

    Args:
        params: of each row.
        positions: of the first token of each row's segment. The noise of what is sampled depends on
            the last one's, so that a loop gives new words for each step, or lets :func:`publish_`
            count. None: 0.

    Returns:
        int32 [1 + len(params), 32], see :class:`photon_ext.layout.RowColumn`.

    Raises:
        ValueError: there are not as many positions as rows.
    """
    from photon_ext.row_words import row_words

    begins = [0] * len(params) if positions is None else list(positions)
    if len(begins) != len(params):
        raise ValueError(
            f"row_state: {len(begins)} positions for {len(params)} rows; give one for each"
        )
    rows = [row_words(one, 1, at) for one, at in zip(params, begins, strict=True)]
    return torch.tensor([[0] * ROW_COLUMNS, *rows], dtype=torch.int32, device=device)


# --- embedding ------------------------------------------------------------------------------------


def embedding_into(
    out: Tensor, decode_meta: Tensor, weight: Tensor | Weight, embeds: Tensor | None = None
) -> None:
    """``out[t] = weight[token of token t]``, or ``embeds[i]`` where the token is -2 - i; zeros for
    dead tokens and for ids of neither.

    Args:
        out: [T, hidden], written.
        decode_meta: int32 [T, 4].
        weight: [vocab, hidden], contiguous, of the dtype of out, or a :class:`photon_ext.Weight`.
        embeds: [embeddings, hidden], contiguous, of the dtype of out; None: there are none.
    """
    numbers, stored = _stored(weight)
    _embedding(out, decode_meta, numbers, embeds, *stored)


def embedding(decode_meta: Tensor, weight: Tensor, embeds: Tensor | None = None) -> Tensor:
    """:func:`embedding_into` a new [T, hidden]."""
    _refuse_gradients("embedding", weight, embeds)
    out = weight.new_empty(_size(decode_meta, 0), _size(weight, 1))
    _embedding(out, decode_meta, weight, embeds)
    return out


def select_tokens_into(out: Tensor, x: Tensor, segments: Tensor) -> None:
    """``out[r] = x[last token of segment r]``: what the lm head needs of a step; zeros where x has
    no such token.

    Args:
        out: [R, hidden], written.
        x: [T, hidden].
        segments: int32 [R, 4].
    """
    _select_tokens(out, x, segments)


def select_tokens(x: Tensor, segments: Tensor) -> Tensor:
    """:func:`select_tokens_into` a new [R, hidden]."""
    _refuse_gradients("select_tokens", x)
    out = x.new_empty(_size(segments, 0), _size(x, 1))
    _select_tokens(out, x, segments)
    return out


# --- norm -----------------------------------------------------------------------------------------


def rms_norm_into(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = weight * round(x * rsqrt(mean(x²) + eps))``, in float32 up to the rounding to the
    dtype (the order of HF's Llama).

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        out: [T, hidden], written.
        x: [T, hidden].
        weight: [hidden].
        eps: added to the mean square.
    """
    _rms_norm(out, x, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm_into` a new [T, hidden]."""
    _refuse_gradients("rms_norm", x, weight)
    out = torch.empty_like(x)
    _rms_norm(out, x, weight, eps)
    return out


def add_rms_norm_into(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x`` (rounded to the dtype), then :func:`rms_norm_into` of the sum.

    Args:
        out: [T, hidden], written.
        residual: [T, hidden], updated.
        x: [T, hidden].
        weight: [hidden].
        eps: added to the mean square.
    """
    _add_rms_norm(out, residual, x, weight, eps)


# --- linear and mlp -------------------------------------------------------------------------------


def linear_into(
    out: Tensor,
    x: Tensor | Fp8Tokens,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
) -> None:
    """``out = x @ weight.T + bias``, summed in float32 in an order that depends on k alone; with
    `hopper` on T, n and k, never on other tokens.

    Args:
        out: [T, n], written.
        x: [T, k]; or in fp8, as :func:`quantize_fp8_into` makes it: then the dtype of the call is
            that of out. GPUs read it with `hopper` alone, in the kernels for a batch, by a weight
            in fp8 with a scale for each row or block of 128 x 128; a CPU by any weight.
        weight: [n, k], of the dtype of x, or a :class:`photon_ext.Weight`, whose numbers are
            rounded to float32 and multiplied as such. Hopper kernels read those in fp8, int4 and
            int8, whose numbers they round to bfloat16 where x is not in fp8.
        bias: [n], or None.
        counts: int32 [1 or more], its first element the number of leading tokens to compute, which
            the op reads on the device; below 0 is none, above T is all. The other tokens of out
            keep what they hold. None: all.
        hopper: asks for the kernels for a batch of tokens, where the device runs Hopper kernels,
            the dtype is bfloat16, k is a multiple of 64 (fp8: 128; int4: 256) and n of 8, and
            pointers and strides are whole 16-byte vectors.
        pdl: as in :func:`norm_linear_into`.
    """
    (x, x_scale), (numbers, stored) = _tokens(x), _stored(weight)
    _linear(out, x, numbers, bias, counts, hopper, pdl, *stored, x_scale=x_scale)


def linear(
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """:func:`linear_into` a new [T, n]."""
    numbers, _ = _stored(weight)
    _refuse_gradients("linear", x, *_weight_tensors(weight), bias)
    out = x.new_empty(_size(x, 0), _size(numbers, 0))
    linear_into(out, x, weight, bias)
    return out


def gemv_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
) -> None:
    """:func:`linear_into` of one token: x [k], weight [n, k], bias [n] or None, out [n],
    written; `weight` as there.
    """
    numbers, stored = _stored(weight)
    _gemv(out, x, numbers, bias, *stored)


def dequantize_into(out: Tensor, weight: Weight) -> None:
    """``out = `` the numbers of a weight of few bits, rounded to float32 and then to the dtype of
    out: for products of many tokens by another kernel.

    Args:
        out: [n, k], written.
        weight: [n, k], not dense.
    """
    numbers, stored = _stored(weight)
    _dequantize(out, numbers, *stored)


def quantize_fp8_into(out: Fp8Tokens, x: Tensor, counts: Tensor | None = None) -> None:
    """Each token of x in fp8, for linears: divided by its scale, which is its largest magnitude by
    448, and rounded to the nearest e4m3 number. A token of zeros has the scale 0. One with a NaN or
    an infinity has that for a scale, so that none of its products is finite.

    Args:
        out: written.
        x: [T, k].
        counts: as in :func:`linear_into`.
    """
    if not isinstance(out, Fp8Tokens):
        told = f"quantize_fp8_into: out is a {type(out).__name__}; give Fp8Tokens(data, scale)"
        raise TypeError(told)
    _quantize_fp8(out.data, out.scale, x, counts)


def silu_mul_into(out: Tensor, gate_up: Tensor) -> None:
    """``out = round(silu(gate)) * up``, where gate_up is [T, 2 * width] (gate, then up) and out
    is [T, width].
    """
    _silu_mul(out, gate_up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """:func:`silu_mul_into` a new [T, width]."""
    _refuse_gradients("silu_mul", gate_up)
    out = gate_up.new_empty(_size(gate_up, 0), _size(gate_up, 1) // 2)
    _silu_mul(out, gate_up)
    return out


def fused_mlp_into(
    out: Tensor,
    act: Tensor,
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    counts: Tensor | None = None,
) -> None:
    """The gated MLP: ``act = silu_mul(x @ gate_up_weight.T)``, ``out = act @ down_weight.T``; gate
    and up are rounded to the dtype.

    Args:
        out: [T, hidden], written.
        act: [T, intermediate], scratch, written.
        x: [T, hidden].
        gate_up_weight: [2 * intermediate, hidden], gate rows first; contiguous.
        down_weight: [hidden, intermediate], contiguous.
        counts: as in :func:`linear_into`.
    """
    _fused_mlp(out, act, x, gate_up_weight, down_weight, counts)


def fused_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """:func:`fused_mlp_into` a new [T, hidden]."""
    _refuse_gradients("fused_mlp", x, gate_up_weight, down_weight)
    out = torch.empty_like(x)
    act = x.new_empty(_size(x, 0), _size(down_weight, 1))
    _fused_mlp(out, act, x, gate_up_weight, down_weight, None)
    return out


# --- fused linears: a linear with what comes before or after it in a layer ------------------------


def norm_linear_into(
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """``out = rms_norm(x, norm_weight, eps) @ weight.T + bias``. Without `hopper`: the bits of
    :func:`rms_norm_into` and :func:`linear_into`.

    Args:
        out: [T, n], written.
        x: [T, k].
        norm_weight: [k].
        eps: added to the mean square.
        weight: [n, k].
        bias: [n], or None.
        counts: as in :func:`linear_into`.
        hopper: bfloat16 runs the kernels made for Hopper, on GPUs that run them (hopper_runs),
            where k is a multiple of 64, up to 16384 where x is normalized, and pointers and row
            strides are multiples of 16 bytes. They sum in another order and apply the norm's scale
            to the sum; a token's result never depends on the other tokens, nor on their number.
            Elsewhere the portable kernel runs.
        pdl: a Hopper kernel may start while kernels before it in the stream still run, and read its
            weights (norm_weight, weight) and the counts: none of them may write these, back to and
            including the last one that was not itself launched early, or to the last
            :func:`embedding_into` or :func:`select_tokens_into`, behind which all before have
            ended. A chain of such kernels hides their starts ("programmatic dependent launch", CUDA
            Programming Guide).
        workspace: float32 [words], contiguous, at least :func:`linear_workspace_words` of this
            call's shapes; what it holds before and after means nothing. With it, more than 64
            tokens (of weights in fp8, int4 or int8, more than 16) have a Hopper kernel of their
            own, with the same bits. None: the weights are read again for each 64 (16) tokens.
    """
    numbers, stored = _stored(weight)
    _norm_linear(out, x, norm_weight, eps, numbers, bias, counts, hopper, pdl, workspace, *stored)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    *,
    hopper: bool = False,
) -> Tensor:
    """:func:`norm_linear_into` a new [T, n]."""
    numbers, _ = _stored(weight)
    _refuse_gradients("norm_linear", x, norm_weight, *_weight_tensors(weight), bias)
    out = x.new_empty(_size(x, 0), _size(numbers, 0))
    norm_linear_into(out, x, norm_weight, eps, weight, bias, None, hopper)
    return out


def linear_residual_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """``residual += x @ weight.T + bias``: the product is rounded, then the sum. Without `hopper`,
    it has the bits of :func:`linear_into`.

    Args:
        residual: [T, n], updated.
        x: [T, k].
        weight: [n, k].
        bias: [n], or None.
        counts: as in :func:`linear_into`.
        hopper, pdl, workspace: as in :func:`norm_linear_into`; for `hopper`, n is a multiple of 8,
            and a dense weight needs no workspace.
    """
    numbers, stored = _stored(weight)
    _linear_residual(residual, x, numbers, bias, counts, hopper, pdl, workspace, *stored)


def norm_swiglu_into(
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """``out = silu(h @ gate.T) * (h @ up.T)`` where ``h = rms_norm(x, norm_weight, eps)``: the
    first half of a gated MLP.

    Without `hopper`, the bits are those of :func:`rms_norm_into`, :func:`linear_into` and
    :func:`silu_mul_into`: h, gate and up are rounded to the dtype (Shazeer, "GLU Variants Improve
    Transformer", 2020).

    Args:
        out: [T, intermediate], written.
        x: [T, hidden].
        norm_weight: [hidden].
        eps: added to the mean square.
        gate_up_weight: [2 * intermediate, hidden], gate rows first; contiguous.
        bias: [2 * intermediate], the gate's first, or None.
        counts: as in :func:`linear_into`.
        hopper, pdl, workspace: as in :func:`norm_linear_into`, k being hidden.
    """
    numbers, stored = _stored(gate_up_weight)
    _norm_swiglu(
        out,
        x,
        norm_weight,
        eps,
        numbers,
        bias,
        counts,
        hopper,
        pdl,
        workspace,
        *stored,
    )


def norm_swiglu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    *,
    hopper: bool = False,
) -> Tensor:
    """:func:`norm_swiglu_into` a new [T, intermediate]."""
    numbers, _ = _stored(gate_up_weight)
    _refuse_gradients("norm_swiglu", x, norm_weight, *_weight_tensors(gate_up_weight), bias)
    out = x.new_empty(_size(x, 0), _size(numbers, 0) // 2)
    norm_swiglu_into(out, x, norm_weight, eps, gate_up_weight, bias, None, hopper)
    return out


def swiglu_into(
    out: Tensor,
    x: Tensor | Fp8Tokens,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
) -> None:
    """``out = silu(x @ gate.T) * (x @ up.T)``. Without `hopper`, the bits are those of
    :func:`linear_into` and :func:`silu_mul_into`: gate and up are rounded to the dtype.

    Args:
        out: [T, intermediate], written.
        x: [T, hidden], or in fp8, as in :func:`linear_into`.
        gate_up_weight: [2 * intermediate, hidden], gate rows first; contiguous.
        bias: [2 * intermediate], the gate's first, or None.
        counts: as in :func:`linear_into`.
        hopper, pdl: as in :func:`linear_into`, n being intermediate.
    """
    (x, x_scale), (numbers, stored) = _tokens(x), _stored(gate_up_weight)
    _swiglu(out, x, numbers, bias, counts, hopper, pdl, *stored, x_scale=x_scale)


def linear_norm_into(
    out: Tensor | Fp8Tokens,
    residual: Tensor,
    x: Tensor | Fp8Tokens,
    weight: Tensor | Weight,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """``residual += x @ weight.T + bias``, the product rounded first, then ``out =
    rms_norm(residual, norm_weight, eps)``. Without `hopper`, the bits are those of
    :func:`linear_residual_` and :func:`rms_norm_into`.

    Args:
        out: [T, n], written; where x is in fp8 it may be so, too, as :func:`quantize_fp8_into`
            makes it of what is normalized.
        residual: [T, n], updated.
        x: [T, k], or in fp8, as in :func:`linear_into`.
        weight: [n, k].
        norm_weight: [n].
        eps: added to the mean square.
        bias: [n], or None.
        counts: as in :func:`linear_into`.
        hopper, pdl: as in :func:`linear_into`; for `hopper`, n is at most 16384, and there is a
            workspace.
        workspace: float32 [words], contiguous, at least :func:`linear_norm_workspace_words` of
            this call's shapes; written.
    """
    (out, out_scale), (x, x_scale) = _tokens(out), _tokens(x)
    numbers, stored = _stored(weight)
    _linear_norm(
        out,
        residual,
        x,
        numbers,
        norm_weight,
        eps,
        bias,
        counts,
        hopper,
        pdl,
        workspace,
        *stored,
        x_scale=x_scale,
        out_scale=out_scale,
    )


def linear_norm_workspace_words(num_tokens: int, n: int) -> int:
    """Words of the workspace that :func:`linear_norm_into` uses for up to `num_tokens` tokens of
    `n` outputs: the sums of up to four parts of the columns.

    ValueError: one of them is negative.
    """
    if min(num_tokens, n) < 0:
        raise ValueError(
            f"linear_norm_workspace_words: tokens {num_tokens}, n {n}; neither may be negative"
        )
    return _C.linear_norm_workspace_words(num_tokens, n)


def linear_workspace_words(num_tokens: int, k: int) -> int:
    """Words of the workspace that :func:`norm_linear_into`, :func:`norm_swiglu_into` and
    :func:`linear_residual_` use for up to `num_tokens` tokens of `k` values
    (csrc/common/linear_plan.h: what for).

    ValueError: one of them is negative.
    """
    if min(num_tokens, k) < 0:
        raise ValueError(
            f"linear_workspace_words: tokens {num_tokens}, k {k}; neither may be negative"
        )
    return _C.linear_workspace_words(num_tokens, k)


# --- lora: adapters, chosen by each token's row ---------------------------------------------------


def lora_shrink_into(
    out: Tensor, x: Tensor, a: Tensor, decode_meta: Tensor, row_state: Tensor
) -> None:
    """``out[t] = a[slot - 1] @ x[t]``, where slot is the LORA_SLOT of token t's row: the first half
    of an adapter (Hu et al., "LoRA", 2021). Tokens of slot 0, dead ones, and those whose row or
    slot cannot be keep what out holds.

    Args:
        out: [T, rows], written.
        x: [T, k].
        a: [slots, rows, k]; the rows of several parts, one below the other.
        decode_meta: int32 [T, 4].
        row_state: int32 [rows of the table, 32].
    """
    _lora_shrink(out, x, a, decode_meta, row_state)


def lora_shrink(x: Tensor, a: Tensor, decode_meta: Tensor, row_state: Tensor) -> Tensor:
    """:func:`lora_shrink_into` a new [T, rows], which is zero where no adapter is."""
    _refuse_gradients("lora_shrink", x, a)
    out = x.new_zeros(_size(x, 0), _size(a, 1))
    _lora_shrink(out, x, a, decode_meta, row_state)
    return out


def lora_expand_(
    out: Tensor,
    h: Tensor,
    b: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    first_rows: int,
) -> None:
    """``out[t] += b[slot - 1] @ h[t]``, the second half of an adapter: the product is rounded, then
    the sum. Tokens without an adapter, as in :func:`lora_shrink_into`, keep what out holds.

    Args:
        out: [T, n], updated.
        h: [T, parts * rank]: of each part of a fused projection its own `rank` values.
        b: [slots, n, rank]: the rows of the first part, then of the others.
        decode_meta: int32 [T, 4].
        row_state: int32 [rows of the table, 32].
        first_rows: rows of the first part; the others have equal shares of the rest. n where there
            is one part.
    """
    _lora_expand(out, h, b, decode_meta, row_state, first_rows)


def lora_expand(
    out: Tensor,
    h: Tensor,
    b: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    first_rows: int,
) -> Tensor:
    """:func:`lora_expand_` on a copy of `out`, which is returned."""
    _refuse_gradients("lora_expand", out, h, b)
    total = out.clone()
    _lora_expand(total, h, b, decode_meta, row_state, first_rows)
    return total


def lora_link_(
    x: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    before: Tensor | None = None,
    b: Tensor | None = None,
    first_rows: int = 0,
    eps: float | None = None,
    act: Tensor | None = None,
    after: Tensor | None = None,
    a: Tensor | None = None,
    norm_weight: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The second half of an adapter of one linear and the first half of that of the next, in one
    kernel: ``x[t] += b[slot - 1] @ h[t]``, then ``act = silu_mul(x)``, then the sums of
    ``a[slot - 1] @ act[t]``, or of x where there is no act. Each of the three may be left out.

    What passes from one call to the next are sums over 256 columns each, float32 [chunks, T,
    rows + 4], as :func:`lora_link_sums` says; the last four columns hold the part of the mean
    square, where x is to be normalized, and padding. h is what they add up to, rounded. Tokens
    without an adapter, as in :func:`lora_shrink_into`, keep what x holds, and their sums are not
    written. All widths and ranks are multiples of 8, and all rows whole 16-byte vectors.

    Args:
        x: bfloat16 [T, n], updated; where `act` is given, it is read alone.
        decode_meta: int32 [T, 4].
        row_state: int32 [rows of the table, 32].
        before: [chunks, T, parts * rank + 4], the sums that belong to b; None: x is as it is to be.
        b: bfloat16 [slots, n, rank], as in :func:`lora_expand_`, without gaps in a slot.
        first_rows: as in :func:`lora_expand_`, if there is a b.
        eps: h is multiplied by ``1 / sqrt(mean square + eps)``. None: it is not.
        act: bfloat16 [T, n / 2], written: of all tokens, also those without an adapter.
        after: [chunks, T, rows + 4], written; None: nothing follows.
        a: bfloat16 [slots, rows, n] or [slots, rows, n / 2], without gaps in a slot.
        norm_weight: [columns of a]: what is multiplied by a is multiplied by this first, and
            rounded, and the mean square is left.
        pdl: as in :func:`norm_linear_into`, on GPUs of compute capability 9.0 and above; what is
            read early is a, b, norm_weight, decode_meta and row_state.
    """
    ended, begun = (before, b, first_rows, eps), (after, a, norm_weight)
    _lora_link(x, decode_meta, row_state, *ended, act, *begun, pdl)


def lora_link_sums(num_tokens: int, rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of the sums of :func:`lora_link_` with an a of `rows` rows, `columns` columns."""
    return -(-columns // LINK_COLUMNS), num_tokens, rows + LINK_SPARE


# --- spatial: values of objects in the place of tokens --------------------------------------------


def spatial_features_into(
    out: Tensor, decode_meta: Tensor, coordinate: Tensor, size: Tensor, vocab: int, bins: int
) -> None:
    """Fourier features of the tokens that are values of a spatial answer (Tancik et al., "Fourier
    Features Let Networks Learn High Frequency Functions in Low Dimensional Domains", 2020); zeros
    for all other tokens.

    Token vocab + b is the coordinate b / bins, for b below bins; vocab + bins + w * bins + h is the
    size of the sides 2 ** (10 * w / (bins - 1) - 10) and, likewise, of h.

    Args:
        out: [T, width], written: cosines, then sines of a coordinate; cosines, then sines of a
            size; 1 for a coordinate; 1 for a size; zeros.
        decode_meta: int32 [T, 4].
        coordinate: float32 [n]: how many turns each wave makes from 0 to 1.
        size: float32 [2, m]: those of the two sides, whose angles are added.
        vocab: token ids below it are of text.
        bins: how many coordinates there are, from 2 on.
    """
    _spatial_features(out, decode_meta, coordinate, size, vocab, bins)


def choose_value_(
    sampled: Tensor, logits: Tensor, segments: Tensor, tables: Sequence[Tensor], vocab: int
) -> None:
    """Takes the likeliest value in the place of what was sampled, for rows with OBJECT_VALUES. An
    object's values come in turn: x, y, and where it has three its size. Where the next object would
    begin, a sampled stop id stays, and ends the row.

    Args:
        sampled: int32 [R], updated: ids of values as :func:`spatial_features_into` reads them; -1
            where all of a value's logits are NaN or -inf.
        logits: [R, 3 * bins]: of coordinates, widths and heights; ties go to the lowest.
        segments: int32 [R, 4].
        tables: the device tables; row_state and stop_ids are read.
        vocab: the id of the first value.
    """
    _choose_value(sampled, logits, segments, tables, vocab)


# --- attention ------------------------------------------------------------------------------------


def rope_append_kv_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    counts: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> None:
    """Rotates q in place, and writes rotated k and plain v to each live token's place in the row's
    pages.

    The rotation pairs element i with i + head_dim / 2 (HF's Llama; Su et al., "RoFormer", 2021), in
    float32. With `kv_scale` keys and values are stored in fp8: each head of a token, rounded to the
    dtype of q first, is divided by a scale of its own, its largest magnitude / 448.

    A token's place is its position in the pages of its row. A token that is dead, or whose position
    is beyond the cos/sin tables, is left as it is; one whose row, position or page its tables do
    not have is rotated and writes no key or value.

    Args:
        q: [T, q heads, head_dim], updated; head_dim even, 2 to 256.
        k: [T, kv heads, head_dim].
        v: [T, kv heads, head_dim].
        k_cache: [pages, page size, kv heads, head_dim], updated. A contiguous [B, H, L, D] cache is
            ``cache.transpose(1, 2)``.
        v_cache: like k_cache, updated.
        decode_meta: int32 [T, 4].
        page_table: int32 [rows, pages per row]; an entry below 0 (the runtime writes -1) or beyond
            the cache's pages is none. None: a row's only page is the row's index.
        cos: float32 [positions, head_dim], the base of the table: a token reads its own position's
            entry. Both halves repeat.
        sin: like cos.
        q_norm: [head_dim]: RMS norm of each q head before the rotation (Qwen3), or None.
        k_norm: [head_dim], or None.
        eps: of the norms.
        counts: int32, at least one element: the step's counts; the first is the number of
            leading decode tokens. Tokens from it on are not this call's: their out stays as it is,
            and they write no key or value. The portable kernel runs then; the Hopper one takes the
            decode tokens alone, as slices. None: all T tokens are this call's.
        kv_scale: float32 [pages, 2, kv heads, page size], contiguous, updated: the scales of
            caches in float8_e4m3fn, of keys and then of values; for a contiguous [B, H, L, D]
            cache that is [B, 2, H, L]. None: caches are of the dtype of q.
    """
    _rope_append_kv(
        *(q, k, v, k_cache, v_cache, decode_meta, page_table, cos, sin, q_norm, k_norm, eps),
        *(counts, kv_scale),
    )


def chunk_plan_into(
    plan: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    workspace: Tensor,
    counts: Tensor | None = None,
    kv_scale: Tensor | None = None,
    exact: bool = False,
) -> None:
    """How :func:`paged_attention_into` with `hopper` and a workspace deals the work of a step to
    all SMs: once a step, for the attention of all its layers.

    It is the same in each layer, because it follows from the lengths of the step's tokens, which
    the device alone knows. Where that kernel does not run, nothing is written.

    Args:
        plan: int32 [words], contiguous, written; at least :func:`chunk_plan_words` of T tokens and
            of as many CTAs as the workspace is for, and of `exact`. What it holds is the kernels'
            own.
        q: [T, q heads, head_dim]; of q, caches and workspace only shapes and strides count, and
            must be those of the attention.
        k_cache: [pages, page size, kv heads, head_dim]; q heads is a multiple of kv heads.
        v_cache: like k_cache.
        decode_meta: int32 [T, 4].
        page_table: int32 [rows, pages per row], or None as in :func:`rope_append_kv_`; it is not
            read either.
        workspace: float32 [words], as there.
        counts: as in :func:`rope_append_kv_`: leading decode tokens are left out.
        kv_scale: as in :func:`rope_append_kv_`; then nothing is written.
        exact: that of the attention.
    """
    _chunk_plan(
        *(plan, q, k_cache, v_cache, decode_meta, page_table, workspace, counts, kv_scale, exact)
    )


def paged_attention_into(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    segments: Tensor,
    page_table: Tensor | None,
    scale: float,
    hopper: bool = False,
    counts: Tensor | None = None,
    workspace: Tensor | None = None,
    pdl: bool = False,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    exact: bool = False,
) -> None:
    """Causal attention of each token over positions 0 .. length - 1 of its row, grouped queries,
    softmax in float32.

    Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023; Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models
    from Multi-Head Checkpoints", 2023. q head h uses KV head h // (q heads / kv heads).

    Decode tokens and chunks of any length alike. Zeros for tokens that are dead or of a row outside
    the tables; a length beyond the row's pages is that of the pages, and positions of a page
    outside the cache are left out (with `hopper`: see there).

    Args:
        out: [T, q heads, head_dim], written.
        q: [T, q heads, head_dim], rotated.
        k_cache: [pages, page size, kv heads, head_dim]; q heads is a multiple of kv heads.
        v_cache: like k_cache.
        decode_meta: int32 [T, 4].
        segments: int32 [R, 4]: which tokens stand together, for speed; without `hopper` no result
            depends on them.
        page_table: int32 [rows, pages per row], or None as in :func:`rope_append_kv_`.
        scale: of the scores, as a rule 1 / sqrt(head_dim).
        hopper: may compute the tokens of a chunk together by matrix instructions (Dao,
            "FlashAttention-2", 2023), in another order of summation, weights rounded to bfloat16.
            On CUDA from compute capability 8.0, in bfloat16, head_dim 64, 96, 128 or 256, all
            pointers and strides multiples of 16 bytes; elsewhere it changes nothing. Where the
            Hopper kernels run, a cluster of blocks shares a context of more than 1,024 positions. A
            token's bits depend on its own inputs and its length; not on where its prompt was cut,
            nor on the step's other segments. Every page within a token's length must be one: where
            the portable kernel leaves out the positions of a page that is none, this one takes
            zeros for their keys and values.
        counts: as in :func:`rope_append_kv_`: out of the leading decode tokens is left as it is.
        workspace: float32 [words], contiguous, at least :func:`chunk_workspace_words` of one CTA,
            better of as many as the GPU has SMs. Its owner zeroes it once; then calls of all sizes
            share it, always as a whole, but never two at a time. With it and `hopper`, GPUs that
            run the Hopper kernels (hopper_runs) deal the work of a step evenly to all SMs, by
            another kernel and faster: head_dim 64 or 128, page sizes that are multiples of 16, up
            to 4,096 tokens, strides of tokens that are multiples of 64 elements, pages of whole
            tokens, heads within a page or a token. How a context is cut then depends on the whole
            step, and so do a token's bits, unless `exact`. Everywhere else it changes nothing.
        pdl: that kernel may start while those before it still run, and read decode_meta, counts,
            the page table and the plan: as in :func:`norm_linear_into`, none of them may write
            these, but for :func:`chunk_plan_into`, which lets no kernel start early. Everywhere
            else it changes nothing.
        kv_scale: as in :func:`rope_append_kv_`; then `hopper` takes head_dim 64, 96 or 128, and a
            workspace changes nothing.
        plan: int32 [words], what :func:`chunk_plan_into` has written for this decode_meta, these
            counts and a workspace of this size: given where a workspace is. That of other numbers
            of tokens, heads or CTAs, or of the other `exact`, is no use: then out of live tokens
            stays as it is.
        exact: with a workspace, contexts are cut at positions that are always the same: each 1,024
            up to 8,192, and from there on four times for each doubling. So a token's bits do not
            depend on the step, as without a workspace, but for steps of more than 4,096 tokens,
            which run without. A workspace and a plan of exact steps are larger
            (:func:`chunk_workspace_words`); a workspace of other steps serves fewer CTAs.
    """
    _paged_attention(
        *(out, q, k_cache, v_cache, decode_meta, segments, page_table, scale, hopper, counts),
        *(workspace, pdl, kv_scale, plan, exact),
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    segments: Tensor,
    page_table: Tensor | None,
    scale: float,
    hopper: bool = False,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """:func:`paged_attention_into` a new contiguous [T, q heads, head_dim]."""
    _refuse_gradients("paged_attention", q, k_cache, v_cache)
    out = q.new_empty(q.shape)
    _paged_attention(
        *(out, q, k_cache, v_cache, decode_meta, segments, page_table, scale, hopper),
        kv_scale=kv_scale,
    )
    return out


def fused_attention_decode_into(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    workspace: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    counts: Tensor | None = None,
    batch: bool = False,
    kv_scale: Tensor | None = None,
) -> None:
    """:func:`rope_append_kv_` and :func:`paged_attention_into` in one, for tokens of distinct rows;
    q stays as it is.

    A token that is dead, whose position is beyond the cos/sin tables, or whose row, position or
    page its tables do not have comes to zeros and writes no key or value.

    Args:
        out: [T, q heads, head_dim], written.
        q: [T, q heads, head_dim], before the rotation; head_dim even, 2 to 256.
        k: [T, kv heads, head_dim]; q heads is a multiple of kv heads.
        v: [T, kv heads, head_dim].
        k_cache: [pages, page size, kv heads, head_dim], updated; of a contiguous [B, H, L, D]
            cache, its ``transpose(1, 2)``.
        v_cache: like k_cache, updated.
        decode_meta: int32 [T, 4].
        page_table: int32 [rows, pages per row], or None as in :func:`rope_append_kv_`.
        cos: float32 [positions, head_dim], as there.
        sin: like cos.
        scale: of the scores, as a rule 1 / sqrt(head_dim).
        q_norm: [head_dim], or None, as there.
        k_norm: like q_norm.
        eps: of the norms.
        workspace: float32 [words], contiguous, at least :func:`attention_workspace_words` of this
            call's shapes. Its owner zeroes it once; then calls of all sizes share it, always as a
            whole, but never two at a time. What it holds between calls is the kernel's own.
        hopper: on GPUs that run the Hopper kernels (hopper_runs), bfloat16 with head_dim 64, 96,
            128 or 256, and pointers and strides that are multiples of 16 bytes, run a kernel that
            splits a row's context over many blocks ("Flash-Decoding", Dao et al., 2023). It sums in
            another order than the portable kernel, one that depends on the token's own length and
            the shapes, never on the other tokens. Everywhere else `hopper` changes nothing. It
            needs a workspace.
        pdl: as in :func:`norm_linear_into`: the kernels before it, as far back as there, must write
            nothing of this call's but q, k, v, out and the workspace, so neither decode_meta, nor
            page_table, nor counts, nor earlier positions of the cache.
        counts: int32, at least one element: the step's counts; the first is the number of
            leading decode tokens. Tokens from it on are not this call's: their out stays as it is,
            and they write no key or value. None: all T tokens are this call's, which costs least.
        batch: with `hopper`, of more than 32 tokens with head_dim 128, up to 4 q heads a kv head,
            pages of whole runs of 16 positions and 16-byte vectors in q, k and v, run a kernel that
            is faster, and whose order of summation depends on how many tokens there are and how
            long the others are, too. Everywhere else it changes nothing.
        kv_scale: as in :func:`rope_append_kv_`, updated; then `hopper` takes head_dim 64, 96 or
            128, and `batch` changes nothing.
    """
    _fused_attention_decode(
        *(
            out,
            q,
            k,
            v,
            k_cache,
            v_cache,
            decode_meta,
            page_table,
            cos,
            sin,
            scale,
            q_norm,
            k_norm,
            eps,
            workspace,
            hopper,
            pdl,
            counts,
            batch,
            kv_scale,
        )
    )


def chunk_workspace_words(head_dim: int, ctas: int, exact: bool = False) -> int:
    """Words of a workspace with which :func:`paged_attention_into` runs up to `ctas` CTAs, with or
    without `exact` (csrc/common/balanced_workspace.h: what for).

    ValueError: one of the two is below 1.
    """
    if min(head_dim, ctas) < 1:
        raise ValueError(
            f"chunk_workspace_words: head_dim {head_dim}, ctas {ctas}; both must be at least 1"
        )
    return _C.chunk_workspace_words(head_dim, ctas, exact)


def chunk_plan_words(num_tokens: int, ctas: int, exact: bool = False) -> int:
    """Words of a plan that :func:`chunk_plan_into` writes for steps of up to `num_tokens` tokens,
    and a workspace of up to `ctas` CTAs, with or without `exact` (csrc/common/balanced_plan.h: what
    for).

    ValueError: `num_tokens` is negative, or `ctas` below 1.
    """
    if num_tokens < 0 or ctas < 1:
        raise ValueError(
            f"chunk_plan_words: tokens {num_tokens}, ctas {ctas}; tokens must not be negative, and "
            "ctas must be at least 1"
        )
    return _C.chunk_plan_words(num_tokens, ctas, exact)


def attention_workspace_words(num_tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Words of the workspace that :func:`fused_attention_decode_into` needs for up to `num_tokens`
    tokens (csrc/common/kv_split.h: what for).

    ValueError: `tokens` is negative, or another number below 1.
    """
    if num_tokens < 0 or min(q_heads, kv_heads, head_dim) < 1:
        sizes = f"tokens {num_tokens}, q_heads {q_heads}, kv_heads {kv_heads}, head_dim {head_dim}"
        raise ValueError(
            f"attention_workspace_words: {sizes}; tokens must not be negative, and the others must "
            "be at least 1"
        )
    return _C.attention_workspace_words(num_tokens, q_heads, kv_heads, head_dim)
