"""Our weights as a transformers model, and as a checkpoint directory that every engine can load.

python -m benchmarks.common.checkpoint --model qwen3-0.6b --dtype bfloat16 DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.options import DTYPES, device_of, parser
from benchmarks.common.result import BenchmarkError
from photon_ext.dequantize import dequantized
from photon_ext.models.config import Family, ModelConfig, RopeScalingKind
from photon_ext.models.weights import DecoderWeights, other_slots, weight_modules

SHARD_SIZE = "4GB"


def transformers_model(config: ModelConfig, weights: DecoderWeights) -> Any:
    """transformers' model around our weights, of which it shares the dense ones: their dtype, their
    device.
    """
    return _model(config, weights, weights.device)


def write_checkpoint(config: ModelConfig, weights: DecoderWeights, directory: Path) -> None:
    """config.json and safetensors, as transformers writes them."""
    _model(config, weights, torch.device("meta")).save_pretrained(
        directory, max_shard_size=SHARD_SIZE
    )


def _model(config: ModelConfig, weights: DecoderWeights, device: torch.device) -> Any:
    """The model with our weights; `device` is where it makes its own parameters, which are dropped,
    and its rotary tables, which stay."""
    import transformers

    if config.family not in (Family.LLAMA, Family.QWEN3):
        told = f"a {config.family.value} model is not written as a transformers checkpoint"
        raise BenchmarkError(f"{told}; use a model of the Llama or Qwen3 family")
    qwen3 = config.family is Family.QWEN3
    config_class: Any = transformers.Qwen3Config if qwen3 else transformers.LlamaConfig
    model_class: Any = transformers.Qwen3ForCausalLM if qwen3 else transformers.LlamaForCausalLM
    values = config_class(
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        vocab_size=config.vocab,
        rms_norm_eps=config.rms_eps,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=config.tied_embeddings,
        max_position_embeddings=config.max_positions,
        bos_token_id=None,
        eos_token_id=None,
        dtype=weights.dtype,
    )
    with device:
        made: Any = model_class(values)
    slots = dict(other_slots(weights))
    for name, weight in weight_modules(weights):
        slots[f"{name}.weight"] = dequantized(weight).to(weights.dtype)
    missing, unexpected = made.load_state_dict(slots, strict=False, assign=True)
    made.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        wrong = f"missing {missing}, unexpected {unexpected}"
        raise BenchmarkError(f"weights do not fit transformers' model: {wrong}")
    return made.eval()


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The rotary settings in transformers' words."""
    scaling = config.rope_scaling
    values: dict[str, Any] = {"rope_type": scaling.kind.value, "rope_theta": config.rope_theta}
    if scaling.kind is RopeScalingKind.FACTORS:
        told = "rope factors of a GGUF file have no name in a transformers config"
        raise BenchmarkError(f"{told}; use the Hugging Face directory")
    if scaling.kind is not RopeScalingKind.NONE:
        values["factor"] = scaling.factor
    if scaling.kind is RopeScalingKind.LLAMA3:
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
        values["original_max_position_embeddings"] = scaling.original_max_positions
    return values


def main(given: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    known = f"one of {', '.join(SHAPES)}: random weights"
    options.add_argument("--model", required=True, help=known)
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options.add_argument("directory", type=Path)
    args = options.parse_args(given)
    config, weights = open_model(args.model, DTYPES[args.dtype], device_of(args.device))
    write_checkpoint(config, weights, args.directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
