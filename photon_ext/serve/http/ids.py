"""Ids of what this server makes."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """One that nobody can guess, and nobody else has."""
    return prefix + secrets.token_hex(16)
