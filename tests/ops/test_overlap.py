"""Views of one buffer: an op takes those that share no element with what it writes, and refuses
all others.
"""

from __future__ import annotations

import random
import re
from itertools import product

import pytest
import torch
from torch import Tensor

from photon_ext import ops
from tests.ops.caches import tokens_and_segments
from tests.ops.test_opcheck import CASES, overload


def places(view: Tensor) -> list[int]:
    """Where in its storage each element is."""
    indices = torch.arange(view.untyped_storage().size() // view.element_size())
    return indices.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()


def share(a: Tensor, b: Tensor) -> bool:
    return not set(places(a)).isdisjoint(places(b))


def is_refused(name: str, *arguments: object) -> bool:
    try:
        overload(name)(*arguments)
    except RuntimeError as error:
        if re.search("shares memory with|keep its elements apart", str(error)) is None:
            raise
        return True
    return False


def attention(out: Tensor, q: Tensor) -> bool:
    cache = torch.zeros(2, 4, 1, q.shape[2])
    meta, segments = tokens_and_segments([(1, 0, 1)] * len(q), "cpu")
    return is_refused("paged_attention_into", out, q, cache, cache, meta, segments, None, 1.0)


@pytest.mark.parametrize(("x_tokens", "out_tokens"), [(3, 3), (1, 3), (3, 1), (1, 1)])
def test_columns_of_a_matrix_are_told_apart_exactly(x_tokens: int, out_tokens: int) -> None:
    """Every place of x around out, runs that go around the end of a row among them."""
    buffer, first = torch.zeros(120), 45
    segments = torch.zeros(out_tokens, 4, dtype=torch.int32)
    for width, offset in product((1, 4, 6, 10), range(90)):
        out = buffer.as_strided((out_tokens, width), (10, 1), first)
        x = buffer.as_strided((x_tokens, width), (10, 1), offset)
        assert is_refused("select_tokens_into", out, x, segments) == share(out, x), (width, offset)


def test_columns_of_different_widths_are_told_apart_exactly() -> None:
    buffer = torch.zeros(120)
    for n, k, offset in product((1, 3, 10), (2, 7), range(0, 90)):
        out, x = buffer.as_strided((3, n), (10, 1), 45), buffer.as_strided((3, k), (10, 1), offset)
        assert is_refused("linear_into", out, x, torch.zeros(n, k)) == share(out, x), (n, k, offset)


@pytest.mark.parametrize("strides", [(24, 6, 1), (6, 18, 1), (26, 8, 1), (6, 26, 1)])
def test_heads_of_one_layout_are_told_apart_exactly(strides: tuple[int, int, int]) -> None:
    """Heads before or after tokens, with or without gaps behind either."""
    buffer = torch.zeros(400)
    for heads, offset in product((1, 2, 3), range(0, 240)):
        out = buffer.as_strided((3, heads, 4), strides, 120)
        q = buffer.as_strided((3, heads, 4), strides, offset)
        assert attention(out, q) == share(out, q), (heads, offset)


def test_no_views_that_share_are_taken() -> None:
    """Views of any strides, of themselves too: where they are entangled one may be refused for
    nothing, but never taken in error.
    """
    rng, buffer = random.Random(0), torch.zeros(300)
    taken, wrong = 0, 0
    for _ in range(3000):
        shape = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([2, 4])
        out, q = (
            buffer.as_strided(
                shape, (rng.randrange(1, 40), rng.randrange(1, 20), 1), rng.randrange(80)
            )
            for _ in range(2)
        )
        is_wrong = share(out, q) or len(set(places(out))) < out.numel()
        is_taken = not attention(out, q)
        assert not (is_wrong and is_taken), (
            shape,
            out.stride(),
            out.storage_offset(),
            q.stride(),
            q.storage_offset(),
        )
        taken, wrong = taken + is_taken, wrong + is_wrong
    assert wrong > 1000
    assert taken > 0.8 * (3000 - wrong)


def test_interleaved_views_are_apart() -> None:
    """q, k and v side by side in a token, or head by head; pages of keys and values in one
    buffer, in each order.
    """
    side, by_head = torch.zeros(3, 8, 8), torch.zeros(3, 2, 3, 8)
    arguments = list(CASES["rope_append_kv_"]("cpu", 3))
    for qkv in ((side[:, :4], side[:, 4:6], side[:, 6:]), by_head.unbind(2)):
        ops.rope_append_kv_(*qkv, *arguments[3:])
    pages, page, heads = arguments[3].shape[:3]
    for both in (
        torch.zeros(2, pages, page, heads, 8).unbind(0),
        torch.zeros(pages, 2, page, heads, 8).unbind(1),
        torch.zeros(pages, page, 2, heads, 8).unbind(2),
        torch.zeros(pages, page, heads, 2, 8).unbind(3),
        torch.zeros(pages, page, heads, 16).chunk(2, dim=3),
        torch.zeros(pages, heads, 2, page, 8).transpose(1, 3).unbind(2),
    ):
        assert both[0].shape == both[1].shape == (pages, page, heads, 8)
        ops.rope_append_kv_(*arguments[:3], *both, *arguments[5:])


@pytest.mark.parametrize(
    ("name", "place", "argument", "strides"),
    [
        ("linear_into", 0, "out", (4, 1)),
        ("add_rms_norm_into", 1, "residual", (5, 1)),
        ("fused_mlp_into", 1, "act", (1, 1)),
        ("linear_residual_", 0, "residual", (2, 1)),
        ("apply_token_mask_", 0, "logits", (39, 1)),
        ("rope_append_kv_", 0, "q", (8, 8, 1)),
        ("rope_append_kv_", 3, "k_cache", (8, 8, 8, 1)),
        ("rope_append_kv_", 4, "v_cache", (64, 15, 8, 1)),
        ("paged_attention_into", 0, "out", (32, 7, 1)),
        ("fused_attention_decode_into", 4, "k_cache", (63, 8, 32, 1)),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_what_is_written_may_not_overlap_itself(
    where: str, name: str, place: int, argument: str, strides: tuple[int, ...]
) -> None:
    arguments = [
        value.to(where) if isinstance(value, Tensor) else value for value in CASES[name]("cpu", 3)
    ]
    shape = tuple(arguments[place].shape)
    arguments[place] = torch.zeros(10000, device=where).as_strided(shape, strides)
    wanted = (
        f"{name}: {argument} has shape {list(shape)} with strides {list(strides)}, expected "
        "strides that keep its elements apart"
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(wanted)):
        overload(name)(*arguments)


def test_gaps_in_what_is_written_are_fine() -> None:
    out, x, weight = torch.zeros(3, 2, 7)[:, 1, :5], torch.randn(3, 6), torch.randn(5, 6)
    ops.linear_into(out, x, weight)
    torch.testing.assert_close(out, x @ weight.T)


@pytest.mark.parametrize("argument", ["q", "k_cache", "v_cache"])
def test_rotation_writes_apart_from_its_norms_and_tables(argument: str) -> None:
    arguments = list(CASES["rope_append_kv_"]("cpu", 3))
    written = torch.zeros(9, 4, 2, 8)
    place = {"q": 0, "k_cache": 3, "v_cache": 4}[argument]
    arguments[place] = written[0, :3].repeat_interleave(2, 1) if argument == "q" else written
    for other, name in ((7, "cos"), (9, "q_norm"), (10, "k_norm")):
        wrong = [*arguments]
        wrong[other] = (
            arguments[place].flatten()[:64].view(8, 8)
            if name == "cos"
            else arguments[place].flatten()[8:16]
        )
        with pytest.raises(
            RuntimeError, match=f"^rope_append_kv_: {argument} shares memory with {name}"
        ):
            overload("rope_append_kv_")(*wrong)
