"""LlamaCpp: greedy sequences side by side through llama.cpp's batches, on a CPU."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.result import BenchmarkError

_UNIT = 256  # tokens: llama.cpp makes the context of a sequence a multiple of it


class Answers(NamedTuple):
    """New token ids of each sequence, seconds until their first, and from there to the last."""

    tokens: list[list[int]]
    first_s: float
    rest_s: float


class LlamaCpp:
    """llama.cpp through the bindings of llama-cpp-python, with its own settings but for sizes.

    Args:
        path: a .gguf file.
        longest: tokens of a sequence, at most.
        threads: that compute.
        sequences: at once, at most.
        batch: tokens that are decoded together, at most: those of all prompts.

    Raises:
        BenchmarkError: it cannot load the model.
    """

    def __init__(
        self, path: Path, longest: int, threads: int, sequences: int = 1, batch: int = 512
    ) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *said: None)  # must outlive the model
        llama_cpp.llama_log_set(self._quiet, None)
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise BenchmarkError(f"llama.cpp cannot load {path}")
        sizes = llama_cpp.llama_context_default_params()
        sizes.n_ctx = sequences * -(-longest // _UNIT) * _UNIT
        sizes.n_seq_max, sizes.n_batch, sizes.n_ubatch = sequences, batch, batch
        sizes.n_threads = sizes.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, sizes)
        if not self._context:
            raise BenchmarkError(f"llama.cpp has no room for {sequences} x {longest} tokens")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)

    @property
    def about(self) -> str:
        """Its version, and what it was built to use of the processor."""
        system = self._api.llama_print_system_info().decode()
        used = [part.split("=")[0].split(":")[-1].strip() for part in system.split("|")]
        return f"llama-cpp-python {self._api.__version__}: {' '.join(filter(None, used))}"

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Answers:
        """From an empty cache: the likeliest tokens, counts[i] behind prompts[i], with no end token
        heeded. All prompts are one batch, then each step has a token of every sequence that goes
        on.
        """
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        begin = time.perf_counter()
        tokens = [[one] for one in self._decode(dict(enumerate(prompts)), [0] * len(prompts))]
        first = time.perf_counter()
        while going := [i for i, count in enumerate(counts) if len(tokens[i]) < count]:
            places = [len(prompts[i]) + len(tokens[i]) - 1 for i in going]
            for i, token in zip(
                going, self._decode({i: tokens[i][-1:] for i in going}, places), strict=True
            ):
                tokens[i].append(token)
        return Answers(tokens, first - begin, time.perf_counter() - first)

    def _decode(self, given: dict[int, Sequence[int]], places: list[int]) -> list[int]:
        """The likeliest token behind those of each sequence, which begin at its place."""
        batch, ends, at = self._batch, [], 0
        for (sequence, tokens), place in zip(given.items(), places, strict=True):
            for offset, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, place + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(tokens) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if status := self._api.llama_decode(self._context, batch):
            raise BenchmarkError(f"llama_decode of {at} tokens returned {status}")
        return [self._likeliest(end) for end in ends]

    def _likeliest(self, at: int) -> int:
        import numpy

        logits = self._api.llama_get_logits_ith(self._context, at)
        return int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


@contextmanager
def opened(path: Path | None, *sizes: int) -> Iterator[LlamaCpp | None]:
    """A LlamaCpp of these sizes, or None without a path; closed at the end."""
    llama = None if path is None else LlamaCpp(path, *sizes)
    try:
        yield llama
    finally:
        if llama is not None:
            llama.close()


def why_absent(path: Path | None) -> str:
    """Why it cannot run a model, or ""; path: its .gguf file, None where it has none."""
    if path is None:
        return "needs a .gguf file, which this model is not"
    if importlib.util.find_spec("llama_cpp") is None:
        return "not installed: pip install llama-cpp-python"
    return ""
