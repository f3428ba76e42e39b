"""smg in front of two servers: as photon_ext/serve/README.md says it is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.gateways.load import Load, Stream, free_port, is_served, post
from tests.serve.processes import Server, until


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def replica(model: str, *arguments: str) -> Server:
    names = ("--served-model-name", "tiny", "--max-rows", "16")
    return Server(model, *names, *arguments, app=None)


@contextmanager
def gateway(log: Path, *servers: Server) -> Iterator[int]:
    """The port of smg, once it knows the servers."""
    port = free_port()
    line = [sys.executable, "-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    line += ["--policy", "round_robin", "--disable-tokenizer-autoload"]
    line += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    line += ["--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"]
    line += ["--worker-urls", *map(url, servers)]
    with log.open("w") as out:
        process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: is_served(port), 60)
            until(lambda: {worker_of(port) for _ in servers} == {*map(url, servers)}, 60)
            yield port
        finally:
            process.kill()
            process.wait()


def worker_of(port: int) -> str | None:
    """Who has answered one more request."""
    response = post(port, max_tokens=1)
    assert response.status == 200, response.read()
    response.read()
    return response.headers["x-smg-routed-worker-id"]


@pytest.mark.slow("three starts of a server")
def test_a_replica_that_is_killed_loses_its_own_requests_alone(model: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(replica(model)) for _ in range(2))
        port = stack.enter_context(gateway(tmp_path / "smg.log", first, second))
        with Load(port) as load:
            streams = [Stream(port) for _ in range(8)]
            assert {stream.worker for stream in streams} == {url(first), url(second)}
            first.process.kill()
            for stream in streams:
                assert stream.is_whole() == (stream.worker == url(second))
            done = len(load.told)
            until(lambda: len(load.told) > done + 20)
        assert len(load.failed) <= 3, load.failed  # one of each thread was there
        assert {worker_of(port) for _ in range(4)} == {url(second)}
        again = stack.enter_context(replica(model, "--port", str(first.port)))
        until(lambda: worker_of(port) == url(again))


def test_fields_pass_through(model: str, tmp_path: Path) -> None:
    """What smg takes comes to the server as it was: the same answer with and without smg."""
    fields = {
        "max_tokens": 12,
        "logprobs": 3,
        "echo": True,
        "seed": 2**63 - 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.01,
        "top_k": 200,
        "min_tokens": 2,
        "logit_bias": {"65": 4.25},
        "n": 2,
        "stop_token_ids": [1],
        "repetition_penalty": 1.1,
        "prompt": ["Hi", "Ho"],
    }
    template = tmp_path / "template"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with (
        replica(model, "--chat-template", str(template)) as server,
        gateway(tmp_path / "smg.log", server) as port,
    ):
        direct, through = (json.loads(post(each, **fields).read()) for each in (server.port, port))
        assert direct["choices"] == through["choices"]
        assert len(direct["choices"]) == 4
        told = {"input": "Hi", "store": False, "prompt": None, "ignore_eos": None}
        response = post(port, "/v1/responses", **told, max_output_tokens=3)
        assert response.status == 200, response.read()
        for refused in ({"seed": 2**63}, {"prompt": [1, 2, 3]}, {"unknown": 1}):
            assert post(port, **refused).status == 400
