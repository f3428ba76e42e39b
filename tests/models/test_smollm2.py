"""SmolLM2 from the bundled GGUF file against transformers, which reads and un-permutes the same
file on its own.
"""

from __future__ import annotations

from functools import cache

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from photon_ext.models.loading.loader import LoadedModel, resolve_model
from tests.models.harness import Chunk, Harness
from tests.models.tiny import greedy_ids, reference_logits

PROMPTS = ["The sky is blue because", "Q: What is the capital of France?\nA:"]
TOKENS = 24
# As published with HuggingFaceTB/SmolLM2-135M-Instruct.
PUBLISHED = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    with torch.device("meta"):
        network = LlamaForCausalLM(PUBLISHED)
    with pytest.MonkeyPatch.context() as patch:
        # made anew for each module, it takes a third of the time
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        tensors = load_gguf_checkpoint(
            str(resolve_model("smollm2")), return_tensors=True, model_to_load=network
        )["tensors"]
    missing, unexpected = network.load_state_dict(tensors, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    network.tie_weights()
    network.model.rotary_emb = LlamaRotaryEmbedding(PUBLISHED)
    return network.eval()


def test_logits_equal_transformers(smollm2: LoadedModel, reference: LlamaForCausalLM) -> None:
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer.encode(" ".join(PROMPTS))
    expected = reference_logits(reference, ids)
    harness = Harness(smollm2.config, smollm2.weights)
    begun = harness.prefill([Chunk(1, 0, ids[:-1])])
    found = torch.cat([begun, harness.decode([1], [len(ids) - 1], ids[-1:])])
    torch.testing.assert_close(found, expected[-2:], atol=1e-3, rtol=1e-4)


def test_greedy_tokens_equal_transformers(
    smollm2: LoadedModel, reference: LlamaForCausalLM
) -> None:
    """One prompt against `generate`; for the others the reference is run once, over what we
    produced: each token must be its argmax.
    """
    assert smollm2.tokenizer is not None
    prompts = [smollm2.tokenizer.encode(text) for text in PROMPTS]
    prompts.append(
        smollm2.tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    )
    outputs = Harness(smollm2.config, smollm2.weights, max_len=96).greedy(prompts, TOKENS)
    assert outputs[0] == greedy_ids(reference, prompts[0], TOKENS)
    for prompt, output in zip(prompts[1:], outputs[1:], strict=True):
        logits = reference_logits(reference, prompt + output[:-1])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output
    assert "Paris" in smollm2.tokenizer.decode(outputs[1])
