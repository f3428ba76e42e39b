"""lora_link: near the reference in each of its forms, whatever rows share a step, and nothing but
the tokens that have an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from tests.ops.numeric import assert_close, assert_same_bits, poisoned, randn
from tests.ops.test_lora import MIXED, described, live

EPS = 1e-5
SLOTS = 3


class Form(NamedTuple):
    """What one call does: b with parts of so many rows (none: it does not add), whose input was
    normalized or not; SwiGLU or not; a behind it or not, with a norm or without.
    """

    parts: tuple[int, ...]
    was_normed: bool
    has_act: bool
    has_a: bool
    has_norm: bool


FORMS = {
    "begins": Form((), False, False, True, False),
    "begins, normed": Form((), False, False, True, True),
    "ends": Form((520,), False, False, False, False),
    "ends, three parts": Form((384, 128, 128), True, False, False, False),
    "ends, uneven parts": Form((264, 40, 40), True, False, False, False),
    "between": Form((520,), False, False, True, True),
    "between, narrow": Form((8,), False, False, True, True),
    "swiglu": Form((320, 320), True, True, True, False),
}


class Call(NamedTuple):
    """Its tensors, of all tokens, before it."""

    form: Form
    x: Tensor
    before: Tensor | None
    b: Tensor | None
    act: Tensor | None
    after: Tensor | None
    a: Tensor | None
    norm: Tensor | None

    @property
    def out(self) -> Tensor:
        return self.x if self.act is None else self.act

    @property
    def written(self) -> slice:
        """The columns of `after` that are written."""
        return slice(-3 if self.form.has_norm else -4)

    def run(
        self, link: Callable[..., None], meta: Tensor, table: Tensor, pdl: bool = False
    ) -> None:
        first = self.form.parts[0] if self.form.parts else 0
        eps = EPS if self.form.was_normed else None
        ended, begun = (self.before, self.b, first, eps), (self.after, self.a, self.norm)
        link(self.x, meta, table, *ended, self.act, *begun, pdl)

    def of(self, token: int) -> Call:
        """A copy for one token."""
        act = None if self.act is None else self.act[[token]]
        before, after = (
            None if sums is None else sums[:, [token]] for sums in (self.before, self.after)
        )
        return self._replace(x=self.x[[token]], act=act, before=before, after=after)


def made(form: Form, rank: int, rows: list[int], device: str) -> Call:
    """Poisoned where a token has no adapter, and where something is to be written."""
    bf16, tokens, count = torch.bfloat16, len(rows), len(form.parts)
    n = sum(form.parts) or 328
    width = n // 2 if form.has_act else n
    x = randn(tokens, n, dtype=bf16, device=device)
    before = b = act = after = a = norm = None
    if count:
        b = randn(SLOTS, n, rank, dtype=bf16, device=device, seed=1) / rank**0.5
        before = randn(19, tokens, count * rank + 4, dtype=torch.float32, device=device, seed=2)
        before[..., -4] = before[..., -4].abs()
        before[:, [i for i in range(tokens) if i not in live(rows)]] = float("nan")
    if form.has_act:
        act = poisoned(tokens, width, dtype=bf16, device=device)
    if form.has_a:
        a_rows = 2 * rank if form.has_norm else rank
        a = randn(SLOTS, a_rows, width, dtype=bf16, device=device, seed=3) / width**0.5
        shape = ops.lora_link_sums(tokens, a_rows, width)
        after = poisoned(*shape, dtype=torch.float32, device=device)
    if form.has_norm:
        norm = randn(width, dtype=bf16, device=device, seed=4)
    return Call(form, x, before, b, act, after, a, norm)


def of_dtype(call: Call, dtype: torch.dtype) -> Call:
    others = (None if each is None else each.to(dtype, copy=True) for each in call[2:])
    return Call(call.form, call.x.to(dtype, copy=True), *others)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("rank", [8, 16, 40])
@pytest.mark.parametrize("repeats", [1, 7])
def test_it_is_near_the_reference(device: str, form: Form, rank: int, repeats: int) -> None:
    rows = MIXED * repeats
    meta, table = described(rows, device)
    call = made(form, rank, rows, device)
    old, exact = call.x.clone(), of_dtype(call, torch.float64)
    call.run(ops.lora_link_, meta, table)
    exact.run(reference.lora_link_, meta, table)
    kept = live(rows)
    others = [i for i in range(len(rows)) if i not in kept]
    if call.act is not None:
        assert exact.act is not None
        assert_close(call.act, exact.act, slack=2)
        assert_same_bits(call.act[others], ops.silu_mul(old[others].contiguous()))
        assert_same_bits(call.x, old)
    else:
        assert_close(call.x[kept], exact.x[kept])
        assert_same_bits(call.x[others], old[others])
    if call.after is not None:
        # of what was written: that is rounded
        sums, written = torch.zeros_like(call.after), call.written
        reference.lora_link_(call.out, meta, table, after=sums, a=call.a, norm_weight=call.norm)
        found, expected = (each[:, kept][..., written] for each in (call.after, sums))
        assert_close(found, expected.double(), slack=2)
        assert torch.isnan(call.after[:, others]).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("rows", [MIXED, [4] * 70 + MIXED])
def test_a_token_has_the_same_bits_in_every_step(device: str, form: Form, rows: list[int]) -> None:
    meta, table = described(rows, device)
    call = made(form, 16, rows, device)
    alone = {i: call.of(i) for i in {*live(rows)[:3], *live(rows)[-7:]}}
    call.run(ops.lora_link_, meta, table, pdl=True)
    for i, one in alone.items():
        one.run(ops.lora_link_, meta[i : i + 1], table)
        beside = call.of(i)
        assert_same_bits(one.out, beside.out)
        if one.after is not None and beside.after is not None:
            assert_same_bits(one.after[..., one.written], beside.after[..., one.written])


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_strides_change_no_bit_and_slots_may_lie_apart(device: str, form: Form) -> None:
    meta, table = described(MIXED, device)
    call = made(form, 16, MIXED, device)

    def apart(tensor: Tensor) -> Tensor:
        """A copy in which those of the first dimension are 16 poisoned elements apart."""
        flat = tensor.flatten(1)
        room = poisoned(len(flat), flat.shape[1] + 16, dtype=tensor.dtype, device=device)
        return room[:, : flat.shape[1]].copy_(flat).view(tensor.shape)

    act, a, b = (None if each is None else apart(each) for each in (call.act, call.a, call.b))
    after = None if call.after is None else call.after.clone()
    wide = call._replace(x=apart(call.x), act=act, a=a, b=b, after=after)
    for each in (call, wide):
        each.run(ops.lora_link_, meta, table)
    kept = live(MIXED)
    assert_same_bits(wide.out[kept], call.out[kept])
    if wide.after is not None and call.after is not None:
        found, expected = (each[:, kept][..., call.written] for each in (wide.after, call.after))
        assert_same_bits(found, expected)


def test_two_links_are_shrink_and_expand(device: str) -> None:
    """Around a linear that normalizes, of a rank that is more than a matrix instruction takes."""
    meta, table = described(MIXED, device)
    x, out = (randn(11, 512, dtype=torch.bfloat16, device=device, seed=i) for i in (0, 1))
    a = randn(SLOTS, 2 * 24, 512, dtype=torch.bfloat16, device=device, seed=2) / 16
    b = randn(SLOTS, 512, 24, dtype=torch.bfloat16, device=device, seed=3)
    norm = randn(512, dtype=torch.bfloat16, device=device, seed=4)
    sums = poisoned(*ops.lora_link_sums(11, 48, 512), dtype=torch.float32, device=device)
    exact = out.double()
    normed = reference.rms_norm(x.double(), norm.double(), EPS)
    h = reference.lora_shrink(normed, a.double(), meta, table)
    reference.lora_expand_(exact, h, b.double(), meta, table, 256)
    ops.lora_link_(x, meta, table, after=sums, a=a, norm_weight=norm)
    ops.lora_link_(out, meta, table, sums, b, 256, EPS)
    assert_close(out, exact, slack=2)
