"""Bounds of a server."""

from __future__ import annotations

from dataclasses import dataclass

from pykvedge.plans.kvtypes import KvType


@dataclass(frozen=True)
class Limits:
    """n_ctx: tokens of one conversation. memory: bytes of keys and values of all of them. queue: requests that wait."""

    slots: int = 4
    n_ctx: int = 4096
    memory: int = 2 << 30
    queue: int = 64
    kv_type: str = "f16"
    kv_rotate: str = "auto"

    @property
    def storage(self) -> KvType:
        """How keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)
