"""What the benchmarks share: environment, result files, tables, the steady decode session, and
CUDA activity counting.
"""
