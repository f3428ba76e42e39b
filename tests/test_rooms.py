"""Imports run downward: each room imports only those named for it, and each room of csrc
includes only those named for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# "": photon_ext itself
BASE = {
    "",
    "_C",
    "_build_info",
    "_fake",
    "_library",
    "block_codes",
    "row_params",
    "row_words",
    "checks",
    "errors",
    "layout",
    "ops",
    "dequantize",
    "fp8_tokens",
    "weight",
    "weight_format",
}
ENGINE = BASE | {"runtime", "sampling", "models", "scheduling", "observe", "engine"}
# What a room may import, for types and inside functions too. Below the runtime there is one level;
# `reference` is the ops' spec.
ROOMS = {
    **dict.fromkeys(sorted(BASE - {""}), BASE),
    "reference": BASE,
    "runtime": BASE | {"runtime"},
    "testing": BASE | {"runtime", "testing"},
    "sampling": BASE | {"runtime", "sampling"},
    "models": BASE | {"runtime", "models"},
    "scheduling": BASE | {"runtime", "sampling", "scheduling"},
    "observe": BASE | {"runtime", "models", "scheduling", "observe"},
    "engine": ENGINE,
    "serve": ENGINE | {"serve"},
    "bench": {"", "errors", "bench"},
    "cli": ENGINE | {"bench", "cli", "serve"},
    "examples": ENGINE | {"examples", "serve"},
    "__main__": {"cli"},
    "": ENGINE,
}
# What a folder inside models/ may import of it: nothing that runs what it makes
MODELS = {
    "layers": {"config", "kernel_plan", "projections", "quantization", "rope", "layers"},
    "loading": {
        "config",
        "kernel_plan",
        "quantization",
        "requantize",
        "weights",
        "lora",
        "loading",
        "text",
    },
    "text": {"loading", "text"},
}
CSRC = {
    "common": {"common"},
    "cuda": {"common", "cuda"},
    "cpu": {"common", "cpu"},
    "device": {"common", "device"},
    "ops": {"common", "cpu", "cuda", "ops"},
    "python": {"common", "device", "python"},
}
TORCH = re.compile(r"#include [<\"](torch|ATen|c10)/")


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def room_of(module: str) -> str:
    """The room of "photon_ext.runtime.probe"; "" for a name in photon_ext itself."""
    name = [*module.split("."), ""][1]
    return name if name in ROOMS else ""


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "photon_ext").rglob("*.py")),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_imports_run_downward(path: Path) -> None:
    parts = path.relative_to(ROOT / "photon_ext").with_suffix("").parts
    room = "" if parts == ("__init__",) else parts[0]
    assert room in ROOMS, f"{room} is a new room: say in ROOMS what it may import"
    names = list(imported(ast.parse(path.read_text())))
    found = {room_of(name) for name in names if name.split(".")[0] == "photon_ext"}
    assert found <= ROOMS[room]
    assert not {name.split(".")[0] for name in names} & {"benchmarks", "tests"}


@pytest.mark.parametrize("folder", MODELS)
def test_imports_inside_models_run_downward(folder: str) -> None:
    for path in sorted((ROOT / "photon_ext/models" / folder).rglob("*.py")):
        names = (name.split(".") for name in imported(ast.parse(path.read_text())))
        found = {name[2] for name in names if name[:2] == ["photon_ext", "models"]}
        assert found <= MODELS[folder], path


def test_every_folder_of_models_is_named() -> None:
    folders = (path.parent.name for path in (ROOT / "photon_ext/models").glob("*/__init__.py"))
    assert set(folders) == set(MODELS)


@pytest.mark.parametrize("room", CSRC)
def test_includes_run_downward(room: str) -> None:
    for path in sorted((ROOT / "csrc" / room).rglob("*.*")):
        text = path.read_text()
        included = {name.split("/")[0] for name in re.findall(r'#include "(\w+/)', text)} or {room}
        assert {name.rstrip("/") for name in included} <= CSRC[room], path
        assert room == "ops" or not TORCH.search(text), f"{path} includes torch; only csrc/ops may"


def test_loops_for_several_instruction_sets_share_no_inline_function() -> None:
    """Of an inline function that several of them compile the linker keeps one copy, perhaps the
    widest.
    """
    allowed = {"common/dtype.h", "common/params.h", "common/weight.h"}
    for path in (ROOT / "csrc" / "cpu" / "simd").iterdir():
        common = set(re.findall(r'#include "(common/[\w.]+)"', path.read_text()))
        assert common <= allowed, path


def test_every_room_of_csrc_is_named() -> None:
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(CSRC)


def test_what_runs_upward_is_seen() -> None:
    assert [
        room_of(name)
        for name in imported(ast.parse("def f():\n  from photon_ext.observe import meter"))
    ] == ["observe"]
    assert "observe" not in ROOMS["runtime"]
