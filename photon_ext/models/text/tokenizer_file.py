"""tokenizer.json, through the `tokenizers` library.

A file that would end the process or fill its memory is refused before it runs.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from photon_ext.errors import ModelError, PhotonError, shortened, shown
from photon_ext.models.text.text_files import parse_json, read_text

MAX_GROWTH = (
    1024  # how much longer the steps of a tokenizer may make a text; known ones stay under 200
)
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")  # where a Sequence keeps them


@contextmanager
def library_errors(kind: type[PhotonError], what: str) -> Iterator[None]:
    """Turns what the library raises, a bare Exception or a panic of Rust, into `kind`.

    `what`: the file and what failed.
    A panic is a BaseException, which nobody catches by accident: it would end the thread.
    """
    try:
        yield
    except BaseException as error:
        if is_library_error(error):
            raise kind(f"{what} ({shortened(str(error))})") from error
        raise


def is_library_error(error: BaseException) -> bool:
    """Whether the library raised it: it has no exceptions of its own but for the panics."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def read_backend(path: Path) -> Backend:
    """The tokenizer of a tokenizer.json.

    Truncation and padding, which a trainer may have left in it, are no part of a prompt's ids.

    Raises:
        ModelError: it is missing or damaged, or makes texts longer than `MAX_GROWTH` allows.
    """
    text = read_text(path)
    values = parse_json(text, path)
    _check_merges(values, path)
    with library_errors(ModelError, f"{path}: not a tokenizer that the tokenizers library reads"):
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    encoding = [
        growth(values.get(key)) for key in ("normalizer", "pre_tokenizer", "post_processor")
    ]
    for what, factor in (
        ("encoding", math.prod(encoding)),
        ("decoding", growth(values.get("decoder"))),
    ):
        if factor > MAX_GROWTH:
            raise ModelError(
                f"{path}: {what} may make a text {factor:.3g} times as long, expected up to "
                f"{MAX_GROWTH} times; "
                "see the Replace steps, or download the file again"
            )
    return backend


def _check_merges(values: Mapping[str, Any], path: Path) -> None:
    """Whether tokens that continue a word have their prefix.

    The library cuts it off without a look, and may end the process where it is not there.
    """
    model = values.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise ModelError(
                f"{path}: the merge {shown(merge)} continues no word, expected two tokens, "
                f"the second with the prefix {shown(prefix)}; download the file again"
            )


def growth(step: object) -> float:
    """How many times as long a step of a tokenizer may make a text, or its ids, at the most."""
    if not isinstance(step, dict):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        return math.prod(growth(part) for key in _STEPS for part in step.get(key) or ())
    if kind == "Replace":
        pattern, content = step["pattern"], len(step["content"])
        found = len(
            pattern.get("String", "")
        )  # an expression may match nothing, between all characters
        return max(1.0, content / found) if found else 1.0 + content
    if kind == "Precompiled":
        return float(_longest(step["precompiled_charsmap"]))
    if kind == "ByteLevel":
        return 4.0  # bytes of a character, each a character then
    if kind == "TemplateProcessing":
        return max(1.0, float(sum("Sequence" in piece for piece in step["single"])))
    return 1.0


def _longest(charsmap: str) -> int:
    """Characters of the longest text that a SentencePiece map puts in place of a few characters."""
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(
        b"\0"
    )  # behind the search tree
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
