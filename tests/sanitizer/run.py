"""The sanitized tests under each tool of compute-sanitizer, dealt out to several processes that run
side by side.

    python -m tests.sanitizer.run [--tools memcheck=10,racecheck=20] [--jobs 16] [--limit 540]
    [--logs DIRECTORY] [TEST ...]

A tool is clean if every test has passed and each process has ended with the tool's own summary,
which must count nothing. Each part is a fresh process: racecheck's memory grows with what it has
seen.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.conftest import missing_packages

ROOT = Path(__file__).resolve().parents[2]
# One file or test a line: what launches our kernels in small sizes.
TESTS = (
    "tests/ops/test_step.py",
    "tests/ops/test_filter.py",
    "tests/ops/test_minimum_tokens.py",
    "tests/ops/test_penalties.py",
    "tests/ops/test_logprobs.py",
    "tests/ops/test_sample.py",
    "tests/ops/test_automata.py",
    "tests/ops/test_attention.py",
    "tests/ops/test_linear.py",
    "tests/ops/test_stored_linear.py",
    "tests/ops/test_narrow_stored.py",
    "tests/ops/test_batch_stored.py",
    "tests/ops/test_batch_fp8.py",
    "tests/ops/test_mid_stored.py",
    "tests/ops/test_lora.py",
    "tests/ops/test_lora_link.py",
    "tests/ops/test_spatial.py",
    "tests/ops/test_norm.py",
    "tests/ops/test_mlp.py",
    "tests/ops/test_embedding.py",
    "tests/ops/test_fused_linear.py",
    "tests/ops/test_batch_linear.py",
    "tests/ops/test_split_attention.py",
    "tests/ops/test_batch_attention.py",
    "tests/ops/test_chunk_attention.py",
    "tests/ops/test_balanced_attention.py",
    "tests/ops/test_chunk_plan.py",
    "tests/ops/test_exact_attention.py",
    "tests/ops/test_mixed_attention.py",
    "tests/ops/test_fp8_kv.py",
    "tests/models/test_decoder_fast.py",
    "tests/engine/test_engine_cuda.py::test_graphs_and_eager_steps_agree",
)
# processes each, of 30 to 70 tests
TOOLS = {"racecheck": 20, "memcheck": 10, "synccheck": 10}
# For how many barriers of a block synccheck keeps room: its own guess is too low where they are an
# array, and then it fails. A block has up to 67, yet with 64 it ran out of room where kernels that
# lay them out in several ways had run in one process.
OPTIONS = {"synccheck": ("--num-cuda-barriers", "256")}
# What a tool takes for an error and is none: PTX lets the two roles of lora_link arrive at a named
# barrier by different instructions; synccheck says that some threads have missed the others' one.
MISJUDGED = {"synccheck": ("tests/ops/test_lora_link.py",)}
# Only our kernels are looked at, and not those of torch, which the tests' references run.
KERNELS = ("--kernel-name", "kernel_substring=photon")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(?: \([^\n]*\))? *\[ *\d+%\]")
GRACE = 5.0  # seconds in which an ended process group goes


class Part(NamedTuple):
    """One process: a tool on one part of the tests."""

    tool: str
    number: int
    parts: int

    @property
    def name(self) -> str:
        return f"{self.tool}-{self.number}of{self.parts}"

    def command(self, tests: list[str]) -> list[str]:
        tool = [
            "compute-sanitizer",
            "--tool",
            self.tool,
            *KERNELS,
            *OPTIONS.get(self.tool, ()),
            "--error-exitcode",
            "9",
        ]
        pytest = [
            "-m",
            "pytest",
            "-v",
            "--sanitized",
            "--shard",
            f"{self.number}/{self.parts}",
            "-p",
            "no:cacheprovider",
            "--durations=5",
        ]
        return [*tool, sys.executable, *pytest, *tests]


class Ended(NamedTuple):
    """How a process ended: its exit status (None: it was stopped at the limit), and what it
    wrote.
    """

    part: Part
    status: int | None
    log: str
    seconds: float

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(OUTCOME.findall(self.log))

    @property
    def problem(self) -> str | None:
        """Why the part is not clean; None if it is."""
        summaries = SUMMARY.findall(self.log)
        if self.status is None:
            return "stopped at the time limit"
        if not summaries:
            return f"exit status {self.status}, and no summary of the tool: the process died"
        if any(int(number) for text in summaries for number in re.findall(r"\d+", text)):
            return "; ".join(summaries)
        return None if self.status == 0 else f"exit status {self.status}: a test failed"


def judged(tool: str, tests: list[str]) -> list[str]:
    """Those that a tool can judge."""
    return [test for test in tests if test not in MISJUDGED.get(tool, ())]


def available(tests: list[str]) -> list[str]:
    """Those whose packages are installed; says what is left out."""
    missing = {test: missing_packages(ROOT / test.partition("::")[0]) for test in tests}
    for test, packages in missing.items():
        if packages:
            print(f"left out: {test}: {', '.join(sorted(packages))} not installed")
    return [test for test in tests if not missing[test]]


def collected(tests: list[str]) -> int:
    """How many tests there are to run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "--sanitized",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the tests could not be collected:\n{done.stdout}{done.stderr}")
    return sum("::" in line for line in done.stdout.splitlines())


