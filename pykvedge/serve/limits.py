"""Bounds of a server."""

from __future__ import annotations

from dataclasses import dataclass

from pykvedge.reference.kvtypes import KvType


@dataclass(frozen=True)
class Limits:
    """n_ctx: tokens of one conversation. memory: bytes of keys and values of all of them. queue: requests that wait.

    share_prompts: a prompt that was read for one owner of a key is there for the others.
    """

    slots: int = 4
    n_ctx: int = 4096
    memory: int = 2 << 30
    queue: int = 64
    kv_type: str = "f16"
    kv_rotate: str = "auto"
    share_prompts: bool = False

    @property
    def storage(self) -> KvType:
        """How keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)
