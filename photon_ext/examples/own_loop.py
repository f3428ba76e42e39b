"""Your own loop: a Hugging Face model with its own static cache, one row, decoded through the
two-slot pipeline: slots, carry-over, graphs and stops are the runtime's, and the forward is left.

python -m photon_ext.examples.own_loop --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import photon_ext
from photon_ext.runtime import StepTensors


@torch.inference_mode()
def decode(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    """Greedy tokens as they come, a final stop id included."""
    config, device = model.config, model.device
    max_len = len(prompt_ids) + max_new_tokens
    cache: Any = StaticCache(config=config, max_cache_len=max_len)
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, device)

    # A decode step is captured once per slot and then replayed: what changes from step to step is
    # read from device memory.
    def forward(step: StepTensors) -> None:
        tokens, positions = step.decode_meta[None, :, 0].long(), step.decode_meta[None, :, 1].long()
        for layer in cache.layers:
            layer.cumulative_length.copy_(positions[0, 0])  # where this step's keys and values go
        out = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        step.logits = out.logits[:, -1]

    runtime = photon_ext.Runtime(max_rows=1, max_len=max_len, depth=2, device=device)
    pipeline = photon_ext.Pipeline(
        runtime, forward, vocab_size=config.vocab_size, graph=device.type == "cuda"
    )
    params = photon_ext.RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
    pipeline.admit(prompt_ids, params)
    while pipeline.busy:
        yield from (token for event in pipeline.tick() for token in event.tokens)


def main(argv: Sequence[str] | None = None) -> None:
    """Decodes with a tiny model of random weights, and with the model's own `generate`."""
    parser = argparse.ArgumentParser(description="A Hugging Face model in the pipeline.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model: Any = LlamaForCausalLM(config)
    model = model.eval().to(options.device)
    prompt = [3, 5, 7, 11]
    tokens = list(decode(model, prompt, options.new_tokens, ()))
    ids = torch.tensor([prompt], device=options.device)
    whole = model.generate(
        ids, max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None
    )
    print(tokens)
    print("the model's own generate gives the same:", tokens == whole[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main()
