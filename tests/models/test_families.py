"""Families from Hugging Face directories with published config.json: transformers' tokens and
logits, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedModel

from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.loader import load_model
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.rope import rope_tables
from photon_ext.sampling import SamplingParams
from tests.engine.test_engine_models import tiny_engine
from tests.models.adapters import ALL, adapter_tensors, merged, saved_adapter
from tests.models.harness import Chunk, Harness
from tests.models.published import PUBLISHED, TINY_SIZES
from tests.models.tiny import (
    LLAMA3_ROPE,
    greedy_ids,
    random_model,
    reference_logits,
    saved_random_model,
)

LONG = [(11 * i + i // 7) % 131 for i in range(100)]
PROMPTS = [[(7 * i + 3 * n) % 131 for i in range(n)] for n in (1, 5, 19)]


def loaded(
    values: dict[str, Any], folder: Path, seed: int = 0, max_len: int = 60
) -> tuple[PreTrainedModel, Harness]:
    model = saved_random_model(values, folder, seed)
    config, weights, _ = load_model(folder, torch.float32)
    return model, Harness(config, weights, max_len)


def changed(values: dict[str, Any], **change: Any) -> dict[str, Any]:
    """With these keys; "absent" takes one away."""
    return {key: value for key, value in {**values, **change}.items() if value != "absent"}


def assert_logits_equal(model: PreTrainedModel, harness: Harness, ids: list[int]) -> None:
    """Of a prompt in one step, and of ten tokens that follow it one by one."""
    expected = reference_logits(model, ids)
    begun = len(ids) - 10
    logits = [harness.prefill([Chunk(1, 0, ids[:begun])])[0]]
    for position in range(begun, len(ids)):
        logits.append(harness.decode([1], [position], [ids[position]])[0])
    torch.testing.assert_close(torch.stack(logits), expected[begun - 1 :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_transformers_tokens(name: str, seed: int, tmp_path: Path) -> None:
    model, harness = loaded(PUBLISHED[name], tmp_path, seed)
    expected = [greedy_ids(model, prompt, 16) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    assert harness.greedy(PROMPTS, 16) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    model, harness = loaded(PUBLISHED[name], tmp_path)
    assert_logits_equal(model, harness, LONG[:50])


@pytest.mark.parametrize("name", ["granite-3", "phi-4-mini"])
def test_what_is_folded_into_bfloat16_is_as_near_to_float32_as_transformers(
    name: str, tmp_path: Path
) -> None:
    model = saved_random_model(PUBLISHED[name], tmp_path)
    harness = Harness(*load_model(tmp_path, torch.bfloat16)[:2], max_len=60)
    texts = [LONG[begin : begin + 45] for begin in (0, 9, 20, 31, 50)]
    exact = torch.stack([reference_logits(model, ids)[-1] for ids in texts])
    model.to(torch.bfloat16)
    rounded = torch.stack([reference_logits(model, ids)[-1] for ids in texts])
    ours = torch.cat([harness.prefill([Chunk(1, 0, ids)]) for ids in texts])
    assert (ours.float() - exact).norm() < 1.5 * (rounded.float() - exact).norm()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_that_transformers_has_rewritten_is_the_same(name: str) -> None:
    written = json.loads(random_model(PUBLISHED[name]).config.to_json_string())
    assert "rope_parameters" in written
    ours = hf_config(PUBLISHED[name])
    assert vars(hf_config(written)) == {**vars(ours), "prefers_float32": True}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_adapter_gives_pefts_tokens(name: str, tmp_path: Path) -> None:
    model = saved_random_model(PUBLISHED[name], tmp_path / "model")
    tensors = adapter_tensors(model, 4, 0, (*ALL, "qkv_proj", "gate_up_proj"))
    adapter = saved_adapter(tmp_path / "adapter", tensors, 4)
    config, weights, _ = load_model(tmp_path / "model", torch.float32)
    lora = LoraSlots(LoraShape(config, 4), 1, 64, torch.float32, weights.device)
    lora.load(1, lora.read(adapter)).wait()
    harness = Harness(config, weights, 60, lora=lora)
    harness.slots = {1: 1, 2: 1, 3: 1}
    adapted = merged(model, adapter, tensors)
    expected = [greedy_ids(adapted, prompt, 16) for prompt in PROMPTS]
    assert expected != [greedy_ids(model, prompt, 16) for prompt in PROMPTS]
    assert harness.greedy(PROMPTS, 16) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_hazard_e4_ids_without_a_token_are_never_sampled(tied: bool, tmp_path: Path) -> None:
    """Their rows of the head are large enough that transformers samples nothing else. One is an
    end token all the same, and may come.
    """
    missing = [50, *range(120, 131)]
    values = changed(PUBLISHED["qwen2.5"], tie_word_embeddings=tied, eos_token_id=[2, 125])
    model = saved_random_model(values, tmp_path)
    words = {f"w{token}": token for token in range(131) if token not in missing}
    Backend(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    harness = Harness(*load_model(tmp_path, torch.float32)[:2])
    known = [token for token in range(131) if token not in missing or token == 125]
    logits, expected = (
        harness.prefill([Chunk(1, 0, LONG[:30])])[0],
        reference_logits(model, LONG[:30]),
    )
    torch.testing.assert_close(logits[known], expected[-1][known], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        model.lm_head.weight[missing] *= 100
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert {token for prompt in PROMPTS for token in greedy_ids(model, prompt, 8)} <= set(missing)
    params = [
        SamplingParams(temperature=t, max_new_tokens=20, logprobs=5, ignore_eos=True, seed=1)
        for t in (0.0, 1.0, 50.0)
    ]
    with tiny_engine(tmp_path, 2) as engine:
        outputs = engine.generate([LONG[:9]] * 3, params)
    assert {token for output in outputs for token in output.token_ids} <= set(known)


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("mistral-0.1", {}, 60),
        ("mistral-0.1", {"sliding_window": None}, None),
        ("mistral-0.1", {"sliding_window": "absent"}, 4096),
        ("qwen2.5", {}, None),
        ("qwen2.5", {"use_sliding_window": "absent"}, None),
        ("qwen2.5", {"use_sliding_window": True}, 128),
        ("qwen2.5", {"use_sliding_window": True, "sliding_window": None}, None),
        ("qwen2.5", {"use_sliding_window": True, "sliding_window": "absent"}, 4096),
        ("qwen2.5", {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, None),
    ],
)
def test_hazard_e10_a_window_counts_where_transformers_has_one(
    name: str, change: dict[str, Any], window: int | None
) -> None:
    values = changed(PUBLISHED[name], **change)
    assert hf_config(values).window == window
    theirs = random_model(values).config
    slides = name == "mistral-0.1" or "sliding_attention" in theirs.layer_types
    assert (theirs.sliding_window if slides else None) == window


def test_hazard_e10_texts_may_be_as_long_as_the_window_and_no_longer(tmp_path: Path) -> None:
    """The last logits of 60 tokens are transformers', which no longer sees the first of 61."""
    values = PUBLISHED["mistral-0.1"]
    model, harness = loaded(values, tmp_path)
    ids = LONG[:61]
    assert_logits_equal(model, harness, ids[:60])
    wide = random_model({**values, "sliding_window": None})
    away = (reference_logits(model, ids) - reference_logits(wide, ids)).abs().amax(dim=1)
    assert away[:60].max() < 1e-4 < 1e-2 < away[60]
    with pytest.raises(ConfigError, match="max_len is 61 and attention of the model has a window"):
        Harness(harness.decoder.config, harness.decoder.weights, 61)


