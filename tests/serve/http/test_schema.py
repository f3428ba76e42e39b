"""The OpenAPI document holds: whatever it allows, and much that it does not, has an answer that it
names. `make test-all` asks thirty times as often.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import checks  # noqa: E402

from tests.serve.http.server import on_a_port, says  # noqa: E402
from tests.serve.http.stub import StubClient  # noqa: E402

CASES = int(os.environ.get("PHOTON_SCHEMA_CASES", "10"))  # of each operation, valid and not
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def document(model_dir: Path) -> Iterator[Any]:
    client = StubClient(says("Hello"))
    with on_a_port(client, model_dir, access_log=False) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")
    assert client.running == 0


@pytest.mark.slow("hypothesis makes bodies of large schemas")
def test_every_answer_is_one_that_the_document_names(document: Any) -> None:
    asked = 0
    for found in document.get_all_operations():
        for mode in schemathesis.GenerationMode:
            asked += ask(found.ok(), mode)
    assert asked > 4 * CASES


def ask(operation: Any, mode: Any) -> int:
    """Asks with cases of an operation; how many."""
    asked = 0

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=CASES,
        database=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    def ask_one(case: Any) -> None:
        nonlocal asked
        asked += 1
        case.call_and_validate(checks=CHECKS)

    try:
        ask_one()
    except Unsatisfiable:  # an operation without parameters has nothing that could be wrong
        assert mode.is_negative
    return asked
