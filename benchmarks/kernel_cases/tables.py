"""The tables of `benchmarks.kernels`, from the entries of its result file."""

from __future__ import annotations

from typing import Any

from benchmarks.common.tables import Table

HEADER = (
    *("op", "what", "way", "B", "context", "chunk", "us", "TB/s", "share", "loss us"),
    *("loss/dep", "TFLOP/s", "torch us", "ratio", "error"),
)


def kernel_tables(data: dict[str, Any]) -> list[Table]:
    """A table per model."""
    models = dict.fromkeys(entry["model"] for entry in data["entries"] if "op" in entry)
    return [model_table(data, model) for model in models]


def model_table(data: dict[str, Any], model: str) -> Table:
    """The measured entries of one model."""
    own = (entry for entry in data["entries"] if entry.get("model") == model)
    rows = [_row(entry) for entry in own if entry["status"] == "ok"]
    return Table(f"{model}, {data['arguments']['dtype']}", HEADER, rows)


def _row(entry: dict[str, Any]) -> list[object]:
    baseline = entry.get("baseline") or {}
    labels = (entry.get(name) for name in ("op", "what", "way", "batch", "context", "chunk"))
    losses = (entry[name] for name in ("loss_us", "loss_us_per_dependency", "tflop_per_s"))
    return [
        *labels,
        *(entry["us"], entry["tb_per_s"]),
        f"{entry['share']:.0%}" + ("" if entry["cold"] else " cached"),
        *losses,
        *(baseline.get("us"), entry.get("ratio"), entry["checked"]["error"]),
    ]
