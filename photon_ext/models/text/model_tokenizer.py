"""model_tokenizer: the tokenizer of a model, read without its weights, and without torch."""

from __future__ import annotations

from pathlib import Path

from photon_ext.errors import ModelError
from photon_ext.models.text.text_files import present, read_text
from photon_ext.models.text.tokenizer import TOKENIZER_FILE, Tokenizer


def model_tokenizer(path: Path, chat_template: Path | None = None) -> Tokenizer:
    """
    Args:
        path: a Hugging Face directory, or a .gguf file.
        chat_template: a file whose template replaces the model's own; None: it does not.

    Raises ModelError: a file is missing or damaged.
    """
    if path.is_dir():
        if not present(path / TOKENIZER_FILE):
            raise ModelError(f"{path}: has no {TOKENIZER_FILE}; copy the model's own there")
        tokenizer = Tokenizer.from_directory(path)
    else:
        from photon_ext.models.loading.gguf_file import (
            GgufFile,
        )  # the package gguf is needed for this format alone

        tokenizer = Tokenizer.from_gguf(GgufFile(path))
    if chat_template is not None:
        tokenizer.use_template(read_text(chat_template), str(chat_template))
    return tokenizer
