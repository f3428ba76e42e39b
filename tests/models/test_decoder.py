"""The decoder against transformers: tiny random models in float32, alone, batched, in chunks and
beside dead tokens.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from photon_ext.errors import ConfigError
from photon_ext.models.decoder import Decoder
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.loader import load_model
from photon_ext.models.weights import random_weights
from photon_ext.runtime.step import StepKind
from tests.models.harness import DEAD, Chunk, Harness
from tests.models.tiny import (
    TINY,
    VOCAB,
    greedy_ids,
    reference_logits,
    saved_tiny_model,
    tiny_model,
)

SEEDS = (0, 1, 2)


def prompts(seed: int, lengths: tuple[int, ...] = (1, 5, 19)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def loaded(name: str, folder: Path, seed: int = 0) -> tuple[PreTrainedModel, Harness]:
    model = saved_tiny_model(name, folder, seed)
    config, weights, _ = load_model(folder)
    return model, Harness(config, weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TINY)
def test_greedy_ids_equal_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model, harness = loaded(name, tmp_path, seed)
    texts = prompts(seed)
    expected = [greedy_ids(model, prompt, 16) for prompt in texts]
    assert len({tuple(ids) for ids in expected}) == len(texts)
    assert harness.greedy(texts, 16) == expected


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model, harness = loaded(name, tmp_path)
    (ids,) = prompts(3, (40,))
    expected = reference_logits(model, ids)
    torch.testing.assert_close(
        harness.prefill([Chunk(1, 0, ids[:30])])[0], expected[29], atol=1e-4, rtol=1e-4
    )
    for position in range(30, 40):
        logits = harness.decode([1], [position], [ids[position]])
        torch.testing.assert_close(logits[0], expected[position], atol=1e-4, rtol=1e-4)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-6-2-24-tied", "qwen3-6-3-24"])
def test_half_precision_is_as_near_to_float32_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = saved_tiny_model(name, tmp_path)
    config, weights, _ = load_model(tmp_path, dtype)
    harness = Harness(config, weights)
    texts = prompts(4, (33, 20, 9, 5))
    exact = torch.stack([reference_logits(model, ids)[-1] for ids in texts])
    rounded = torch.stack([reference_logits(model.to(dtype), ids)[-1] for ids in texts]).float()
    ours = torch.cat([harness.prefill([Chunk(1, 0, ids)]) for ids in texts]).float()
    assert (ours - exact).norm() < 1.5 * (rounded - exact).norm()


@pytest.mark.emulated
@pytest.mark.parametrize("name", TINY)
def test_chunks_equal_one_shot_bitwise(name: str, tmp_path: Path) -> None:
    _, harness = loaded(name, tmp_path)
    (ids,) = prompts(5, (23,))
    whole = harness.prefill([Chunk(1, 0, ids)])
    next_whole = harness.decode([1], [23], [9])
    for sizes in ((7, 16), (1,) * 23, (4, 4, 4, 4, 7)):
        position = 0
        for size in sizes:
            logits = harness.prefill([Chunk(2, position, ids[position : position + size])])
            position += size
        assert torch.equal(logits, whole)
        assert torch.equal(harness.decode([2], [23], [9]), next_whole)


@pytest.mark.emulated
@pytest.mark.parametrize("name", TINY)
def test_rows_do_not_depend_on_their_batch_bitwise(name: str, tmp_path: Path) -> None:
    _, harness = loaded(name, tmp_path)
    texts = prompts(6, (3, 11, 8))
    alone = torch.cat([harness.prefill([Chunk(4, 0, text)]) for text in texts])
    chunks = [Chunk(row, 0, text) for row, text in zip((1, 2, 3), texts, strict=True)]
    assert torch.equal(harness.prefill(chunks), alone)
    assert torch.equal(harness.prefill(chunks, padding=5), alone)

    positions, tokens = [len(text) for text in texts], [4, 5, 6]
    together = harness.decode([1, 2, 3], positions, tokens)
    for padding in (0, 3):
        alone = torch.cat(
            [
                harness.decode([row], [positions[row - 1]], [tokens[row - 1]], padding)
                for row in (1, 2, 3)
            ]
        )
        assert torch.equal(together, alone)


# The portable attention of decode rows sums the squares of q and k in an order of its own.
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if "qwen3" in one else pytest.mark.emulated) for one in TINY],
)
def test_a_mixed_step_gives_the_logits_and_keys_of_separate_steps_bitwise(
    name: str, tmp_path: Path
) -> None:
    """Rows 1 and 2 decode, row 3 begins, row 4 goes on with its prompt: in one step, with dead
    decode tokens between and behind the live ones, and in a prefill and a decode step.
    """
    saved_tiny_model(name, tmp_path)
    config, weights, _ = load_model(tmp_path)
    together, apart = Harness(config, weights), Harness(config, weights)
    first, second, third, fourth = prompts(7, (3, 11, 8, 20))
    for one in (together, apart):
        one.prefill([Chunk(1, 0, first), Chunk(2, 0, second), Chunk(4, 0, fourth[:9])])
    decodes, chunks = [Chunk(1, 3, [4]), Chunk(2, 11, [5])], [Chunk(3, 0, third)]
    chunks.append(Chunk(4, 9, fourth[9:]))
    logits = together.mixed([decodes[0], DEAD, decodes[1], DEAD], chunks, padding=2)
    expected = torch.cat([apart.step(StepKind.DECODE, decodes), apart.prefill(chunks)])
    assert torch.equal(logits[[0, 2, 4, 5]], expected)
    for row, length in ((1, 4), (2, 12), (3, 8), (4, 20)):
        assert torch.equal(together.context(row, length), apart.context(row, length))


def test_a_mixed_step_without_live_decode_tokens_or_without_chunks_is_either_alone(
    tmp_path: Path,
) -> None:
    _, harness = loaded("qwen3-tied", tmp_path)
    (ids,) = prompts(8, (12,))
    expected = harness.prefill([Chunk(1, 0, ids)])
    assert torch.equal(harness.mixed([DEAD, DEAD], [Chunk(2, 0, ids)])[2:], expected)
    step = harness.decode([1], [12], [3])
    assert torch.equal(harness.mixed([Chunk(2, 12, [3]), DEAD], [], padding=3)[:1], step)


def test_a_prefill_step_may_have_as_many_tokens_as_segments(tmp_path: Path) -> None:
    """With padding, T == R does not mean one token a segment: the kind says which tokens the
    logits belong to.
    """
    model, harness = loaded("llama-plain", tmp_path)
    chunks = [Chunk(1, 0, [5, 6, 7]), Chunk(2, 0, [8])]
    logits = harness.step(StepKind.PREFILL, chunks, padding=4)
    torch.testing.assert_close(
        logits[0], reference_logits(model, [5, 6, 7])[-1], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(logits[1], reference_logits(model, [8])[-1], atol=1e-4, rtol=1e-4)


def test_dead_steps_write_no_kv(tmp_path: Path) -> None:
    _, harness = loaded("qwen3-tied", tmp_path)
    (ids,) = prompts(8, (12,))
    harness.prefill([Chunk(1, 0, ids)])
    before = [tensor.nan_to_num().clone() for tensor in harness.caches()]
    harness.decode([], [], [], padding=4)
    harness.mixed([DEAD, DEAD], [], padding=3)
    after = [tensor.nan_to_num() for tensor in harness.caches()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_buffers_are_one_arena_at_fixed_addresses(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    config, weights, _ = load_model(tmp_path)
    decoder = Decoder(config, weights, 16, 4, 64, 8, 9)
    arena, buffers = decoder._arena.memory, decoder._arena.activations
    tables = 2 * 64 * config.head_dim * 4
    assert decoder.activation_bytes == arena.nbytes + tables
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in buffers)
    assert spans[0][0] >= arena.data_ptr()
    assert spans[-1][1] <= arena.data_ptr() + arena.nbytes
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for num_tokens, segments in ((16, 4), (3, 1), (0, 0)):
        views = buffers.leading(num_tokens, segments)
        assert [view.data_ptr() for view in views if view.numel()] == [
            full.data_ptr() for full in buffers if num_tokens
        ]
        assert [len(view) for view in views] == [num_tokens] * 7 + [segments] * 2
    assert decoder.kv_bytes == config.kv_bytes_per_token(4) * 9 * 8
    with_places = Decoder(config, weights, 16, 4, 64, 8, 9, embeds_tokens=3)
    assert with_places.activation_bytes == arena.nbytes + tables + 3 * config.hidden * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, 64, 8, 9), "max_step_tokens is 0"),
        ((16, 4, 64, 8, -1), "num_pages is -1"),
        ((16, 4, 257, 8, 9), "max_len is 257 and the model was made for 256 positions"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: tuple[int, int, int, int, int], message: str
) -> None:
    config = hf_config(tiny_model("llama-plain").config.to_dict())
    with pytest.raises(ConfigError, match=message):
        Decoder(config, random_weights(config), *sizes)


def test_a_step_beyond_the_buffers_is_refused(tmp_path: Path) -> None:
    _, harness = loaded("llama-plain", tmp_path)
    with pytest.raises(
        ConfigError, match=r"a step of 65 tokens and 1 segments, made for up to 64 and 8; raise"
    ):
        harness.prefill([Chunk(1, 0, [1] * 65)])
