"""The compiler of forms: a process that may run out of memory or time, or crash, and is replaced.

It answers one question at a time: can the device keep this form, as an automaton, or has the host
to; or is it refused, and why.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from photon_ext.errors import CompilerBusy, PhotonError, describe
from photon_ext.serve.child import become_child, end_with, inherited
from photon_ext.serve.messages import (
    TO_COMPILER,
    BlockingFrames,
    Compile,
    Compiled,
    Failed,
    Ready,
    Start,
)

# Address space besides what the process has when it begins to compile: threads have stacks of 0.5
# GiB, of which they use little.
MEMORY_BYTES = 4 * 2**30


def main() -> None:
    end_with(become_child())
    frames = BlockingFrames(inherited(0), TO_COMPILER)
    with suppress(EOFError):  # the engine has left
        _serve(frames)


def _serve(frames: BlockingFrames) -> None:
    from photon_ext.engine.grammar_compiler import GrammarCompiler
    from photon_ext.models.text.model_tokenizer import model_tokenizer

    start = frames.receive()
    assert isinstance(start, Start)
    told: dict[str, Any] = start.settings
    try:
        tokenizer = model_tokenizer(Path(told["path"]))
        folder = told["automata_dir"]
        compiler = GrammarCompiler(
            tokenizer,
            told["vocab_size"],
            told["eos_ids"],
            told["automaton_words"],
            automata_dir=None if folder is None else Path(folder),
        )
        _limit_memory(told["memory_bytes"])
    except PhotonError as error:
        frames.send(Failed(str(error)))
        raise
    frames.send(Ready())
    while True:
        asked = frames.receive()
        assert isinstance(asked, Compile)
        answer = _answer(compiler, asked)
        frames.send(answer)
        if answer.passing:  # a thread is still at it, and nothing else ends it
            sys.exit(1)


def _answer(compiler: Any, asked: Compile) -> Compiled:
    from photon_ext.sampling.grammar import Grammar, GrammarKind
    from photon_ext.sampling.pattern import NotRegular

    form = Grammar(GrammarKind(asked.kind), asked.text, asked.whitespace)
    try:
        return Compiled(asked.id, automaton=compiler.write(form))
    except NotRegular as error:
        why = str(error)
    except PhotonError as error:
        return Compiled(asked.id, refused=str(error), passing=isinstance(error, CompilerBusy))
    except MemoryError as error:
        told = f"its compiler has no memory left ({describe(error)}); make it simpler"
        return Compiled(asked.id, refused=told, passing=True)
    try:
        compiler.start(form)  # what survives here is made by the engine once more
    except PhotonError as error:
        return Compiled(asked.id, refused=str(error), passing=isinstance(error, CompilerBusy))
    return Compiled(asked.id, host=why)


def _limit_memory(more: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit if most < 0 else min(limit, most)))


if __name__ == "__main__":
    main()
