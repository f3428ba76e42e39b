"""Command-line options that several benchmarks have, and sizes that fit the device."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.common.models import SHAPES
from benchmarks.common.result import read_runs
from photon_ext.checks import Backend
from photon_ext.errors import DeviceError
from photon_ext.models.kernel_plan import choose_backend, dtype_name, target_of
from photon_ext.runtime.runtime import checked_device

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def integers(text: str) -> list[int]:
    """ "1,8,32" as positive integers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of integers like 1,8,32"
        ) from None
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value below 1")
    return values


def positive_integer(text: str) -> int:
    """One positive integer."""
    values = integers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one positive integer")
    return values[0]


def positive_number(text: str) -> float:
    """A positive number: seconds, GiB."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def names(text: str) -> list[str]:
    """ "a,b" as a list of one name or more."""
    found = [part for part in text.split(",") if part]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads "fp8,int4" as names of these."""

    def read(text: str) -> list[str]:
        found = names(text)
        if unknown := [name for name in found if name not in known]:
            told = f"{unknown[0]!r} is unknown; give some of {', '.join(known)}"
            raise argparse.ArgumentTypeError(told)
        return found

    return read


def device_name(text: str) -> str:
    """ "auto", or the name of a device that is there."""
    if text != "auto":
        try:
            checked_device(text)
        except DeviceError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def output_file(text: str) -> Path:
    """A file that can be written. It is not made yet, nor is its directory, which may be
    missing."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no plain file; name one")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        told = f"{str(above)!r} is no directory that can be written into"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {told}")
    return path


def result_file(text: str) -> Path:
    """A file of results, perhaps with those of other runs."""
    path = output_file(text)
    try:
        if path.exists():
            read_runs(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def png_file(text: str) -> Path:
    """A PNG that can be written."""
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return path


def plain_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose usage line says `python -m benchmarks.decode`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    prog = None if spec is None else f"python -m {spec.name}"
    return argparse.ArgumentParser(prog=prog, description=description)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with --device and --json."""
    made = plain_parser(description)
    made.add_argument(
        "--device",
        type=device_name,
        default="auto",
        help="auto (the GPU if torch sees one), cpu, cuda or cuda:N",
    )
    told = "write the result here, as a line beside those of other runs"
    made.add_argument("--json", type=result_file, metavar="FILE", help=told)
    return made


def models_option(options: argparse.ArgumentParser) -> None:
    """--model, of which there may be several."""
    known = f"one or more of {', '.join(SHAPES)}, smollm2, or a model's path"
    options.add_argument("--model", type=names, help=f"{known}; default: one that fits the device")


def floor_option(options: argparse.ArgumentParser) -> None:
    """--floor-gib."""
    told = "GiB that the floor sweep reads; default 9 on CUDA, 1 on a CPU"
    options.add_argument("--floor-gib", type=positive_number, help=told)


def backend_option(options: argparse.ArgumentParser) -> None:
    """--backend."""
    options.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="which kernels run; by default hopper, where they run",
    )


def fit_to_device(
    args: argparse.Namespace, on_gpu: dict[str, Any], on_cpu: dict[str, Any]
) -> argparse.Namespace:
    """Options that were not given get the values for the device: a CPU's take about a minute."""
    defaults = on_gpu if device_of(args.device).type == "cuda" else on_cpu
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def backend_of(args: argparse.Namespace) -> Backend:
    """What --backend says; where it says nothing, what runs on --device with --dtype, None being
    bfloat16 as a rule."""
    return _backend(args, args.backend)


def running_kernels(args: argparse.Namespace) -> Backend:
    """Which kernels that leads to; results before had "fast" for hopper."""
    runs = _backend(args, None)
    return backend_of(args) if runs == "hopper" else runs


def _backend(args: argparse.Namespace, asked: Backend | None) -> Backend:
    dtype = dtype_name(DTYPES[args.dtype or "bfloat16"])
    return choose_backend(asked, target_of(device_of(args.device)), dtype)


def device_of(name: str) -> torch.device:
    """The torch device that --device names."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
