"""What an engine is made of: a runtime, a forward over its pages, and what belongs to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from photon_ext.models.region import RegionConfig, RegionHeads, checked_config
from photon_ext.models.weights import DecoderWeights, check_weights
from photon_ext.runtime import Runtime

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer
    from photon_ext.models.vision import VisionEncoder
    from photon_ext.runtime.ports import RuntimePort
    from photon_ext.runtime.step import Forward
    from photon_ext.scheduling.adapters import AdapterStore


@dataclass(frozen=True)
class EngineParts:
    """What runs a model, as `Engine` takes it.

    Attributes:
        runtime: a Runtime with a page size, or a simulated device.
        forward: the model's forward over this runtime's pages, 0 to num_pages - 1.
        vocab_size: width of the logits; token ids lie below it.
        num_pages: KV pages, one at least.
        tokenizer: for string prompts, text and stop strings; None serves token ids.
        eos_ids: tokens that end an answer.
        device: what the meter says about where it runs; "cpu" leaves the engine without threads for
            the masks of grammars, as the forward takes the cores.
        adapters: the slots of adapters that the forward knows; None: it knows none.
        embeds: the forward's memory for embeddings, [places, hidden], on its device: the i-th is
            that of token -2 - i. None: it takes tokens alone.
        vision: makes embeddings of the images of prompts; on a device of its own choice, on the
            threads of callers.
        region: of the region heads that the forward has; None: it has none.
        prompt_logprobs: the forward calls ``step.score``, see Pipeline.
    """

    runtime: RuntimePort
    forward: Forward
    vocab_size: int
    num_pages: int
    tokenizer: Tokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    device: str = "cpu"
    adapters: AdapterStore | None = None
    embeds: torch.Tensor | None = None
    vision: VisionEncoder | None = None
    region: RegionConfig | None = None
    prompt_logprobs: bool = False


def make_parts(
    options: EngineOptions,
    config: ModelConfig,
    weights: DecoderWeights,
    tokenizer: Tokenizer | None = None,
    vision: VisionEncoder | None = None,
    region: RegionHeads | None = None,
) -> tuple[EngineParts, EngineOptions]:
    """The parts for a model, and the options with the sizes that they were made for. Raises as
    Engine.from_weights.
    """
    runtime, decoder, size = make_model(options, config, weights, region)
    parts = EngineParts(
        runtime,
        decoder.forward,
        vocab_size=config.vocab,
        num_pages=size.num_pages,
        tokenizer=tokenizer,
        eos_ids=tuple(config.eos_ids),
        device=str(weights.device),
        adapters=decoder.lora,
        embeds=decoder.embeds,
        vision=vision,
        region=None if region is None else region.config,
        prompt_logprobs=True,
    )
    return parts, replace(options, chunk=size.chunk, prefill_buckets=size.prefill_buckets)


def make_model(
    options: EngineOptions,
    config: ModelConfig,
    weights: DecoderWeights,
    region: RegionHeads | None = None,
) -> tuple[Runtime, Decoder, EngineSize]:
    """A runtime, the decoder over its pages, and their sizes. Raises as Engine.from_weights."""
    check_weights(config, weights)
    heads = checked_config(region)
    plan = options.kernel_plan or plan_for(
        config, weights, options.backend, options.exact, options.activations
    )
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
        kv_dtype=options.kv_dtype,
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
