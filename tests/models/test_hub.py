"""Models that are downloaded, by huggingface_hub itself, from a Hub on this machine. It reads its
environment when it is imported: so what needs another one has a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import saved_tiny_model

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# What lies beside a model's own files on the Hub, and nobody needs here.
OTHERS = {
    "README.md": b"many words",
    "consolidated.safetensors": b"the same weights once more",
    "original/params.json": b"{}",
}
NOWHERE = "http://127.0.0.1:1"  # where nobody listens
PROGRAM = """
import json, sys, time
time.sleep = lambda _: None  # before it tries again, huggingface_hub waits
from photon_ext.errors import ModelError
from photon_ext.models.loading.model_files import resolve_model
for model, weights in json.loads(sys.argv[1]):
    try:
        print(resolve_model(model, weights))
    except ModelError as error:
        print(error)
"""


class Hub(ThreadingHTTPServer):
    """Repositories of files by the part of the Hub's HTTP interface that a download asks for.
    `cut`: files whose last byte never comes.
    """

    def __init__(self, models: dict[str, dict[str, bytes]], gated: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.gated, self.cut = models, gated, set[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, send_body: bool) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").lstrip("/")
        owner, name, kind, rest = [*path.split("/", 3), "", "", "", ""][:4]
        files = self.server.models.get(f"{owner}/{name}")
        if files is None:
            gated = f"{owner}/{name}" == self.server.gated
            self._send(
                403 if gated else 404, b"", X_Error_Code="GatedRepo" if gated else "RepoNotFound"
            )
        elif kind == "resolve":
            file = rest.partition("/")[2]
            tag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            kept = len(files[file]) * send_body - (send_body and file in self.server.cut)
            self._send(200, files[file], kept, X_Repo_Commit=COMMIT, ETag=tag)
        elif kind == "tree":
            self._send_json([_entry(file, content) for file, content in files.items()])
        else:
            self._send_json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []})

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._send(200, body, len(body))

    def _send(self, status: int, body: bytes, kept: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:kept])


def _entry(file: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": file, "size": len(content), "oid": oid}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of a model in shards."""
    folder = tmp_path_factory.mktemp("model")
    saved_tiny_model("llama-plain", folder, max_shard_size="50KB")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """Has a/tiny, a/bin without safetensors, a/gated, and no other."""
    bin_only = {"config.json": files["config.json"], "pytorch_model.bin": b"pickled"}
    server = Hub({"a/tiny": {**OTHERS, **files}, "a/bin": bin_only}, gated="a/gated")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def resolved(home: Path, url: str, *models: str | tuple[str, bool]) -> tuple[list[str], str]:
    """What `resolve_model` returned or said of each, or of each without its weights (False), and
    stderr.
    """
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    asked = [(model, True) if isinstance(model, str) else model for model in models]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def names(snapshot: str) -> set[str]:
    folder = Path(snapshot)
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


def test_a_model_of_the_hub_is_downloaded_once(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    small = {name for name in files if name.endswith(".json")}
    (plan, whole), progress = resolved(tmp_path, hub.url, ("a/tiny", False), "a/tiny")
    assert Path(whole).is_relative_to(tmp_path)
    assert plan == whole
    assert "Fetching" in progress
    assert names(whole) == set(files)
    assert len(files) - len(small) > 1  # shards
    assert all((Path(whole) / name).read_bytes() == files[name] for name in files)
    assert resolved(tmp_path, NOWHERE, "a/tiny") == ([whole], "")


def test_a_download_that_was_broken_off_is_no_model_and_goes_on_later(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    last = max(name for name in files if name.endswith(".safetensors"))
    hub.cut.add(last)
    (said,), _ = resolved(tmp_path, hub.url, "a/tiny")
    assert said.startswith("model 'a/tiny': ")
    assert "the Hugging Face Hub did not give it (" in said
    hub.cut.clear()
    (snapshot,), _ = resolved(tmp_path, hub.url, "a/tiny")
    assert names(snapshot) == set(files)


def test_a_model_that_is_not_to_be_had_says_what_to_do_and_a_plan_takes_no_weights(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    (none, gated, other, plan), _ = resolved(
        tmp_path, hub.url, "a/none", "a/gated", "a/bin", ("a/tiny", False)
    )
    assert names(plan) == {name for name in files if name.endswith(".json")}
    assert none.startswith("model 'a/none': ")
    assert "no such model on the Hub, or a private one; check the name" in none
    assert "ask for access on its page there, then run `hf auth login`" in gated
    assert "on the Hub it has no model.safetensors; for a .gguf file" in other
    (unreached,), _ = resolved(tmp_path, NOWHERE, "a/tiny")
    assert "the Hugging Face Hub did not give it (" in unreached
    assert "`hf download a/tiny` where the Hub is reached" in unreached
