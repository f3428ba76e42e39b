"""Benchmarks: `python -m benchmarks.<name> --json FILE`; results/ holds what was measured,
`benchmarks.report` says what is stale."""