class Pool:
    """Runs parts side by side, `jobs` at most, and ends what still runs when the time is up."""

    def __init__(self, tests: dict[str, list[str]], jobs: int, limit: float, logs: Path) -> None:
        self._tests, self._jobs, self._logs = tests, jobs, logs
        self._end = time.monotonic() + limit
        self._running: dict[Part, tuple[subprocess.Popen[bytes], float]] = {}

    def run(self, parts: Iterable[Part]) -> list[Ended]:
        waiting, ended = list(parts), []
        self._logs.mkdir(parents=True, exist_ok=True)
        while waiting or self._running:
            while waiting and len(self._running) < self._jobs and time.monotonic() < self._end:
                self._start(waiting.pop(0))
            if time.monotonic() >= self._end:
                ended += [self._stop(part) for part in list(self._running)]
                return ended + [Ended(part, None, "", 0.0) for part in waiting]
            for part, (process, _) in list(self._running.items()):
                if process.poll() is not None:
                    ended.append(self._ended(part, process.returncode))
            time.sleep(0.1)
        return ended

    def _start(self, part: Part) -> None:
        # there is a process for each core already
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self._log(part).open("wb") as log:
            process = subprocess.Popen(
                part.command(self._tests[part.tool]),
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[part] = (process, time.monotonic())

    def _stop(self, part: Part) -> Ended:
        process, _ = self._running[part]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(GRACE)
        return self._ended(part, None)

    def _ended(self, part: Part, status: int | None) -> Ended:
        _, begin = self._running.pop(part)
        ended = Ended(
            part, status, self._log(part).read_text(errors="replace"), time.monotonic() - begin
        )
        print(
            f"{part.name}: {ended.outcomes['PASSED']} passed, {ended.seconds:.0f} s: "
            f"{ended.problem or 'clean'}",
            flush=True,
        )
        return ended

    def _log(self, part: Part) -> Path:
        return self._logs / f"{part.name}.log"


def verdict(tool: str, ended: list[Ended], expected: int) -> tuple[str, bool]:
    """A line about one tool, and whether it is clean over all tests."""
    outcomes = sum((part.outcomes for part in ended), Counter[str]())
    problems = [f"{part.part.name}: {part.problem}" for part in ended if part.problem]
    if outcomes["PASSED"] != expected:
        problems.append(f"{expected - outcomes['PASSED']} tests did not pass or did not run")
    counts = (
        ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(outcomes.items()))
        or "none ran"
    )
    text = f"{tool}: {expected} tests: {counts}; {max(part.seconds for part in ended):.0f} s"
    return f"{text}: {'; '.join(problems) or 'clean'}", not problems


def tools(text: str) -> dict[str, int]:
    """ "memcheck=4,racecheck" as processes by tool; without a number as many as usual."""
    chosen = {}
    for item in text.split(","):
        tool, sign, count = item.partition("=")
        if tool not in TOOLS or (sign and not (count.isdecimal() and int(count))):
            raise argparse.ArgumentTypeError(
                f"{item!r}: expected TOOL or TOOL=PROCESSES with a tool of {', '.join(TOOLS)}"
            )
        chosen[tool] = int(count) if sign else TOOLS[tool]
    return chosen


def main(given: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "tests",
        nargs="*",
        default=list(TESTS),
        help="files or tests; default: all with our kernels in small sizes",
    )
    options.add_argument(
        "--tools",
        type=tools,
        default=TOOLS,
        help="with the number of processes of each; default: all",
    )
    options.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time; default: one a core"
    )
    options.add_argument(
        "--limit",
        type=float,
        default=3600.0,
        help="seconds for all; what then still runs is ended, and not clean",
    )
    options.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "build" / "sanitizer",
        help="where each process' output goes",
    )
    args = options.parse_args(given)
    tests = available(args.tests)
    tests_of = {tool: judged(tool, tests) for tool in args.tools}
    expected = {tool: collected(judged_tests) for tool, judged_tests in tests_of.items()}
    parts = [
        Part(tool, number + 1, count)
        for tool, count in args.tools.items()
        for number in range(count)
    ]
    counts = ", ".join(f"{count} tests for {tool}" for tool, count in expected.items())
    print(f"{counts}; {len(parts)} processes; logs in {args.logs}", flush=True)
    ended = Pool(tests_of, args.jobs, args.limit, args.logs).run(parts)
    clean = all(expected.values())
    for tool, count in expected.items():
        text, good = verdict(tool, [part for part in ended if part.part.tool == tool], count)
        print(text)
        clean = clean and good
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
