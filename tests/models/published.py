"""config.json of published models, with every field that they have and the sizes of tiny models."""

from __future__ import annotations

from typing import Any

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5": {
        **TINY_SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "mistral-0.1": {
        **TINY_SIZES,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 60,
        "tie_word_embeddings": False,
    },
    "mistral-0.3": {
        **TINY_SIZES,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "phi-4-mini": {
        **TINY_SIZES,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "original_max_position_embeddings": 64,
        "pad_token_id": 2,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0, 1.3, 2.0, 4.5, 9.0, 20.0],
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
}
