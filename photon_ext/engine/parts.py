"""What an engine is made of for a model: a runtime, and the decoder over its pages."""

from __future__ import annotations

import torch

from photon_ext.engine.options import MAX_BIASES, EngineOptions
from photon_ext.engine.sizing import EngineSize, size_engine
from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import (
    KernelPlan,
    dtype_name,
    hopper_unsupported,
    plan_for,
    target_of,
)
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.region import RegionHeads, checked_config
from photon_ext.models.weights import DecoderWeights, check_weights
from photon_ext.runtime import Runtime


def make_parts(
    options: EngineOptions,
    config: ModelConfig,
    weights: DecoderWeights,
    region: RegionHeads | None = None,
) -> tuple[Runtime, Decoder, EngineSize]:
    """The two, and their sizes. Raises as Engine.from_weights."""
    check_weights(config, weights)
    heads = checked_config(region)
    plan = options.kernel_plan or plan_for(config, weights, options.backend, options.exact)
    size = size_engine(options, config, weights.dtype, weights.device, plan, heads)
    _check_graphs(plan, options, weights)
    if options.exact and plan.hopper and weights.device.type == "cuda":
        check_exact(config, weights.dtype, weights.device)
    runtime = Runtime(
        max_rows=size.max_rows,
        max_len=size.max_len,
        depth=options.depth,
        device=weights.device,
        page_size=options.page_size,
        max_stop_ids=max(options.max_stop_ids, len(set(config.eos_ids))),
        max_biases=MAX_BIASES,
        penalty_vocab=config.vocab if options.penalties else 0,
        automaton_words=size.automaton_words,
        timing=options.timing,
        blocking=options.blocking,
        backend="hopper" if plan.hopper else "portable",
    )
    shape = LoraShape(config, options.lora_rank)
    lora = (
        LoraSlots(shape, options.lora_slots, size.max_step_tokens, weights.dtype, weights.device)
        if options.lora_slots
        else None
    )
    decoder = Decoder(
        config,
        weights,
        max_step_tokens=size.max_step_tokens,
        max_segments=size.max_segments,
        max_len=size.max_len,
        page_size=options.page_size,
        num_pages=size.num_pages,
        plan=plan,
        lora=lora,
        embeds_tokens=options.embeds_tokens,
        region=region,
    )
    return runtime, decoder, size


def check_exact(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where some steps of the model would run portable kernels in place of
    Hopper ones, and so sum in another order than other steps.
    """
    unsupported = hopper_unsupported(config, target_of(device), dtype_name(dtype))
    if unsupported is not None:
        raise ConfigError(
            f"exact is True, and the Hopper kernels do not take all of the model on {device}: "
            f'{unsupported}; pass backend="portable", whose kernels take every model'
        )


def _check_graphs(plan: KernelPlan, options: EngineOptions, weights: DecoderWeights) -> None:
    uses_torch = plan.decode.uses_torch or plan.chunks.uses_torch
    if uses_torch and options.graph and weights.device.type != "cuda":
        raise ConfigError(
            f"kernel_plan has products by torch ({shown(plan)}), which a graph on {weights.device} "
            "cannot hold; make it with plan_for of these weights, or pass graph=False"
        )
