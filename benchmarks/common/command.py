"""How a benchmark is called, as its usage line says it."""

from __future__ import annotations

import sys


def command() -> str | None:
    """ "python -m benchmarks.decode"; None, argparse's own guess, where no module is run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return None if spec is None else f"python -m {spec.name}"
