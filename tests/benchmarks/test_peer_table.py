"""The Markdown table of ours beside the peers."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer_table


def row(model: str, title: str, batch: int, ms: float, last: int = 512) -> dict[str, Any]:
    return {
        "what": "peer",
        "status": "ok",
        "model": model,
        "title": title,
        "version": f"{title} 1",
        "batch": batch,
        "ms_per_step": ms,
        "window": {"last": last},
    }


ENTRIES = [
    {"what": "floor", "status": "ok"},
    row("a", "ours", 1, 0.5),
    row("a", "ours", 8, 0.75),
    row("a", "slow", 1, 67.0, last=128),
    {
        "what": "peer",
        "status": "failed",
        "model": "a",
        "title": "slow",
        "batch": 8,
        "error": "no room",
    },
    {
        "what": "peer",
        "status": "missing",
        "model": "a",
        "title": "vLLM",
        "reason": "vllm is not installed: pip install vllm",
    },
    row("b", "ours", 1, 2.0),
    {
        "what": "peer",
        "status": "missing",
        "model": "b",
        "title": "vLLM",
        "reason": "vllm is not installed: pip install vllm",
    },
]


def test_a_line_per_engine_and_what_the_figures_hide_beneath(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, entries in zip(files, (ENTRIES[:6], ENTRIES[6:]), strict=True):
        file.write_text(json.dumps({"benchmark": "peers", "environment": {}, "entries": entries}))
    assert peer_table.main([str(file) for file in files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| model | engine | version | B=1 | B=8 |",
        "| --- | --- | --- | --- | --- |",
        "| a | ours | ours 1 | 0.5 | 0.75 |",
        "| a | slow | slow 1 | 67 | failed |",
        "| b | ours | ours 1 | 2 | - |",
        "",
        "- slow, a, B=1: 128 new tokens, not 512.",
        "- slow, a, B=8: failed: no room",
        "- vLLM was not there: vllm is not installed: pip install vllm.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a.json: not a result file of benchmarks (FileNotFoundError"),
        ("[1]", "a.json: not a result file of benchmarks (KeyError"),
        ("{", "a.json: not a result file of benchmarks (JSONDecodeError"),
        (
            '{"benchmark": "decode", "environment": {}, "entries": []}',
            "a.json: a result of benchmarks.decode; give files of benchmarks.peers",
        ),
    ],
)
def test_a_file_that_is_no_result_of_peers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert peer_table.main([str(tmp_path / "a.json")]) == 1
    assert message in capsys.readouterr().err
