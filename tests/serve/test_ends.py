"""How a server ends: each of these takes one down."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection

import pytest
import torch

from photon_ext.serve import Ask, BadAsk, EngineClient, EngineGone
from photon_ext.serve.settings import EngineSettings
from photon_ext.serve.supervisor import Supervisor
from tests.serve.processes import (
    APP,
    LONG,
    ROOT,
    Server,
    Stream,
    end_of,
    is_alive,
    kill,
    tokens_of,
    until,
)

# What the processes need is 2 s; a busy machine needs more to run them at all. From 30 s on an
# engine that hangs is ended as a frozen one.
SOON_S = 20.0


def all_children(server: Server) -> list[int]:
    modules = ("engine_process", "http_process", "compiler_process")
    return [pid for module in modules for pid in server.children(module)]


def refuses(server: Server) -> bool:
    """Whether nobody listens any more."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.connect()
    except OSError:
        return True
    connection.close()
    return False


def test_hazard_b1_a_killed_engine_ends_all_and_tells_who_waits(model: str) -> None:
    with Server(model, "--http-workers", "2") as server:
        streams = [Stream(server) for _ in range(3)]
        children = all_children(server)
        probe = probed(server)
        began = time.monotonic()
        kill(server.children("engine_process")[0])
        for stream in streams:
            told = stream.rest()
            assert "the engine's process has ended" in told[-1]["error"]
        assert re.search(rb'HTTP/1.1 503 .*"state": "gone"', everything(probe), re.DOTALL)
        assert server.ended(SOON_S) == 1
        assert time.monotonic() - began < SOON_S
        until(lambda: not any(map(is_alive, children)))
        assert refuses(server)
        server.said(r"the engine has ended \(SIGKILL\)")


