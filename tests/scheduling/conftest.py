"""Without hypothesis these tests are left out; the session's header names it."""

import importlib.util
from pathlib import Path

collect_ignore = []
if importlib.util.find_spec("hypothesis") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
