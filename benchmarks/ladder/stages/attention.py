"""Our attention, through transformers' own hook, on the static cache as it is: it reads as many
keys as the sequence has.

Rotation and the write into the cache happen in the model before the hook, so this is the op that
only attends.
"""

import torch
from transformers import AttentionInterface, StaticCache

import photon_ext
from photon_ext import ops


def attend(module, query, key, value, attention_mask, *, step, pages, scaling, **kwargs):
    paged = key.transpose(1, 2), value.transpose(1, 2)
    out = ops.paged_attention(
        query[0].transpose(0, 1), *paged, step.decode_meta, step.segments, pages, scaling
    )
    return out[None], None


AttentionInterface.register("photon_ext", attend)


@torch.inference_mode()
def decode(model, prompt_ids, max_new_tokens, stop_ids):
    config, device = model.config, model.device
    max_len = len(prompt_ids) + max_new_tokens
    cache = StaticCache(config=config, max_cache_len=max_len)
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, device)
    # page table: the cache is one page, of whichever row
    pages = torch.zeros(2, 1, dtype=torch.int32, device=device)

    # of decode steps captured once per slot, then only replayed: what changes is read from device
    # memory
    def forward(step):
        tokens, positions = step.decode_meta[None, :, 0].long(), step.decode_meta[None, :, 1].long()
        for layer in cache.layers:
            layer.cumulative_length.copy_(positions[0, 0])  # where this step's keys and values go
        out = model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
            step=step,
            pages=pages,
        )
        step.logits = out.logits[:, -1]

    runtime = photon_ext.Runtime(max_rows=1, max_len=max_len, depth=2, device=device)
    own = config._attn_implementation
    model.set_attn_implementation("photon_ext")
    try:
        pipeline = photon_ext.Pipeline(
            runtime, forward, vocab_size=config.vocab_size, graph=device.type == "cuda"
        )
        params = photon_ext.RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
        pipeline.admit(prompt_ids, params)
        while pipeline.busy:
            yield from (token for event in pipeline.tick() for token in event.tokens)
    finally:
        model.set_attn_implementation(own)