def probed(server: Server) -> socket.socket:
    """A connection with an answer that has begun, and behind it a request for /health: it needs no
    client that is quick, in the second that HTTP processes outlive the engine.
    """
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    body = json.dumps({"ids": [1], "params": LONG})
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(f"{head}{body}GET /health HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert connection.recv(15, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_hazard_b1_a_frozen_engine_counts_as_dead(model: str) -> None:
    """It is there, and does nothing: /health must not say 200 for ever."""
    with Server(model, "--engine-timeout", "5") as server:
        stream = Stream(server)
        os.kill(server.children("engine_process")[0], signal.SIGSTOP)
        assert "error" in stream.rest()[-1]
        assert server.ended(SOON_S) == 1
        server.said("the engine is frozen: it gives no sign of life for 5 s")


def test_hazard_b4_sigterm_lets_requests_end(model: str) -> None:
    with Server(model, "--drain-timeout", "300") as server:
        stream, children = Stream(server, begins=False), all_children(server)
        stream.begin(30)  # which run for some seconds: a busy machine tells of the drain late
        server.process.terminate()
        server.said("draining: 30 requests run, 0 wait", SOON_S)
        until(lambda: refuses(server))
        told = [stream.first, *stream.rest()]
        assert len(tokens_of(told)) == 4000
        assert end_of(told)[0] == "length"
        assert server.ended(SOON_S) == 0
        assert not any(map(is_alive, children))


def test_hazard_b4_a_second_sigterm_ends_at_once(model: str) -> None:
    with Server(model) as server:
        Stream(server)
        children = all_children(server)
        os.kill(server.children("http_process")[0], signal.SIGSTOP)  # so that the drain cannot end
        server.process.terminate()
        server.said("draining", SOON_S)
        server.process.terminate()
        assert server.ended(SOON_S) == 128 + signal.SIGTERM
        until(lambda: not any(map(is_alive, children)))


@pytest.mark.parametrize(
    ("number", "after_s"), [(signal.SIGKILL, 0.4), (signal.SIGTERM, 1.2), (signal.SIGKILL, None)]
)
def test_hazard_b3_children_end_with_a_parent_that_is_killed(
    model: str, number: signal.Signals, after_s: float | None
) -> None:
    """While it starts, and when it serves (None)."""
    server = Server(model)
    if after_s is None:
        server.__enter__()
    else:
        until(lambda: server.children("engine_process"))
        time.sleep(after_s)
    children = all_children(server)
    assert children
    server.process.send_signal(number)
    server.process.wait(SOON_S)
    until(lambda: not any(map(is_alive, children)))
    server.__exit__()


def test_what_a_server_cannot_do_is_told_in_one_line(model: str) -> None:
    def told(*arguments: str) -> tuple[int, str]:
        line = [sys.executable, "-m", "photon_ext", "serve", "--port", "0", "--app", APP]
        line += arguments
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.stdout == ""
        return done.returncode, done.stderr

    code, text = told("--model", model, "--page-size", "0", "--device", "cpu")
    assert (code, text.count("\n")) == (1, 1)
    assert "page_size is 0" in text
    code, text = told("--model", "/nowhere")
    assert (code, text.count("\n")) == (2, 1)
    assert "no such file" in text
    code, text = told("--model", model, "--host", "999.1.1.1")
    assert (code, text.count("\n")) == (2, 1)
    for wrong in (("--api-key", ""), ("--http-workers", "0"), ("--http-workers", "-1")):
        code, text = told("--model", model, *wrong)
        assert (code, text.count("\n")) == (2, 1)
        assert wrong[0] in text
    code, text = told("--model", model, "--device", "cpu", "--app", "nowhere:app")
    assert code == 1
    assert "nowhere" in text.splitlines()[-1]


def test_hazard_b12_a_process_whose_torch_has_run_may_start_an_engine(model: str) -> None:
    """Started from a process whose torch has run, as one with CUDA would be."""
    torch.ones(8) @ torch.ones(8)

    async def test() -> list[int]:
        async with EngineClient.start(model, device="cpu", max_rows=2) as client:
            generation = await client.generate(Ask((1,), {"max_new_tokens": 5, "choice": ["yes"]}))
            deltas = [one async for told in generation for one in told]
            assert deltas[-1].end is not None
            assert deltas[-1].end.stop_reason == "constraint"
            children = _children_of(os.getpid())
        assert not any(map(is_alive, children))
        return children

    assert len(asyncio.run(test())) == 2  # the engine, and the compiler of forms


def test_a_client_hears_why_its_engine_cannot_start(model: str) -> None:
    async def test() -> None:
        client = EngineClient.start(model, device="cpu", page_size=0)
        with pytest.raises(EngineGone, match="page_size is 0"):
            await client.ready()
        await client.close()

    asyncio.run(test())


def test_a_compiler_without_memory_refuses_forms_and_nothing_else(model: str) -> None:
    options = {"device": "cpu", "max_rows": 2}
    supervisor = Supervisor(EngineSettings(model, options, form_bytes=2**26))
    client_socket, runs = supervisor.link(), threading.Thread(target=supervisor.run)
    runs.start()

    async def test() -> None:
        client = EngineClient(client_socket)
        await client.ready()
        for form in ({"choice": ["yes"]}, {"choice": ["no"]}):  # of two compilers
            with pytest.raises(BadAsk, match="cannot be compiled now"):
                await client.generate(Ask((1,), form))
        generation = await client.generate(Ask((1,), {"max_new_tokens": 3, "ignore_eos": True}))
        told = [one async for deltas in generation for one in deltas]
        assert sum(len(one.tokens) for one in told) == 3
        await client.close()

    try:
        asyncio.run(test())
    finally:
        supervisor.stop()
        runs.join()


def _children_of(pid: int) -> list[int]:
    found = []
    for path in os.listdir("/proc"):
        if path.isdigit():
            try:
                with open(f"/proc/{path}/stat") as stat, open(f"/proc/{path}/cmdline") as line:
                    parent = int(stat.read().rsplit(")", 1)[1].split()[1])
                    if parent == pid and "photon_ext.serve" in line.read():
                        found.append(int(path))
            except OSError:
                continue
    return found
