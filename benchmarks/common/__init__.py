"""What the benchmarks share: options, result files, tables, models, the steady decode session."""
