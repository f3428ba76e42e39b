"""Case: one op at one shape, ready to run; Plan: how to make it, and what this build must have
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.common.replay import Rotation, Run
from benchmarks.common.result import BenchmarkError
from photon_ext import reference

# Relative error by norm against the reference in the same dtype: both round, and sum in orders of
# their own.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Setting(NamedTuple):
    """What all cases of a run share."""

    device: torch.device
    dtype: torch.dtype
    rotation: Rotation


class Baseline(NamedTuple):
    """What torch needs for the same: `name` says which calls, one run per rotated operand."""

    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        runs: one per rotated operand.
        nbytes: bytes that a run must read and write; 0 where they are to stay in the cache.
        verify: runs the op once and returns its relative error; raises BenchmarkError if it is
            wrong.
        baseline: None where torch has nothing to compare with.
        cold: whether the rotated operands are larger than the cache.
        flops: multiplications and additions of a run, where they are the limit; else 0.
        dependencies: kernels of a run of which each waits for the one before.
    """

    runs: Sequence[Run]
    nbytes: int
    verify: Callable[[], float]
    baseline: Callable[[], Baseline] | None
    cold: bool
    flops: int = 0
    dependencies: int = 1


@dataclass(frozen=True)
class Plan:
    """A case that is not made yet.

    Attributes:
        ops: the names in torch.ops.photon_ext; more than one for a chain.
        what: which use of it: "qkv", "down", ...
        labels: batch, context, ...: everything else that tells this case from others.
        way: "plain" where an op has one path, "portable" and "fast" where it has two, "torch" for
            torch's calls alone.
        make: allocates operands, and makes the case.
        memory: bytes that `make` allocates, about; more than is free: the case is skipped.
    """

    ops: tuple[str, ...]
    what: str
    labels: dict[str, Any]
    way: str
    make: Callable[[], Case]
    memory: int = 0

    @property
    def baseline_key(self) -> tuple[object, ...]:
        """Equal for cases whose baselines are the same."""
        return (self.ops, self.what, *self.labels.values())

    def missing(self) -> str | None:
        """What this build lacks for it; None: nothing."""
        for op in self.ops if self.way != "torch" else ():
            if not hasattr(torch.ops.photon_ext, op):
                return f"torch.ops.photon_ext has no {op} in this build"
            if self.way == "fast" and "fast" not in argument_names(op):
                return f"{op} has no argument fast in this build"
        return None


def argument_names(op: str) -> list[str]:
    """The arguments of an op's schema; empty where there is no such op."""
    if not hasattr(torch.ops.photon_ext, op):
        return []
    return [
        argument.name for argument in getattr(torch.ops.photon_ext, op).default._schema.arguments
    ]


def way_arguments(op: str, way: str) -> dict[str, Any]:
    """The keyword arguments that choose a way."""
    return {"fast": way == "fast"} if "fast" in argument_names(op) else {}


@dataclass
class Lazy:
    """A value that is made when it is first asked for: operands shared by the cases of one
    shape.
    """

    make: Callable[[], Any]
    _made: list[Any] = field(default_factory=list)

    def __call__(self) -> Any:
        if not self._made:
            self._made.append(self.make())
        return self._made[0]


def bind(op: str, *args: object, way: str = "plain", **options: object) -> Run:
    """A call of an op through torch's dispatcher, its overload resolved once."""
    call, options = getattr(torch.ops.photon_ext, op).default, way_arguments(op, way) | options
    return lambda: call(*args, **options)


def verify_call(op: str, args: Sequence[Any], written: Sequence[int], way: str) -> float:
    """Runs an op and its reference on copies of the arguments that it writes, and compares those.

    Returns the largest relative error.
    """
    expected, actual = list(args), list(args)
    for index in written:
        expected[index], actual[index] = _copy(args[index]), _copy(args[index])
    getattr(reference, op)(*expected)
    bind(op, *actual, way=way)()
    return max(
        compare(f"{op}, argument {index}", one, other)
        for index in written
        for one, other in zip(_listed(actual[index]), _listed(expected[index]), strict=True)
    )


def _listed(argument: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return argument if isinstance(argument, list) else [argument]


def _copy(argument: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(argument, list):
        return [tensor.clone() for tensor in argument]
    return argument.clone()


def check_finite(name: str, actual: torch.Tensor) -> None:
    """Raises BenchmarkError where the result holds NaN or inf."""
    if not bool(torch.isfinite(actual).all()):
        raise BenchmarkError(f"{name}: the result holds NaN or inf")


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> float:
    """The relative error by norm; integers must be equal.

    Raises BenchmarkError beyond the dtype's bound times `slack`.
    """
    if not actual.dtype.is_floating_point:
        if not torch.equal(actual, expected):
            raise BenchmarkError(
                f"{name}: {int((actual != expected).sum())} of {actual.numel()} integers are not "
                "the reference's"
            )
        return 0.0
    check_finite(name, actual)
    size = float(torch.linalg.vector_norm(expected.double()))
    error = float(torch.linalg.vector_norm(actual.double() - expected.double())) / (size or 1.0)
    bound = BOUNDS[actual.dtype] * slack
    if error > bound:
        raise BenchmarkError(
            f"{name}: relative error {error:.3g} against the reference, the bound is {bound:g}"
        )
    return error


def normal(setting: Setting, *shape: int, deviation: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Random numbers on the device; the same at every call with the same shape and seed."""
    made = torch.empty(shape, dtype=setting.dtype, device=setting.device)
    return made.normal_(
        0.0, deviation, generator=torch.Generator(device=setting.device).manual_seed(seed)
    )


def unwritten(setting: Setting, *shape: int) -> torch.Tensor:
    """An output full of NaN, so that what an op leaves out is seen."""
    return torch.full(shape, float("nan"), dtype=setting.dtype, device=setting.device)


def ints(setting: Setting, values: object) -> torch.Tensor:
    """int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=setting.device)
