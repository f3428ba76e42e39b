"""Where a package that clients need is missing, these tests are left out; the session's header
names it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PACKAGES = "httptools", "uvloop"
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
