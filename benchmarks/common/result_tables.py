"""The tables of a run, of an older one too: what a benchmark prints at its end, and what
`benchmarks.report` prints of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common.tables import Table

Entry = dict[str, Any]

STEP = {"model": "model", "B": "batch"}
DECODE = {
    **STEP,
    **{"depth": "depth", "context": "{context:.0f}", "ms/step": "ms_per_step[median]"},
    **{"predicted": "predicted_ms", "tok/s": "tokens_per_s", "floor ms": "floor_ms"},
    **{"share": "{floor_share:.0%}", "us/node": "us_per_node"},
    **{"gap us": "step_gap_us[median]", "p99": "step_gap_us[p99]"},
    **{part: f"host_us[{part}]" for part in ("plan", "launch", "commit", "deliver", "wait")},
    "quiet": "{quiet_steps}/{steps}",
}
NODES = {
    **STEP,
    **{"traced step us": "step_us", "in kernels": "kernel_us", "node gap us": "node_gap_us"},
    "kernels": "kernels",
}
ENGINE = {
    **{**STEP, "way": "way", "context": "{context:.0f}", "ms/step": "ms_per_step"},
    **{"floor ms": "floor_ms", "gap us": "gap_us[p50]", "p99": "gap_us[p99]"},
}
PREFILL = {
    **{"model": "model", "tokens": "chunk", "way": "way", "ms": "ms", "tok/s": "tokens_per_s"},
    **{"TFLOP/s": "tflop_per_s", "of a product": "product_tflop_per_s", "share": "{share:.0%}"},
}
TIMELINE = {**STEP, "ms/step with checks": "off_ms", "without": "bare_ms", "ratio": "{ratio:.4f}"}
MODES = {
    **{**STEP, "rows": "mode", "ms/step": "ms", "least": "least", "most": "most"},
    **{"work ms": "work_ms", "gap us": "gap_us", "split": "{split:.0%}", "idle": "{idle:.1%}"},
    "ratio": "{ratio:.3f}",
}
COUNTS = {
    **STEP,
    **{"source": "way", "steps": "steps", "valid": "{valid}"},
    **{"launches": "kinds[graph launch]", "waits": "kinds[event wait]", "syncs": "kinds[sync]"},
    **{"allocs": "kinds[allocation]", "HtoD bytes": "host_to_device_bytes"},
    **{"quiet": "{quiet_steps}/{steps}", "passed": "{passed}"},
}
KERNELS = {
    **{"op": "op", "what": "what", "format": "format", "way": "way", "B": "batch"},
    **{"context": "context"},
    **{"chunk": "chunk", "us": "us", "TB/s": "tb_per_s", "share": "{share:.0%}", "cold": "{cold}"},
    **{"loss us": "loss_us", "loss/dep": "loss_us_per_dependency", "TFLOP/s": "tflop_per_s"},
    **{"torch us": "baseline[us]", "ratio": "ratio", "error": "checked[error]"},
}
PEERS = {
    **{"peer": "title", "version": "version", "B": "batch", "ms/step": "ms_per_step"},
    **{"least": "ms_spread[0]", "most": "ms_spread[1]", "tok/s": "tokens_per_s"},
    **{"share": "{floor_share:.0%}", "against ours": "against_ours"},
    **{"same tokens": "{same_tokens:.0%}", "how": "method", "mode": "mode"},
}
GAIN = {
    **{"model": "model", "streams": "streams", "requests": "requests", "blocking ms": "block_ms"},
    **{"pipelined ms": "pipe_ms", "gap us": "parts[gap_us]", "L": "{length:.1f}"},
    **{"formula": "{formula:+.1%}", "predicted": "{predicted:+.1%}"},
    **{"observed": "{observed:+.1%}", "met": "{met}", "all gaps us": "gaps_us[pipe][p50]"},
    "p99": "gaps_us[pipe][p99]",
}
METER = {
    **{"model": "model", "streams": "streams", "ms/step off": "off_ms", "ms/step on": "on_ms"},
    "ratio": "{ratio:.4f}",
}
LONG = {
    **{"what": "model", "depth": "depth", "total s": "wall_s", "active": "{active_share:.1%}"},
    **{"ms/step": "ms_per_step", "tokens/s": "tokens_per_s", "gap us": "gap_us"},
}
LATENCIES = ("p50", "p95", "p99", "max")
TRAFFIC = {
    **{"load": "load", "engine": "title", "rate/s": "rate", "requests": "requests"},
    **{"s": "wall_s", "tok/s": "tokens_per_s", "req/s": "requests_per_s", "queue s": "queue_s"},
    **{"TTFT ms p50": "ttft_ms[p50]", **{share: f"ttft_ms[{share}]" for share in LATENCIES[1:]}},
    **{f"ITL {share}": f"inter_token_ms[{share}]" for share in LATENCIES},
    **{"active": "{meter[active_share]:.1%}", "gap p99 us": "meter[gap_us][p99]"},
    **{"host us": "meter[host_us]", "zombies": "{meter[zombie_share]:.1%}"},
    "quiet": "{meter[grown][quiet_steps]}/{meter[grown][decode_steps]}",
    "late p99": "late_ms[p99]",
    "hit tokens": "{meter[grown][prefix_hit_tokens]}/{meter[grown][prompt_tokens]}",
    "preempted": "meter[grown][preemptions]",
}
TURNS = {
    **{"load": "load", "engine": "title", "rate/s": "rate", "turn": "turn"},
    "hit tokens": "{cached}/{prompt}",
    **{f"TTFT ms {share}": share for share in LATENCIES},
}
LADDER = {
    **{"stage": "stage", "what changes": "changes", "ms/step": "ms_per_step"},
    **{"in all": "x{in_all:.2f}", "first 8 ms": "first_ms", "gap share": "{gap_share:.1%}"},
    **{"allocations": "allocations_per_step", "tokens equal": "{tokens_equal} of {tokens}"},
}

QUALITY = {
    **{"format": "format", "KL mean": "kl[mean]", "KL p99": "kl[p99]", "same top 1": "{top1:.1%}"},
    **{"perplexity": "{perplexity:.2f}", "MiB/step": "step_mib", "ms/step": "ms_per_step"},
}


def tables_of(data: Entry) -> list[Table]:
    """The tables of a result. Raises ValueError for a benchmark that has none."""
    if (make := TABLES.get(data["benchmark"])) is None:
        raise ValueError(f"{data['benchmark']} has no tables, only {', '.join(TABLES)} have")
    return list(make(data))


def _of(data: Entry, what: str) -> list[Entry]:
    """The entries of one kind that were measured."""
    return [e for e in data["entries"] if e["status"] == "ok" and e.get("what") == what]


def _decode(data: Entry) -> Iterator[Table]:
    yield Table.of("", _of(data, "decode"), DECODE)
    yield Table.of("the checks for a timeline that nobody records", _of(data, "timeline"), TIMELINE)
    yield Table.of("traced", _of(data, "nodes"), NODES)
    yield Table.of("through the engine", _of(data, "engine"), ENGINE)
    yield Table.of("forward of a prompt", _of(data, "prefill"), PREFILL)


def _modes(data: Entry) -> Iterator[Table]:
    entries = _of(data, data["benchmark"])
    rows = [{**e, "mode": mode, **own} for e in entries for mode, own in e["modes"].items()]
    yield Table.of("", rows, MODES)


def _schemas(data: Entry) -> Iterator[Table]:
    names = ("ended and valid", "cut, a beginning", "invalid", "no beginning", "error")
    names += ("plain rows", "plain rows with their tokens")
    rows = [
        (entry["model"], entry["temperature"], *(entry["counts"].get(name, 0) for name in names))
        for entry in _of(data, "schemas")
    ]
    remarks = [f"{count} refused: {why}" for why, count in data.get("refused", {}).items()]
    remarks += [f"{data['on_device']} on the device"] if "on_device" in data else []
    remarks += [f"{count} on the host: {why}" for why, count in data.get("on_host", {}).items()]
    yield Table("answers by schema", ("model", "temperature", *names), rows, remarks)
    named = {"compile": "compile_us", "automaton": "automaton_us", "mask": "fill_us"}
    times = [(what, *data[name].values()) for what, name in named.items() if data.get(name)]
    yield Table("microseconds", ("what", "p50", "p99", "max"), times)


def _activity(data: Entry) -> Iterator[Table]:
    yield Table.of("", _of(data, "counts"), COUNTS)


def _kernels(data: Entry) -> Iterator[Table]:
    measured = [entry for entry in data["entries"] if entry["status"] == "ok" and "op" in entry]
    yield from _by_model(measured, KERNELS)


def _peers(data: Entry) -> Iterator[Table]:
    yield from _by_model(_of(data, "peer"), PEERS)


def _quality(data: Entry) -> Iterator[Table]:
    """By model, format by format; the first is what the others are compared with."""
    measured = _of(data, "quality")
    for model in dict.fromkeys(entry["model"] for entry in measured):
        own = [entry for entry in measured if entry["model"] == model]
        told = [f"{own[0]['tokens']} tokens; KL in nats, from {own[0]['reference']}"]
        yield Table.of(model, own, QUALITY, told)


def _by_model(entries: list[Entry], columns: dict[str, str]) -> Iterator[Table]:
    for model in dict.fromkeys(entry["model"] for entry in entries):
        yield Table.of(model, [entry for entry in entries if entry["model"] == model], columns)


def _bubble(data: Entry) -> Iterator[Table]:
    gains = _of(data, "gain")
    remarks = [line for entry in gains for line in _gain_remarks(entry)]
    yield Table.of("depth 2 over depth 1", gains, GAIN, remarks)
    yield Table.of("the meter's cost at depth 2", _of(data, "meter"), METER)
    if long := sorted(_of(data, "long"), key=lambda entry: int(entry["depth"])):
        title = f"{long[0]['tokens']} tokens in each of {long[0]['sequences']} sequences"
        published = [{**row, "model": row["what"]} for row in data.get("published", ())]
        yield Table.of(title, [*long, *published], LONG)


def _gain_remarks(entry: Entry) -> Iterator[str]:
    """What has to be said about an entry, besides its figures."""
    label = f"{entry['model']}, {entry['streams']} stream{'s' * (entry['streams'] > 1)}"
    if not entry["tokens_equal"]:
        yield f"{label}: depth 1 and 2 generated different tokens; gains compare tokens/s"
    if not entry.get("capped") and entry["stopped"] < 0.9 * entry["requests"]:
        met = f"only {entry['stopped']} of {entry['requests']} requests met a stop token"
        yield f"{label}: {met}; zombies are rarer than meant"
    yield f"{label}: {entry['verdict']}"


def _adopt(data: Entry) -> Iterator[Table]:
    """The stages in order, and the sentence on each."""
    records = {e["stage"]: e for e in _of(data, "records")}
    own = [e for e in data["entries"] if e["what"] == "steps"]
    first = next((e["ms_per_step"] for e in own if e["status"] == "ok"), 0.0)
    rows = [{**records.get(e["stage"], {}), **e} for e in own]
    rows = [{**e, "in_all": first / e["ms_per_step"]} if "ms_per_step" in e else e for e in rows]
    said = [f"{e['stage']}: {e.get('verdict') or e.get('error')}" for e in own]
    yield Table.of("", rows, LADDER, said)


def _traffic(data: Entry) -> Iterator[Table]:
    """By model a table of cells, one of TTFT by turn, and where requests began to queue."""
    saturated = _of(data, "saturation")
    for model in dict.fromkeys(entry["model"] for entry in data["entries"]):
        own = [entry for entry in _of(data, "cell") if entry["model"] == model]
        ends = (entry for entry in saturated if entry["model"] == model)
        told = list(dict.fromkeys(_start_up(e) for e in own if e.get("start_up")))
        queues = "{title}: {load} queues for 1 s from {rate:.3g}/s on"
        told += [queues.format_map(entry) for entry in ends]
        yield Table.of(model, own, TRAFFIC, told)
        turns = [
            {**entry, "turn": int(turn), **ttft, **entry.get("hits_by_turn", {}).get(turn, {})}
            for entry in own
            if len(entry["ttft_by_turn"]) > 1
            for turn, ttft in entry["ttft_by_turn"].items()
        ]
        yield Table.of(
            f"{model}: TTFT by turn, or of the first request and the others", turns, TURNS
        )


def _start_up(entry: Entry) -> str:
    at, title = entry["start_up"], entry["title"]
    memory = f"{at['graphs']} graphs of {at['graph_mib']:.0f} MiB in {at['capture_s']:.1f} s"
    return f"{title}: made in {at['engine_s']:.1f} s, {memory}"


TABLES: dict[str, Callable[[Entry], Iterator[Table]]] = {
    "activity": _activity,
    "adapters": _modes,
    "adopt": _adopt,
    "bubble": _bubble,
    "constraints": _modes,
    "decode": _decode,
    "kernels": _kernels,
    "objects": _modes,
    "peers": _peers,
    "quality": _quality,
    "schemas": _schemas,
    "traffic": _traffic,
}
