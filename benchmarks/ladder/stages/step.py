"""Our step: the model's weights, copied under our decoder, whose kernels read the step from the
device and write into memory that it owns.

A model on disk needs none of this: ``photon_ext.Engine.from_pretrained(path)``.
"""

import torch

import photon_ext
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import plan_for
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.weights import empty_weights, weight_slots


@torch.inference_mode()
def decode(model, prompt_ids, max_new_tokens, stop_ids, backend="portable"):
    config, device = hf_config(model.config.to_dict()), model.device
    max_len = len(prompt_ids) + max_new_tokens
    weights, parameters = empty_weights(config, model.dtype, device), dict(model.named_parameters())

    for name, slot in weight_slots(weights):
        slot.copy_(parameters[name])
    pages = {"page_size": max_len, "num_pages": 2}  # rows count from 1, and row 1 has page 1
    decoder = Decoder(
        config,
        weights,
        max_step_tokens=256,
        max_segments=1,
        max_len=max_len,
        plan=plan_for(config, weights, backend),
        **pages,
    )
    runtime = photon_ext.Runtime(
        max_rows=1, max_len=max_len, depth=2, device=device, backend=backend
    )
    pipeline = photon_ext.Pipeline(runtime, decoder.forward, vocab_size=config.vocab)
    params = photon_ext.RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
    pipeline.admit(prompt_ids, params)
    while pipeline.busy:
        yield from (token for event in pipeline.tick() for token in event.tokens)
