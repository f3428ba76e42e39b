"""The kernels that a plan names (`photon-ext info --plan`) are those that a decoder launches: in
processes of their own on the emulated kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from photon_ext.checks import Activations, Backend
from photon_ext.cli.step_kernels import TORCH, WITHIN, Entry, Setting, step_kernels
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import gpu_target, plan_kernels
from photon_ext.models.requantize import requantized
from tests.emulator.test_ops import run

# Steps of a two-layer model, and the addresses of the kernels that each of them launches.
SCRIPT = """
import ctypes, json, os, torch
from photon_ext._library import _ops_library as library
from photon_ext.models.kernel_plan import KernelPlan, ExecutionModes
from photon_ext.models.weights import random_weights
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.requantize import requantized
from tests.models.harness import Chunk, Harness

given = json.loads(os.environ["GIVEN"])
config = requantized(ModelConfig(Family.QWEN3, *given["shape"]), given["quantize"])
hopper, decode, chunks, *others = given["plan"]
plan = KernelPlan(hopper, ExecutionModes(*decode), ExecutionModes(*chunks), *others)
weights = random_weights(config, getattr(torch, given["dtype"]))
sizes = {"rows": 98, "max_step_tokens": 128}
decoder = Harness(config, weights, 112, 16, plan=plan, kv_dtype=given["kv_dtype"], **sizes)
library.photon_emulator_take_kernel.restype = ctypes.c_uint64
take = lambda: list(iter(library.photon_emulator_take_kernel, 0))

def kernels(step):
    take()
    step()
    return take()

def ids(count):
    return [i % config.vocab for i in range(count)]

found = []
for count in given["tokens"]:
    rows = range(1, count + 1)
    found.append([
        kernels(lambda: decoder.decode([*rows], [0] * count, ids(count))),
        kernels(lambda: decoder.prefill([Chunk(1, 0, ids(count))])),
    ])
