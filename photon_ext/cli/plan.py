"""`photon-ext info --plan MODEL`: which kernels the steps of a model run, and why where it is not
the one that was asked for. A Hugging Face directory or a named shape needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import groupby

from photon_ext.cli import starting
from photon_ext.cli.step_kernels import TORCH, TORCH_FP8, WITHIN, Entry, Setting, step_kernels
from photon_ext.errors import ModelError
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    GPUS,
    Target,
    gpu_target,
    hopper_unsupported,
    kept_config,
    plan_kernels,
    roomy_config,
    target_of,
)
from photon_ext.models.requantize import requantized
from photon_ext.models.shapes import NAMED_SHAPES

DEFAULT_GPU = "h200"
_TITLES = {"decode": "decode steps, by tokens", "chunks": "steps with chunks of prompts, by tokens"}
_EXACT = (
    "balanced_attention cuts contexts at fixed positions; an engine whose steps may have more than "
    "4,096 tokens attends to chunks by chunk_attention in all of them"
)
_LEGEND = f"""\
{WITHIN}: part of another kernel; {TORCH}: torch's products; {TORCH_FP8}: of tokens in fp8; \
the others: csrc/cuda, less "_kernel"
In steps with chunks attention of decode rows goes by their number, the head by that of segments."""


def planned(arguments: argparse.Namespace) -> str:
    """The report, or with --json an object. Raises ModelError: there is no such model."""
    with starting():
        config = _config(arguments.plan)
        device, target = _target(arguments.device)
    dtype = arguments.dtype or ("float32" if config.prefers_float32 else "bfloat16")
    in_files = config.quantization
    config = _in_memory(config, arguments.quantize, target, dtype)
    plan = plan_kernels(
        config, target, dtype, arguments.backend, arguments.exact, arguments.activations
    )
    fp8_kv = arguments.kv_dtype is not None
    entries = step_kernels(Setting(config, target, dtype, plan, fp8_kv=fp8_kv))
    backend = "hopper" if plan.hopper else "portable"
    unsupported = hopper_unsupported(config, target, dtype)
    if arguments.json:
        head = {"model": arguments.plan, "device": device, "dtype": dtype}
        ops = [entry._asdict() for entry in entries]
        return json.dumps(
            {
                **head,
                "quantization": str(config.quantization) if config.quantization else None,
                "quantization_of_files": str(in_files) if in_files else None,
                "kv_dtype": arguments.kv_dtype,
                "activations": arguments.activations,
                "backend": backend,
                "exact": arguments.exact,
                "hopper_unsupported": unsupported,
                "kernels": ops,
            }
        )
    exact = ", exact" if arguments.exact else ""
    stored = f", {config.quantization}" if config.quantization else ""
    if in_files and not config.quantization:
        stored = f", expanded from {in_files}"
    stored += f", keys and values in {arguments.kv_dtype}" if fp8_kv else ""
    stored += f", activations in {arguments.activations}" if plan.fp8_activations else ""
    lines = [f"{arguments.plan} in {dtype}{stored} on {device}: backend {backend}{exact}"]
    if unsupported and backend == "portable" and arguments.backend is None:
        lines.append(f"hopper was not chosen: {unsupported}")
    if unsupported and backend == "hopper" and arguments.exact:
        lines.append(f"an engine with exact=True refuses this: {unsupported}")
    for step, title in _TITLES.items():
        lines += ["", *_block(title, [entry for entry in entries if entry.step == step])]
    runs_exact = plan.exact_attention and any(one.kernel == "balanced_attention" for one in entries)
    notes = [f"exact: {_EXACT}"] if runs_exact else []
    return "\n".join([*lines, "", *_reasons(entries), *notes, _LEGEND])


def _config(model: str) -> ModelConfig:
    if model in NAMED_SHAPES:
        return NAMED_SHAPES[model]
    from photon_ext.models.loading.model_files import read_config

    try:
        return read_config(model)
    except ModelError as error:
        if os.path.lexists(model):
            raise
        raise ModelError(f"{error}, or one of {', '.join(NAMED_SHAPES)}") from error


def _in_memory(
    stored: ModelConfig, quantize: str | None, target: Target, dtype: str
) -> ModelConfig:
    """As a GPU has it, by `quantize` of load_model; None: one that has room for all."""
    if quantize is None:
        return roomy_config(stored, target, dtype)
    if quantize == "stored":
        return kept_config(stored, target, dtype)
    return requantized(stored, quantize)


def _target(name: str | None) -> tuple[str, Target]:
    """A GPU by name; None: the one that is here, and where there is none DEFAULT_GPU."""
    if name is None:
        try:
            import torch
        except ImportError:
            pass
        else:
            if torch.cuda.is_available():
                return torch.cuda.get_device_name(), target_of(torch.device("cuda"))
    name = name or DEFAULT_GPU
    return name, gpu_target(GPUS[name], os.environ.get("PHOTON_HOPPER_ON_10") == "1")


def _block(title: str, entries: list[Entry]) -> list[str]:
    """A table: an op a line, a column for each range of tokens in which no op changes."""
    starts = sorted({entry.least for entry in entries})
    ends = [start - 1 for start in starts[1:]]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=False)]
    rows = [[title, *ranges, f"{starts[-1]}+"]]
    for op, group in groupby(entries, lambda entry: entry.op):
        of_op = list(group)
        cells = [[e for e in of_op if e.least <= start][-1] for start in starts]
        rows.append([f"  {op}", *(cell.kernel + "*" * bool(cell.why) for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _reasons(entries: list[Entry]) -> list[str]:
    """Why an op runs another kernel than was asked for: once for each reason."""
    ops: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if entry.why:
            named = ops.setdefault((entry.why, entry.kernel), [])
            named += [entry.op] * (entry.op not in named)
    return [f"* {kernel} ({'; '.join(names)}): {why}" for (why, kernel), names in ops.items()]