@pytest.mark.parametrize(
    ("flags", "unrotated"),
    [([1, 1, 1, 0, 1], (3,)), ([0, 1, 0, 0, 1, 1], (0, 2, 3)), (None, (3,)), ("absent", (3,))],
)
def test_hazard_e8_a_one_in_no_rope_layers_stands_for_rotation(
    flags: list[int] | str | None, unrotated: tuple[int, ...], tmp_path: Path
) -> None:
    values = changed(PUBLISHED["smollm3"], no_rope_layers=flags)
    model, harness = loaded(values, tmp_path)
    layers = model.model.layers
    assert tuple(i for i in range(5) if not layers[i].self_attn.use_rope) == unrotated
    blocks = harness.decoder.weights.layers
    assert tuple(i for i in range(5) if not blocks[i].attention.rotates) == unrotated
    assert_logits_equal(model, harness, LONG[:30])


@pytest.mark.parametrize("flags", [[1, 1, 1, 0], [1, 1, 1, 2, 1], "11101"])
def test_hazard_e8_flags_that_are_none_are_refused(flags: object) -> None:
    with pytest.raises(ModelError, match=r"no_rope_layers is .*, expected a list"):
        hf_config(changed(PUBLISHED["smollm3"], no_rope_layers=flags))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_multiplier", 3.0),
        ("residual_multiplier", 0.7),
        ("logits_scaling", 5.0),
        ("attention_multiplier", 0.4),
        ("attention_multiplier", "absent"),
    ],
)
def test_hazard_e9_each_multiplier_stands_where_transformers_has_it(
    key: str, value: float | str, tied: bool, tmp_path: Path
) -> None:
    """Logits are divided; attention's replaces 1 / sqrt(head_dim), and is 1 by default."""
    values = changed(PUBLISHED["granite-3"], tie_word_embeddings=tied, **{key: value})
    model, harness = loaded(values, tmp_path)
    before = reference_logits(
        random_model({**PUBLISHED["granite-3"], "tie_word_embeddings": tied}), LONG[:30]
    )
    assert (reference_logits(model, LONG[:30]) - before).abs().max() > 0.01
    assert_logits_equal(model, harness, LONG[:30])


