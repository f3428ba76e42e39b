"""`guidellm`, the command: no request fails, and each gets just as many tokens as it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.commands import run_client
from tests.clients.conftest import KEY, MODEL

REQUESTS, TOKENS = 24, 16
BODIES = {"/v1/chat/completions": "max_completion_tokens", "/v1/completions": "max_tokens"}


@pytest.mark.parametrize("path", BODIES)
def test_none_has_failed_and_tokens_are_as_asked(address: str, path: str, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={address},model=tiny,api_key={KEY},request_format={path}"
    run_client(
        "guidellm",
        "run",
        *("--backend", backend),
        *("--profile", "kind=concurrent,streams=6"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={tmp_path}/told.json"),
        "--disable-console",
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    found = benchmark["requests"]
    assert {name: len(found[name]) for name in ("successful", "errored", "incomplete")} == {
        "successful": REQUESTS,
        "errored": 0,
        "incomplete": 0,
    }
    for request in found["successful"]:
        body = json.loads(request["request_args"])["body"]
        assert (body[BODIES[path]], body["ignore_eos"]) == (TOKENS, True)
        assert request["output_metrics"]["text_tokens"] == TOKENS
