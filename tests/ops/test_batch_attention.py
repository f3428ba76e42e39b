"""fused_attention_decode_into with `hopper` and `batch`: many tokens, summed in an order that
depends on all of them.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from photon_ext import hopper_runs
from tests.ops.numeric import BOUNDS, assert_close, assert_same_bits
from tests.ops.test_chunk_attention import set_sms
from tests.ops.test_split_attention import BF16, Decode, decode, many, workspace_of

KINDS = ["short", "long", "heads side by side", "heads first", "wide pages", "rows"]


def check(step: Decode) -> Tensor:
    """The output, near the reference's; and the cache holds the new values, keys near those of
    rope_append_kv_, and is otherwise as it was, bit for bit.
    """
    exact, cache = step.expected()
    before = step.cache.k.clone()
    out = step.run(batch=True)
    assert_close(out, exact, slack=0.5)
    assert_same_bits(step.cache.v, cache.v)
    is_new = before.isnan() & ~cache.k.isnan()
    assert_same_bits(step.cache.k[~is_new], cache.k[~is_new])
    assert_close(step.cache.k[is_new], cache.k[is_new].double(), slack=0.5)
    dead = step.meta[:, 2] == 0
    assert_same_bits(out[dead], torch.zeros_like(out[dead]))
    return out


def runs_it(device: str) -> bool:
    """Whether it is a GPU with the kernel, or an emulated one."""
    emulated = "emulated" in os.environ.get("PHOTON_OPS_LIBRARY", "")
    return hopper_runs() if device == "cuda" else emulated


def near_each(actual: Tensor, expected: Tensor) -> None:
    """Each token by itself: a short context hides none beside long ones."""
    errors = torch.linalg.vector_norm((actual.double() - expected).flatten(1), dim=1)
    sizes = torch.linalg.vector_norm(expected.flatten(1), dim=1)
    assert (errors <= BOUNDS[BF16] * sizes).all(), (errors / sizes).max()


@pytest.mark.emulated_later(kind=("rows", "wide pages"))
@pytest.mark.parametrize(
    ("kind", "group"), [*((kind, 2) for kind in KINDS), ("short", 1), ("short", 3), ("long", 4)]
)
def test_a_batch_is_near_the_float64_reference(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: str, group: int
) -> None:
    """However the work is dealt out."""
    step = many(device, kind, group)
    exact, _ = step.expected()
    near_each(check(step), exact)
    for sms in (1, 2, 5, 40) if runs_it(device) else ():
        set_sms(monkeypatch, device, sms)
        near_each(step.run(batch=True), exact)


@pytest.mark.parametrize("count", [33, 64])
def test_the_smallest_batches_are_near_the_float64_reference(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    step = decode(device, [1 + 53 * i % 330 for i in range(count)], 4, 2, 128, normed=True)
    near_each(check(step), step.expected()[0])
    set_sms(monkeypatch, device, 3)
    near_each(step.run(batch=True), step.expected()[0])


def test_a_batch_of_more_lengths_than_an_order_holds(device: str) -> None:
    step = decode(device, [1 + i % 97 for i in range(460)], 2, 1, 128)
    near_each(check(step), step.expected()[0])


def test_a_batch_of_every_length_around_the_ends_of_tiles_and_steps(device: str) -> None:
    lengths = [*range(1, 82), *range(111, 131), 191, 192, 193, 257, 300]
    step = decode(device, lengths, 4, 2, 128, normed=True)
    near_each(check(step), step.expected()[0])


def test_a_batch_is_the_same_from_run_to_run(device: str) -> None:
    step = many(device, "long", 2)
    workspace = workspace_of(step.q, step.cache)
    right = step.run(batch=True)
    for _ in range(2):
        assert_same_bits(step.run(workspace=workspace, batch=True), right)
    assert (workspace[: len(workspace) // 512 * 4] == 0).all()  # the counters


def test_a_batch_of_large_scores(device: str) -> None:
    """Of both signs, growing and falling along a context, and all of them alike."""
    step = decode(device, [200 + i % 90 for i in range(100)], 4, 2, 128)
    step.q.mul_(12)
    for scale in (1.0, -1.0, 0.0):
        step.scale = scale
        check(step)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_in_a_batch_keys_that_are_no_numbers_are_as_in_the_reference(
    device: str, value: float
) -> None:
    """They reach the query heads of their own KV head and token, and no others."""
    step = decode(device, [100 + i % 40 for i in range(100)], 4, 2, 128)
    right = step.run(batch=True)
    page, position = step.cache.place(51, 70)
    step.cache.k[page, position, 1, 3] = value
    out, exact = step.run(batch=True), step.expected()[0]
    assert torch.equal(out[50].isnan(), exact[50].isnan())
    finite = exact[50].isfinite().all(dim=1)
    near_each(out[50, finite], exact[50, finite])
    others = [*range(50), *range(51, 100)]
    assert_same_bits(out[others], right[others])
    assert_same_bits(out[50, :2], right[50, :2])


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1])
def test_in_a_batch_a_page_that_cannot_be_is_not_read(device: str, page: int) -> None:
    step = many(device, "short", 2)
    assert step.cache.page_table is not None
    right = step.run(batch=True)
    step.cache.page_table[100, 1] = page  # of the context: its positions are left out
    step.cache.page_table[100, 19] = page  # of the new position: the token has no place
    step.cache.page_table[96, 0] = page
    few = step.run(torch.tensor([95, 99]))
    out = step.run(batch=True)
    near_each(out[[95]], few[[0]].double())
    assert_same_bits(out[99], torch.zeros_like(out[99]))
    others = [*range(95), 96, 97, 98]
    assert_same_bits(out[others], right[others])


# --- which kernel it is ---------------------------------------------------------------------------


def test_a_batch_has_bits_of_its_own_only_where_it_is_asked_for(device: str) -> None:
    step = many(device, "short", 2)
    assert torch.equal(step.run(), step.run(batch=True)) != runs_it(device)


@pytest.mark.parametrize("group", [5, 8])
def test_more_query_heads_than_it_takes_have_the_bits_of_any_step(device: str, group: int) -> None:
    step = many(device, "short", group)
    assert_same_bits(step.run(batch=True), step.run())


def test_queries_off_their_vectors_have_the_bits_of_any_step(device: str) -> None:
    step = many(device, "short", 2)
    wider = torch.zeros(step.q.numel() + 1, dtype=BF16, device=step.q.device)
    step.q = wider[1:].view(step.q.shape).copy_(step.q)
    assert_same_bits(step.run(batch=True), step.run())


def test_few_tokens_have_the_bits_of_any_step(device: str) -> None:
    step = many(device, "short", 2)
    few = torch.arange(32)
    assert_same_bits(step.run(few, batch=True), step.run(few))
