"""All interleavings of a scenario by depth-first search with replay, or a random sample of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from photon_ext.testing.chooser import Chooser, Random, Scripted
from photon_ext.testing.errors import Counterexample

Scenario = Callable[[Chooser], None]
"""Builds a SimRuntime with the chooser it is given, drives it to the end, and raises where
something is wrong.
"""


class Exploration(NamedTuple):
    """How much was searched.

    Attributes:
        interleavings: schedules run, all different under ``explore``.
        exhausted: whether they were all there are.
    """

    interleavings: int
    exhausted: bool


def explore(scenario: Scenario, limit: int = 20_000) -> Exploration:
    """Runs ``scenario`` under every interleaving, up to ``limit`` of them.

    The scenario must be deterministic but for the chooser.

    Raises:
        Counterexample: the scenario raised; it carries the choices that lead there.
    """
    script: list[int] | None = []
    runs = 0
    while script is not None and runs < limit:
        chooser = Scripted(script)
        runs += 1
        _run(scenario, chooser, chooser.choices, runs)
        script = _next_script(chooser)
    return Exploration(runs, script is None)


def sample(scenario: Scenario, runs: int, seed: int = 0) -> Exploration:
    """Runs ``scenario`` under ``runs`` random interleavings. Raises Counterexample."""
    for run in range(runs):
        chooser = Random(seed + run)
        _run(scenario, chooser, chooser.choices, run + 1)
    return Exploration(runs, False)


def replay(scenario: Scenario, choices: Sequence[int]) -> None:
    """Runs ``scenario`` under the choices of a Counterexample; what it raises comes through
    unchanged.
    """
    scenario(Scripted(choices))


def _run(scenario: Scenario, chooser: Chooser, choices: Sequence[int], run: int) -> None:
    try:
        scenario(chooser)
    except Exception as error:
        raise Counterexample(error, choices, run) from error


def _next_script(chooser: Scripted) -> list[int] | None:
    """The next path in depth-first order: the last choice that has an untried option takes it."""
    choices, options = chooser.choices, chooser.options
    last = len(choices) - 1
    while last >= 0 and choices[last] + 1 >= options[last]:
        last -= 1
    return [*choices[:last], choices[last] + 1] if last >= 0 else None
