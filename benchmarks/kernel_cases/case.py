"""Case: one op at one shape, ready to run; Plan: how to make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common.replay import Rotation, Run
from benchmarks.common.result import BenchmarkError
from photon_ext import ops, reference
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.models.config import ModelConfig
from photon_ext.weight import Weight

# Relative error by norm against the reference in the same dtype: both round and sum differently.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Setting(NamedTuple):
    """A model's shapes on a device, and the sizes of one case; it makes the operands.

    Attributes:
        way: "plain" where an op has one path, "portable" and "hopper" where it has two.
        context, chunk: tokens of attention; 0 where there are none.
        form: the format of a weight that has fewer bits; "" where it is dense.
        fp8_tokens: what a linear reads of tokens is in fp8, too.
        pdl: Hopper kernels start while the ones before end, as in a decode step.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    rotation: Rotation
    batch: int = 1
    way: str = "plain"
    context: int = 0
    chunk: int = 0
    form: str = ""
    fp8_tokens: bool = False
    pdl: bool = False

    def normal(self, *shape: int, deviation: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Random numbers; the same at every call with the same shape and seed."""
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return made.normal_(0.0, deviation, generator=generator)

    def stack(self, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        """As many copies of an operand of this shape as are to be rotated."""
        copies = self.rotation.copies(self.nbytes(*shape))
        return self.normal(copies, *shape, deviation=deviation)

    def tokens(self, k: int) -> torch.Tensor | Fp8Tokens:
        """[batch, k], as a linear reads them."""
        x = self.normal(self.batch, k)
        if not self.fp8_tokens:
            return x
        made = self.unwritten_fp8(k)
        ops.quantize_fp8_into(made, x)
        return made

    def unwritten_fp8(self, k: int) -> Fp8Tokens:
        """Tokens [batch, k] whose scales are NaN."""
        data = torch.zeros(self.batch, k, dtype=torch.uint8, device=self.device)
        scale = torch.full((self.batch,), float("nan"), device=self.device)
        return Fp8Tokens(data.view(torch.float8_e4m3fn), scale)

    def nbytes(self, *shape: int) -> int:
        return torch.Size(shape).numel() * self.dtype.itemsize

    def gain(self, size: int) -> torch.Tensor:
        """The weight of a norm."""
        return 1 + self.normal(size, deviation=0.1)

    def unwritten(self, *shape: int) -> torch.Tensor:
        """An output full of NaN, so that what an op leaves out is seen."""
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def ints(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


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
        verify: runs the op and returns its relative error; BenchmarkError if it is wrong.
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
        setting: the sizes; `make` makes the case for them.
        memory: bytes that `make` allocates, about; more than is free: the case is skipped.
    """

    ops: tuple[str, ...]
    what: str
    setting: Setting
    make: Callable[[Setting], Case]
    memory: int = 0

    @property
    def labels(self) -> dict[str, Any]:
        """What tells this case from others of its op, use and way."""
        at = self.setting
        form = f"{at.form} x fp8" if at.fp8_tokens else at.form
        sizes = {"context": at.context, "chunk": at.chunk, "format": form}
        given = {name: size for name, size in sizes.items() if size}
        return {"batch": self.setting.batch, **given}


def bind(op: str, *args: object, way: str = "plain", pdl: bool = False, **options: object) -> Run:
    """A call of an op through torch's dispatcher, its overload resolved once; `way` replaces what
    is given for `hopper`, and `pdl` is for ops that have it. Of a Weight and of Fp8Tokens the op
    gets the parts.
    """
    call = getattr(torch.ops.photon_ext, op).default
    for one in args:
        if isinstance(one, Weight):
            code = one.format.code
            options |= {"weight_scale": one.scale, "weight_format": code, "weight_zero": one.zero}
            options["weight_divisor"] = one.divisor
        if isinstance(one, Fp8Tokens):
            options["x_scale"] = one.scale
    args = tuple(one.data if isinstance(one, (Weight, Fp8Tokens)) else one for one in args)
    for index, argument in enumerate(call._schema.arguments):
        if argument.name == "pdl" and pdl and way == "hopper":
            options["pdl"] = True
        if argument.name != "hopper":
            continue
        if index < len(args):
            args = (*args[:index], way == "hopper", *args[index + 1 :])
        else:
            options["hopper"] = way == "hopper"
    return lambda: call(*args, **options)


def rotated_case(
    setting: Setting,
    op: str,
    operands: Sequence[Any],
    arguments: Callable[[Any], tuple[Any, ...]],
    written: Sequence[int],
    nbytes: int,
    torch_calls: tuple[str, Callable[[Any], object]] | None = None,
    options: dict[str, object] | None = None,
) -> Case:
    """A case of one op, run with one operand after the other.

    Args:
        operands: what is rotated: tensors, weights, or anything else where nothing needs to be.
        arguments: the op's arguments with one of them. written: the indices of its outputs.
        nbytes: bytes that a run must read and write.
        torch_calls: what torch does with the same operand, its name first.
        options: arguments by name, which the op and its reference get besides.
    """

    def baseline() -> Baseline:
        assert torch_calls is not None
        name, call = torch_calls
        return Baseline(name, [partial(call, operand) for operand in operands])

    given = options or {}
    bound = partial(bind, op, way=setting.way, pdl=setting.pdl, **given)
    runs = [bound(*arguments(operand)) for operand in operands]
    verify = partial(verify_call, op, arguments(operands[0]), written, setting.way, given)
    first = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
    size = sum(each.nbytes for each in first if isinstance(each, torch.Tensor | Weight))
    cold = size > 0 and setting.rotation.cold(size)
    return Case(runs, nbytes, verify, None if torch_calls is None else baseline, cold)


def verify_call(
    op: str,
    args: Sequence[Any],
    written: Sequence[int],
    way: str,
    options: dict[str, object],
) -> float:
    """Runs an op and its reference on copies of what it writes; the largest relative error."""
    expected, actual = list(args), list(args)
    for index in written:
        expected[index], actual[index] = _copy(args[index]), _copy(args[index])
    getattr(reference, op)(*expected, **options)
    bind(op, *actual, way=way, **options)()
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

    Raises BenchmarkError for NaN or inf, and beyond the dtype's bound times `slack`.
    """
    if not actual.dtype.is_floating_point:
        if wrong := int((actual != expected).sum()):
            told = f"{wrong} of {actual.numel()} integers are not the reference's"
            raise BenchmarkError(f"{name}: {told}")
        return 0.0
    check_finite(name, actual)
    size = float(torch.linalg.vector_norm(expected.double()))
    difference = float(torch.linalg.vector_norm(actual.double() - expected.double()))
    error, bound = difference / (size or 1.0), BOUNDS[actual.dtype] * slack
    if error > bound:
        told = f"relative error {error:.3g} against the reference, the bound is {bound:g}"
        raise BenchmarkError(f"{name}: {told}")
    return error
