"""Command-line options that several benchmarks have."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from pathlib import Path
from typing import get_args

import torch

from benchmarks.common.command import command
from benchmarks.common.shapes import SHAPES
from photon_ext.checks import Backend
from photon_ext.engine.options import choose_backend
from photon_ext.errors import DeviceError
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


def integer_from_zero(text: str) -> int:
    """One integer that may be 0."""
    return 0 if text == "0" else positive_integer(text)


def positive_number(text: str) -> float:
    """A positive number: seconds, GiB."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def number_from_zero(text: str) -> float:
    """A number from 0 on."""
    return 0.0 if text in ("0", "0.0") else positive_number(text)


def png_file(text: str) -> Path:
    """A PNG that can be written."""
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return path


def writable_folder(text: str) -> str:
    """A directory that can be written into."""
    if not Path(text).is_dir() or not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is no directory that can be written into")
    return text


def names(text: str) -> list[str]:
    """ "a,b" as a list of one name or more."""
    found = [part for part in text.split(",") if part]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def device_name(text: str) -> str:
    """ "auto", or the name of a device that is there."""
    if text != "auto":
        try:
            checked_device(text)
        except DeviceError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def output_file(text: str) -> Path:
    """A file that can be written.

    It is not made yet, nor is its directory, which may be missing.
    """
    path = Path(text)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # a name that is too long: newer Pythons' `exists` does not tell
        if path.is_dir() or not path.name:
            raise argparse.ArgumentTypeError(f"{text!r} is a directory; name a file in it")
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text!r} is no plain file; name another")
        above = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {str(above)!r} is no directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {str(above)!r} is not writable")
    return path


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with --device and --json."""
    made = argparse.ArgumentParser(prog=command(), description=description)
    made.add_argument(
        "--device",
        type=device_name,
        default="auto",
        help="auto (the GPU if torch sees one), cpu, cuda or cuda:N",
    )
    made.add_argument("--json", type=output_file, metavar="FILE", help="write the result here")
    return made


def models_option(options: argparse.ArgumentParser) -> None:
    """--model, of which there may be several."""
    help_text = f"one or more of {', '.join(SHAPES)}, smollm2, or a model's path"
    options.add_argument("--model", type=names, default=["qwen3-0.6b"], help=help_text)


def backend_option(options: argparse.ArgumentParser) -> None:
    """--backend."""
    options.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="which kernels run; by default hopper, where they run",
    )


def backend_of(args: argparse.Namespace) -> Backend:
    """What --backend says; where it says nothing, hopper if it runs on --device with --dtype, None
    being bfloat16 as a rule.
    """
    dtype = DTYPES[args.dtype or "bfloat16"]
    return choose_backend(args.backend, str(device_of(args.device)), dtype)


def use_hopper(args: argparse.Namespace) -> bool:
    """Whether that is the hopper backend."""
    return backend_of(args) == "hopper"


def running_kernels(args: argparse.Namespace) -> str:
    """Which kernels that leads to: "fast" or "portable"."""
    dtype = DTYPES[args.dtype or "bfloat16"]
    runs = choose_backend(None, str(device_of(args.device)), dtype) == "hopper"
    return "fast" if use_hopper(args) and runs else "portable"


def device_of(name: str) -> torch.device:
    """The torch device that --device names."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
