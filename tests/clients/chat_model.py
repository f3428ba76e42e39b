"""A tiny random model with a tokenizer of bytes, and a chat template that knows tools."""

from __future__ import annotations

import json
from pathlib import Path

from tests.serve.http.words import IM_END, TEMPLATE, special_backend
from tests.serve.tiny import save_weights

MAX_LEN = 32768


def save_chat_model(folder: Path) -> None:
    """For our server, and for transformers."""
    backend = special_backend()
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(
        folder,
        vocab_size=backend.get_vocab_size(),
        eos_token_id=IM_END,
        max_position_embeddings=MAX_LEN,
    )
    (folder / "tokenizer.json").write_text(backend.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "model_max_length": MAX_LEN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
