"""Bounds of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """n_ctx: tokens of one conversation. memory: bytes of keys and values of all of them. queue: requests that wait."""

    slots: int = 4
    n_ctx: int = 4096
    memory: int = 2 << 30
    queue: int = 64
    kv_type: str = "f16"
