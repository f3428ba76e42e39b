"""Scripts in processes of their own that have torch already: forks of one that has imported it,
which takes seconds. Nothing of photon_ext is imported here: a script chooses by its variables what
it will be.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch"])


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as `python -c` would, in the present directory, with these variables besides."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        given = (script, {**os.environ, **environment}, os.getcwd(), str(out), str(err))
        process = _PROCESSES.Process(target=_run, args=given)
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            script, process.exitcode, out.read_text(), err.read_text()
        )


def _run(script: str, environment: dict[str, str], directory: str, out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    exec(script, {"__name__": "__main__"})
