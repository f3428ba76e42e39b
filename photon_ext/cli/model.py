"""From arguments to an engine and its parameters, for `generate` and `chat`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import photon_ext
from photon_ext.cli.terminal import complain
from photon_ext.engine import Engine
from photon_ext.errors import ModelError
from photon_ext.models.loading.model_files import resolve_model
from photon_ext.row_params import flags
from photon_ext.sampling import SamplingParams

TOKENIZER_FILE = "tokenizer.json"


def sampling_params(arguments: argparse.Namespace, **others: Any) -> SamplingParams:
    """What the arguments ask of an answer, and `others`. Raises ConfigError."""
    own = {name: getattr(arguments, name) for name in flags()}
    return SamplingParams(**own, stop=tuple(arguments.stop), **others)


def open_engine(arguments: argparse.Namespace, **options: Any) -> Engine:
    """An engine of one row, with `options` besides those of the arguments.

    Raises:
        PhotonError: as Engine.from_pretrained; ModelError also where the model has no tokenizer.
    """
    path = resolve_model(arguments.model)
    if path.is_dir() and not (path / TOKENIZER_FILE).exists():
        raise ModelError(
            f"{path} has no {TOKENIZER_FILE}; copy it there (save_pretrained of the tokenizer)"
        )
    if sys.stderr.isatty():  # somebody waits
        complain(f"loading {arguments.model} ...")
    engine = Engine.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        depth=arguments.depth,
        backend=arguments.backend,
        kv_dtype=arguments.kv_dtype,
        max_len=arguments.max_len,
        max_rows=1,
        **options,
    )
    runs = engine.device.startswith("cuda") and photon_ext.hopper_runs()
    if arguments.backend == "hopper" and not runs:
        complain(
            f"photon-ext {arguments.command}: --backend hopper changes nothing on {engine.device}; "
            "photon-ext info says which kernels run"
        )
    return engine
