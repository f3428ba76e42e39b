"""The stages of each loop in order, what each changes, and how many lines of code that takes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent

Decode = Callable[[Any, Sequence[int], int, Sequence[int]], Iterator[int]]


@dataclass(frozen=True)
class Stage:
    """One file of a ladder.

    Attributes:
        loop: "stock" or "hf", the folder.
        name: the file.
        what: what it changes, in a few words.
        on_cpu: why it may not help where the host is the device.
    """

    loop: str
    name: str
    what: str
    on_cpu: str

    @property
    def path(self) -> Path:
        return HERE / self.loop / f"{self.name}.py"

    @property
    def decode(self) -> Decode:
        """The loop; imported here, so that a failed import is an error of this stage alone."""
        found: Decode = import_module(f"benchmarks.ladder.{self.loop}.{self.name}").decode
        return found

    @property
    def code(self) -> str:
        """All functions of the stage by name, those that it keeps from stages before included."""
        module = import_module(f"benchmarks.ladder.{self.loop}.{self.name}")
        stages = {f"benchmarks.ladder.{loop}.{name}" for loop in LADDERS for name, *_ in STAGES}
        functions = inspect.getmembers(module, inspect.isfunction)
        own = (found for _, found in functions if found.__module__ in stages)
        return "\n".join(inspect.getsource(inspect.unwrap(each)) for each in own)

    @property
    def takes_hopper(self) -> bool:
        """Whether its `decode` has the argument `backend`: all kernels of its step are ours."""
        return self.name == "step"


class Changed(NamedTuple):
    """Lines of code that a stage adds and takes away. A line that is altered counts as both."""

    added: int
    removed: int

    def __str__(self) -> str:
        return f"+{self.added} -{self.removed}"


HOST_IS_DEVICE = "the host is the device here, and nothing runs while it looks at a token"
NO_GAP = "torch code runs eagerly on a CPU, which has no launch gap to close"
CHEAP = "memory is cheap to get on a CPU, and the cache short"
SMALL_PART = "attention is a small part of these steps"
SAME_WORK = "the work is the same, and calls into torch are a small part of it"
STAGES = (
    ("measure", "torch.cat cache, .item()", "growing cache, .item()", ""),
    ("preallocate", "fixed cache and buffers", "static cache, fixed inputs", CHEAP),
    ("carry_over", "token and position on the device", None, HOST_IS_DEVICE),
    ("slots", "two pinned outputs, read a step late", None, HOST_IS_DEVICE),
    ("graph", "one CUDA graph per step", None, NO_GAP),
    ("pipeline", "slots, graphs, stops by the runtime", None, NO_GAP),
    ("attention", "fused_attention_decode_into", "paged_attention_into", SMALL_PART),
    ("step", "photon_ext's decoder", None, SAME_WORK),
)
"""Name; what changes in the plain loop; in the Hugging Face loop, where that is something else;
why it may not help on a CPU."""
LADDERS = {
    "stock": tuple(Stage("stock", name, what, on_cpu) for name, what, _, on_cpu in STAGES),
    "hf": tuple(Stage("hf", name, other or what, cpu) for name, what, other, cpu in STAGES),
}


def changed(before: str, after: str) -> Changed:
    """Lines of code of `after` that `before` does not have, and the reverse."""
    old, new = code_lines(before), code_lines(after)
    edits = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    edits = [edit for edit in edits if edit[0] != "equal"]
    added = sum(end - begin for _, _, _, begin, end in edits)
    return Changed(added, sum(end - begin for _, begin, end, _, _ in edits))


def code_lines(source: str) -> list[str]:
    """The lines of a file without its docstring, blank lines, and lines that are comments."""
    module = ast.parse(source)
    start = (module.body[0].end_lineno or 0) if ast.get_docstring(module) is not None else 0
    lines = (line.rstrip() for line in source.splitlines()[start:])
    return [line for line in lines if line and not line.lstrip().startswith("#")]
