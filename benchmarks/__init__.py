"""Benchmarks: `python -m benchmarks.<name> --json FILE`; results/ holds what was measured,
`benchmarks.report` says what is stale."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler talks on stderr