def test_hazard_e6_factors_are_those_of_the_rotated_part_and_the_rest_stays(tmp_path: Path) -> None:
    values = PUBLISHED["phi-4-mini"]
    config = hf_config(values)
    cos, sin = rope_tables(config, 60, "cpu")
    assert (config.rotated, config.head_dim) == (12, 16)
    still = [6, 7, 14, 15]
    assert torch.equal(cos[:, still], torch.ones(60, 4))
    assert torch.equal(sin[:, still], torch.zeros(60, 4))
    for key in ("short_factor", "long_factor"):
        rope = {**values["rope_scaling"], key: [1.0] * 8}
        with pytest.raises(ModelError, match=rf"{key} is \[.*\], expected a list of 6 numbers"):
            hf_config({**values, "rope_scaling": rope})


@pytest.mark.parametrize("max_len", [64, 65])
def test_hazard_e5_one_set_of_factors_serves_all_lengths_of_a_decoder(
    max_len: int, tmp_path: Path
) -> None:
    """transformers takes the long ones for texts beyond the trained 64 positions and computes keys
    anew there. Ours go by `max_len`, so that cached keys always fit those that follow.
    """
    model, harness = loaded(PUBLISHED["phi-4-mini"], tmp_path, max_len=max_len)
    if max_len == 64:
        assert_logits_equal(model, harness, LONG[:64])
        return
    expected = reference_logits(model, LONG[:65])
    logits = torch.stack([harness.prefill([Chunk(1, i, [LONG[i]])])[0] for i in range(65)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (reference_logits(model, LONG[:64]) - expected[:64]).abs().max() > 0.1


def test_hazard_e5_a_shared_prefix_serves_texts_on_both_sides_of_the_trained_context(
    tmp_path: Path,
) -> None:
    """30 greedy tokens behind 50, of which a shorter text has left 48 in cached pages, are those
    that transformers finds most probable in the whole text, which is beyond the trained context.
    """
    model = saved_random_model(PUBLISHED["phi-4-mini"], tmp_path)
    with tiny_engine(tmp_path, 2, max_len=100, page_size=4) as engine:
        for count in (4, 30):
            params = SamplingParams(max_new_tokens=count, ignore_eos=True)
            (output,) = engine.generate([LONG[:50]], params)
    assert output.cached_tokens == 48
    text = [*LONG[:50], *output.token_ids]
    assert [*output.token_ids] == reference_logits(model, text)[49:-1].argmax(-1).tolist()


@pytest.mark.parametrize("stored", ["none", "equal", "other"])
@pytest.mark.parametrize("tied", [True, False, "absent"])
@pytest.mark.parametrize("name", ["qwen2.5", "smollm3", "phi-4-mini"])
def test_hazard_e12_the_head_is_the_one_that_the_files_mean(
    name: str, tied: bool | str, stored: str, tmp_path: Path
) -> None:
    """Where config.json is silent, transformers' default for the family counts; a head is neither
    made up nor dropped.
    """
    values = changed(PUBLISHED[name], tie_word_embeddings=tied)
    model = saved_random_model({**values, "tie_word_embeddings": False}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if stored == "none":
        del tensors["lm_head.weight"]
    if stored == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    if random_model(values).config.tie_word_embeddings:
        error = "lm_head.weight .* differs from model.embed_tokens" if stored == "other" else None
    else:
        error = "missing, first 'lm_head.weight'" if stored == "none" else None
    if error is not None:
        with pytest.raises(ModelError, match=error):
            load_model(tmp_path)
        return
    head = tensors["lm_head.weight" if stored != "none" else "model.embed_tokens.weight"]
    assert torch.equal(load_model(tmp_path, torch.float32).weights.head.weight.data, head)


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
def test_hazard_e11_a_bias_too_few_or_too_many_is_named(name: str, tmp_path: Path) -> None:
    """That biases count is seen in the logits of other tests: here they are random, too."""
    model, key = saved_random_model(PUBLISHED["qwen2.5"], tmp_path), f"1.self_attn.{name}.bias"
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    del tensors["lm_head.weight"]
    if tensors.pop(f"model.layers.{key}", None) is None:
        tensors[f"model.layers.{key}"] = torch.zeros(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 .*parameters (are missing|would be ignored), .*{key}"):
        load_model(tmp_path)


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
def test_hazard_e7_scaled_frequencies_show_in_the_logits_far_behind_the_trained_context(
    spelling: str, tmp_path: Path
) -> None:
    """Whatever the key is called. Short prompts are nearly the same without scaling."""
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"}
    values = {**TINY_SIZES, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    values |= {"model_type": "llama", "max_position_embeddings": 1024}
    unscaled = random_model(values)
    if spelling == "rope_parameters":
        values["rope_parameters"] = {**scaling, "rope_type": "llama3"}
    else:
        values["rope_scaling"] = {**scaling, spelling: "llama3"}
    model, harness = loaded(values, tmp_path, max_len=700)
    ids = [(11 * i + i // 7) % 131 for i in range(700)]
    expected = reference_logits(model, ids)
    for begin in range(0, 700, 50):
        logits = harness.prefill([Chunk(1, begin, ids[begin : begin + 50])])
    torch.testing.assert_close(logits[0], expected[-1], atol=1e-3, rtol=1e-3)
    assert (reference_logits(unscaled, ids)[-1] - expected[-1]).abs().max() > 0.1
