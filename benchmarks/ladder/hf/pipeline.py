"""The pipeline: README's example. Slots, carry-over, events, graphs and stops are the runtime's;
what is left is the forward."""

import torch
from transformers import StaticCache

import photon_ext


@torch.inference_mode()
def decode(model, prompt_ids, max_new_tokens, stop_ids):
    config, device = model.config, model.device
    max_len = len(prompt_ids) + max_new_tokens
    cache = StaticCache(config=config, max_cache_len=max_len)
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, device)

    # of decode steps captured once per slot, then only replayed: what changes is read from device
    # memory
    def forward(step):
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
        yield from (event.token for event in pipeline.tick() if event.token is not None)
