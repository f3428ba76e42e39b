"""A `tokenizers` backend from a GGUF file: its byte-level BPE, which GGUF calls "gpt2"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from photon_ext.errors import ModelError, shown
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.text.tokenizer_file import library_errors


class _PreTokenizer(NamedTuple):
    """How text is cut before merges apply. `pattern` None: GPT-2's own expression."""

    pattern: str | None
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is a token of its own is taken whole
    add_bos: bool = False  # unless the file says otherwise
    nfc: bool = False


def _words(digits: str) -> str:
    """The expression that Llama 3 and Qwen 2 share but for how many digits go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# tokenizer.ggml.pre -> how the model's original tokenizer cuts text.
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(None),
    "smollm": _PreTokenizer(None, single_digits=True),
    "llama-bpe": _PreTokenizer(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(_words(r"\p{N}"), nfc=True),
}


def gguf_backend(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer.

    Raises ModelError, naming the file, for a vocabulary that is not supported or is damaged.
    """
    fields = ConfigReader(file.fields, str(file.path))
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not "
            "supported; supported are 'gpt2' with "
            f"{', '.join(_PRE_TOKENIZERS)}; use the model's Hugging Face directory, whose "
            "tokenizer.json says it all"
        )
    what = f"{file.path}: vocabulary and merges do not fit together; download the file again"
    with library_errors(ModelError, what):
        return _backend(fields, _PRE_TOKENIZERS[pre])


def _backend(fields: ConfigReader, rules: _PreTokenizer) -> Tokenizer:
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    merges = _Merges(_texts(fields, "tokenizer.ggml.merges"))
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rules)
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(backend, tokens, fields.items("tokenizer.ggml.token_type"))
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and fields.flag("tokenizer.ggml.add_bos_token", rules.add_bos):
        if not isinstance(bos_id, int) or not 0 <= bos_id < len(tokens):
            fields.refuse("tokenizer.ggml.bos_token_id", f"an id below {len(tokens)}")
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )
    return backend


class _Merges(Sequence[tuple[str, str]]):
    """What merges, pair by pair as it is asked for: all pairs at once would start the garbage
    collector, which takes as long as the rest.
    """

    def __init__(self, texts: list[str]) -> None:
        """`texts`: of two tokens each, with a blank between."""
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return _pair(self._texts[index])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(_pair, self._texts)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _texts(fields: ConfigReader, key: str) -> list[str]:
    values = fields.items(key)
    if not all(isinstance(value, str) for value in values):
        fields.refuse(key, "a list of texts")
    return values


def _pre_tokenizer(rules: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _add_marked_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found before text is cut.

    Control tokens are left out of decoded text.
    """
    marked = (TokenType.CONTROL, TokenType.USER_DEFINED)
    backend.add_tokens(
        [
            AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in marked
        ]
    )
