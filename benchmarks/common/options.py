"""Command-line options that several benchmarks have."""

from __future__ import annotations

import argparse

import torch

from photon_ext import fast_kernels_run

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def integers(text: str) -> list[int]:
    """ "1,8,32" as positive integers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 1,8,32") from None
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value below 1")
    return values


def names(text: str) -> list[str]:
    """ "a,b" as a list."""
    return [part for part in text.split(",") if part]


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with --device and --json."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="auto", help="auto (the GPU if torch sees one), cpu, cuda or cuda:N")
    made.add_argument("--json", metavar="FILE", help="write the result here")
    return made


def fast_kernels_option(options: argparse.ArgumentParser) -> None:
    """--fast-kernels."""
    options.add_argument("--fast-kernels", action="store_true", help="decode with the kernels made for Hopper, where they fit")


def running_kernels(args: argparse.Namespace) -> str:
    """Which kernels --fast-kernels leads to on --device with --dtype, None being bfloat16 as a rule: "fast" or "portable"."""
    fits = args.dtype in (None, "bfloat16") and device_of(args.device).type == "cuda" and fast_kernels_run()
    return "fast" if args.fast_kernels and fits else "portable"


def device_of(name: str) -> torch.device:
    """The torch device that --device names."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