decodes = [Chunk(row, 0, [row]) for row in (1, 2)]
found.append([kernels(lambda: decoder.mixed(decodes, [Chunk(3, 0, ids(10))]))])
print(json.dumps(found))
"""
# hidden, layers, q_heads, kv_heads, head_dim, intermediate, vocab
ROUND = (128, 2, 4, 2, 128, 128, 131)
GQA_3_OF_64 = (192, 2, 6, 2, 64, 320, 131)  # SmolLM2's groups
GQA_6 = (128, 2, 6, 1, 128, 128, 131)
ODD_OUTPUT = (320, 2, 7, 1, 96, 192, 131)  # q_size is 672
ODD_HIDDEN = (200, 2, 2, 1, 64, 192, 131)
SMALL_HEADS = (128, 2, 4, 2, 32, 128, 131)
MANY_SHARERS = (128, 2, 66, 1, 64, 128, 131)
NARROW_MLP = (576, 2, 2, 1, 64, 192, 131)
STORED = (256, 2, 4, 2, 128, 256, 136)
NOT_LAUNCHED = {WITHIN, TORCH, "sample", "sample (clusters)"}
NO_CHOICE = {"gather_rows", "decode_meta_set", "dequantize", "prepare_x", "quantize_fp8"}


@cache
def names_of(library: Path) -> dict[int, str]:
    """Of each kernel in the library, by its offset, less "_kernel"."""
    symbols = subprocess.run(["nm", "-C", str(library)], capture_output=True, text=True, check=True)
    found = re.findall(r"^(\w+) \w .*?(\w+)_kernel[<(]", symbols.stdout, re.MULTILINE)
    return {int(offset, 16): name for offset, name in found}


def expected(entries: list[Entry], step: str, tokens: dict[str, int]) -> set[str]:
    """What runs in a step, where `tokens` of "" are those of ops that it does not name; ops of no
    tokens do not run.
    """
    kernels = set()
    for entry in entries:
        count = tokens.get(entry.op, tokens[""])
        runs = entry.step == step and entry.least <= count
        if runs and (entry.most is None or count <= entry.most):
            kernels.add(entry.kernel)
    if "sum_norm" in kernels:
        kernels.add("rms_norm")  # in front of the first layer
    if "balanced_attention" in kernels:
        kernels.add("balanced_plan")  # at the head of the step
    return kernels - NOT_LAUNCHED


class Case(NamedTuple):
    """A model and what its plan follows from; `tokens` of the steps."""

    shape: tuple[int, ...]
    tokens: tuple[int, ...]
    exact: bool = False
    backend: Backend | None = None
    dtype: str = "bfloat16"
    capability: tuple[int, int] = (9, 0)
    fp8_kv: bool = False
    quantize: str = "none"
    activations: Activations | None = None


CASES = [
    Case(ROUND, (1, 8, 9, 32, 33, 64, 65, 97)),
    Case(ROUND, (64, 65, 96, 97), exact=True),
    Case(ROUND, (1, 32, 33), backend="portable"),
    Case(ROUND, (1, 33), backend="hopper", capability=(8, 0)),
    Case(ROUND, (1, 33), backend="hopper", dtype="float16"),
    Case(GQA_3_OF_64, (1, 97), exact=True),
    Case(GQA_6, (97,)),
    Case(ODD_OUTPUT, (1, 33)),
    Case(ODD_HIDDEN, (1, 33)),
    Case(SMALL_HEADS, (1, 33)),
    Case(MANY_SHARERS, (1,)),
    Case(NARROW_MLP, (64, 96), exact=True),
    Case(ROUND, (1, 33), fp8_kv=True),
    Case(STORED, (1, 16, 17, 32, 33, 65), quantize="fp8"),
    Case(STORED, (1, 8, 9, 33, 65), quantize="fp8", activations="fp8"),
    Case(STORED, (1, 17, 33), quantize="int4"),
    Case(STORED, (33, 65), exact=True, quantize="fp8"),
    Case(ROUND, (1, 33, 65), quantize="fp8"),  # a vocabulary that Hopper kernels do not read
]


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_that_a_plan_names_are_those_that_run(emulated: Path, case: Case) -> None:
    config, target = ModelConfig(Family.QWEN3, *case.shape), gpu_target(case.capability)
    config = requantized(config, case.quantize)
    plan = plan_kernels(config, target, case.dtype, case.backend, case.exact, case.activations)
    entries = step_kernels(Setting(config, target, case.dtype, plan, fp8_kv=case.fp8_kv))
    modes = [astuple(modes) for modes in (plan.decode, plan.chunks)]
    attention = plan.balanced_attention, plan.exact_attention, plan.batch_attention
    given = {
        "shape": case.shape,
        "plan": [plan.hopper, *modes, *attention, plan.fp8_activations],
        "dtype": case.dtype,
        "quantize": case.quantize,
        "kv_dtype": "fp8" if case.fp8_kv else None,
        "tokens": case.tokens,
    }
    library = emulated / "_ops.abi3.so"
    variables = {
        "GIVEN": json.dumps(given),
        "PHOTON_EMULATOR_COMPUTE_CAPABILITY": "{}.{}".format(*case.capability),
    }
    done = run(library, SCRIPT, **variables)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    names = names_of(library)
    launched = [[{names[at] for at in step} - NO_CHOICE for step in steps_] for steps_ in steps]
    of_chunks = {"head": 1, "attention of decode rows": 0}
    assert launched[:-1] == [
        [
            expected(entries, "decode", {"": count}),
            expected(entries, "chunks", {"": count, **of_chunks}),
        ]
        for count in case.tokens
    ]
    plans = [[names[at] for at in step].count("balanced_plan") for each in steps for step in each]
    assert max(plans) <= 1  # for both layers
    of_mixed = {"": 12, "head": 3, "attention of decode rows": 2}
    assert launched[-1] == [expected(entries, "chunks", of_mixed)]
