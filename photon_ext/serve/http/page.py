"""The page at /: a chat in a browser, as one file that loads nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


async def page(request: Request) -> Response:
    return Response(*_page())


@cache
def _page() -> tuple[bytes, int, dict[str, str]]:
    """Body, status and headers."""
    text = _FILE.read_text(encoding="utf-8")
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text.encode(), 200, headers


def _policy(text: str) -> str:
    """Only the page's own script and style run, only this server is asked, and no text becomes
    HTML: what a model writes stays text.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str, tag: str) -> str:
    """Of the one element of this kind, as a policy names it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
