"""Scripts in processes of their own that have torch already: forks of one that has imported it,
which takes seconds. Nothing of photon_ext is imported there: a script chooses by its variables what
it will be. Such a process ends as one of `python -c` does. Variables that Python itself reads are
those of the first script's caller.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SECONDS = 300  # then a script is ended by SIGALRM

# A fork for each line of stdin, where the line's script is then the main program.
_SERVER = f"""
import gc, json, os, signal, sys, torch

def next_script():
    for line in sys.stdin:
        script, environment, directory, out, err = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm({SECONDS})
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            for name in [name for name in globals() if not name.startswith("__")]:
                del globals()[name]  # a script imports what it needs
            return script
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()

gc.freeze()  # to look at all that is torch's takes most of the time of a fork's end
exec(next_script())
"""


@cache
def _server() -> subprocess.Popen[str]:
    """Its streams are buffered, whatever PYTHONUNBUFFERED says."""
    command = [sys.executable, "-c", _SERVER]
    variables = {**os.environ, "PYTHONUNBUFFERED": ""}
    server = subprocess.Popen(command, env=variables, stdin=-1, stdout=-1, text=True)
    atexit.register(server.communicate)
    return server


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as `python -c` would, in the present directory, with these variables besides."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        given = (script, {**os.environ, **environment}, os.getcwd(), str(out), str(err))
        try:
            server.stdin.write(json.dumps(given) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
        except BaseException:  # or the next script would get this one's status
            _server.cache_clear()
            server.kill()
            raise
        return subprocess.CompletedProcess(script, status, out.read_text(), err.read_text())
