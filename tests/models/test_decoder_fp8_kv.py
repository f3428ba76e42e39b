"""The decoder with keys and values in fp8: the logits of one whose keys and values the reference
has rounded, in steps of any kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from photon_ext.models.loading.loader import load_model
from tests.models.fp8_kv import round_keys_and_values
from tests.models.harness import Chunk, Harness
from tests.models.test_decoder import prompts
from tests.models.tiny import TINY, saved_tiny_model

CLOSE = {"atol": 2e-3, "rtol": 2e-3}  # a number in the middle of two may be rounded to the other


@pytest.mark.emulated
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_rounded_keys_and_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks and of tokens that decode, alone and beside chunks."""
    saved_tiny_model(name, tmp_path)
    config, weights, _ = load_model(tmp_path)
    first, second, third = prompts(3, (30, 12, 9))
    found = []
    plain, fp8, rounded = (Harness(config, weights, kv_dtype=dt) for dt in (None, "fp8", None))
    for harness in (plain, fp8, rounded):
        if harness is rounded:
            round_keys_and_values(monkeypatch)
        chunks = [harness.prefill([Chunk(1, 0, first[:17]), Chunk(2, 0, second[:5])])]
        chunks.append(harness.prefill([Chunk(1, 17, first[17:]), Chunk(2, 5, second[5:])]))
        steps = [harness.decode([1, 2], [30 + i, 12 + i], [i + 1, i + 2]) for i in range(3)]
        # decode rows beside a chunk go by the fused op, which rounds nothing here
        apart = harness is rounded
        if apart:
            mixed = torch.cat(
                [harness.decode([1], [33], [7]), harness.prefill([Chunk(3, 0, third)])]
            )
        else:
            mixed = harness.mixed([Chunk(1, 33, [7])], [Chunk(3, 0, third)])
        found.append(torch.cat([*chunks, *steps, mixed]))
    torch.testing.assert_close(found[1], found[2], **CLOSE)
    differences = [(found[i] - found[2]).norm() for i in (0, 1)]
    assert differences[0] > 50 * differences[1], "rounding shows"


@pytest.mark.emulated
def test_logits_do_not_depend_on_where_a_prompt_is_cut(tmp_path: Path) -> None:
    """Bit for bit, and neither do the bytes that are stored."""
    saved_tiny_model("llama-plain", tmp_path)
    config, weights, _ = load_model(tmp_path)
    (ids,) = prompts(3, (40,))
    whole, cut, steps = (Harness(config, weights, kv_dtype="fp8") for _ in range(3))
    expected = whole.prefill([Chunk(1, 0, ids)])
    cut.prefill([Chunk(1, 0, ids[:7])])
    cut.prefill([Chunk(1, 7, ids[7:23])])
    assert torch.equal(cut.prefill([Chunk(1, 23, ids[23:])]), expected)
    for position, token in enumerate(ids):
        logits = steps.decode([1], [position], [token])
    assert torch.equal(logits, expected)
    caches = [harness.context(1, 40) for harness in (whole, cut, steps)]
    assert torch.equal(caches[1], caches[0])
    assert torch.equal(caches[2], caches[0])


def test_their_memory_is_a_byte_each_and_a_scale_for_each_head(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    config, weights, _ = load_model(tmp_path)
    decoder = Harness(config, weights, max_len=60, page_size=4, rows=2, kv_dtype="fp8").decoder
    pages, heads = 1 + 2 * 15, 2 * config.layers * config.kv_heads
    assert decoder.num_pages == pages
    assert decoder.kv_bytes == pages * 4 * heads * (config.head_dim + 4)
