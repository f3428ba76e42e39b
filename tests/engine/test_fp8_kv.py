"""Engines with keys and values in fp8: the tokens of a decoder whose keys and values the reference
has rounded, whatever the depth, the batch, the pages and the traffic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from photon_ext.engine.options import EngineOptions
from photon_ext.errors import ConfigError
from photon_ext.models.loading.loader import load_model
from photon_ext.sampling import SamplingParams
from tests.engine.test_embeds import hidden_of, image_of
from tests.engine.test_engine_fast import CONFIG, engine_on
from tests.engine.test_engine_models import LENGTHS, NEW, check_paging, prompt_of, tiny_engine
from tests.models.adapters import ALL, adapter_tensors, saved_adapter
from tests.models.fp8_kv import round_keys_and_values
from tests.models.harness import Harness
from tests.models.tiny import VOCAB, saved_tiny_model

GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def tokens_of(engine: Any, prompts: list[Any], params: Any = GREEDY) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["llama-7-1-96-scaled", "qwen3-6-3-24"])
def test_tokens_are_those_of_rounded_keys_and_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_tiny_model(name, tmp_path)
    prompts = [prompt_of(length, VOCAB) for length in LENGTHS]
    with monkeypatch.context() as patch:
        config, weights, _ = load_model(tmp_path)
        harness = Harness(config, weights)
        round_keys_and_values(patch)
        expected = [tuple(ids) for ids in harness.greedy(prompts, NEW)]
    for depth in (1, 2):
        with tiny_engine(tmp_path, depth, kv_dtype="fp8", graph=depth == 2) as engine:
            assert tokens_of(engine, prompts) == expected
            assert [tokens_of(engine, [prompt])[0] for prompt in prompts] == expected


def test_rounding_shows(tmp_path: Path) -> None:
    """Log-probabilities of an answer differ from those of float32, a little."""
    saved_tiny_model("qwen3-tied", tmp_path)
    found = []
    for kv_dtype in (None, "fp8"):
        with tiny_engine(tmp_path, 2, kv_dtype=kv_dtype) as engine:
            params = SamplingParams(1, prompt_logprobs=0)
            (output,) = engine.generate([prompt_of(40, VOCAB)], params)
            found.append(torch.tensor([one.sampled for one in output.prompt_logprobs]))
    difference = (found[0] - found[1]).abs().mean()
    assert 1e-4 < difference < 0.2


def test_tokens_do_not_depend_on_pages(tmp_path: Path) -> None:
    """That come late, are shared, or are lost and made again."""
    check_paging(tmp_path, "cpu", kv_dtype="fp8")


@pytest.mark.emulated
def test_tokens_do_not_depend_on_the_traffic_with_hopper_kernels_around(tmp_path: Path) -> None:
    """In bfloat16, by split attention and chunk attention: preempted, and behind cached prompts."""
    prompts = [[*prompt_of(16, CONFIG.vocab, n // 2), *range(n + 1)] for n in range(6)]
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.7 * (n % 2), seed=n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    with engine_on("cpu", 2, num_pages=10, kv_dtype="fp8") as engine:
        disturbed = tokens_of(engine, prompts, params)
        now = engine.stats()
    assert now.preemptions > 0
    assert now.prefix_hit_tokens > 0
    with engine_on("cpu", 1, prefix_cache=False, kv_dtype="fp8") as engine:
        assert tokens_of(engine, prompts, params) == disturbed


def test_tokens_are_the_same_in_mixed_and_separate_steps_wherever_chunks_end(
    tmp_path: Path,
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    prompts = [prompt_of(length, VOCAB, length) for length in (1, 9, 33, 20, 40, 25)]
    params = [SamplingParams(3 + 4 * (i % 3), 0.7 * (i % 2), seed=i) for i in range(len(prompts))]

    def served(prefill: str, chunk: int) -> list[tuple[int, ...]]:
        options = {"prefill": prefill, "chunk": chunk, "prefill_buckets": (4, chunk)}
        with tiny_engine(tmp_path, 2, kv_dtype="fp8", **options) as engine:
            return tokens_of(engine, prompts, params)

    expected = served("separate", 16)
    assert served("mixed", 16) == expected
    assert served("mixed", 7) == expected


def test_adapters_embeddings_and_scores_of_prompts_go_with_it(tmp_path: Path) -> None:
    """Each answer is what it is alone, in other chunks."""
    model = saved_tiny_model("qwen3-tied", tmp_path / "model")
    adapter = saved_adapter(tmp_path / "one", adapter_tensors(model, 4, 0, ALL), 4)
    prompt, image = prompt_of(20, VOCAB), image_of(hidden_of(model), 12)
    parts = [prompt_of(3, VOCAB), image, prompt_of(5, VOCAB)]
    scored = SamplingParams(NEW, ignore_eos=True, prompt_logprobs=0)

    def served(**options: Any) -> list[Any]:
        options = {"lora_slots": 1, "embeds_tokens": 32, "max_rows": 4, **options}
        with tiny_engine(tmp_path / "model", 2, kv_dtype="fp8", **options) as engine:
            engine.load_lora("one", adapter)
            requests = [
                engine.submit(prompt, GREEDY, lora="one"),
                engine.submit({"prompt_embeds": parts}, GREEDY),
                engine.submit(prompt, scored),
            ]
            outputs = [request.result() for request in requests]
        scores = [one.sampled for one in outputs[2].prompt_logprobs]
        return [*(output.token_ids for output in outputs), scores]

    together, alone = served(prefill="mixed"), served(max_rows=1, chunk=32)
    assert together == alone
    assert len(together[3]) == len(prompt) - 1
    assert together[0] != together[2]


@pytest.mark.parametrize("kv_dtype", ["int8", "FP8", 8, "auto"])
def test_other_dtypes_are_refused(kv_dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype is .*; give 'fp8', or None for the dtype of"):
        EngineOptions(kv_dtype=kv_dtype)
