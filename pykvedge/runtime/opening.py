"""Openings: what a conversation begins with before its question, read once for all conversations that begin so.

A prompt is cut where its question begins: behind its last image, or, without images, where prompts that differ in the
question alone begin to differ. What is before is compressed by itself, so that the rows that are kept do not depend on
the question, and goes on being true when another question follows.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence

from pykvedge.caches.folder import CacheFolder
from pykvedge.caches.memory import ByteCache
from pykvedge.models.vision import ImagePiece, Piece, TextPiece
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import table
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.snapshot import Snapshot

KIND = "openings"  # in a folder
LEAST = 64  # tokens of text that are worth a pass of their own
_VERSION = 2


def cut(pieces: list[Piece], others: Sequence[Sequence[int]] = ()) -> tuple[list[Piece], list[Piece]]:
    """Cuts a prompt into its opening, and the question; the opening is empty where it is not worth a pass of its own.

    others: without images, the tokens of the same prompt with other questions.
    """
    images = [i for i, piece in enumerate(pieces) if isinstance(piece, ImagePiece)]
    if images and images[-1] + 1 < len(pieces):
        return pieces[: images[-1] + 1], pieces[images[-1] + 1 :]
    if images or not others or len(pieces) != 1 or not isinstance(pieces[0], TextPiece):
        return [], pieces
    tokens = pieces[0].tokens
    rows = zip(tokens, *others, strict=False)
    n = next((i for i, row in enumerate(rows) if len(set(row)) > 1), min(map(len, (tokens, *others))))
    return ([TextPiece(tokens[:n])], [TextPiece(tokens[n:])]) if LEAST <= n < len(tokens) else ([], pieces)


def _is_repeatable(plan: Plan) -> bool:
    """Tells whether the plan means the same in another process: a plugin's stage may have changed meanwhile."""
    stages = {stage: getattr(plan, stage) for stage in table.STAGES}
    return all(table.get(stage, name) is None for stage, name in stages.items())


def key(about: Sequence[str], plan: Plan, tables: Mapping[str, ProfileTable], pieces: Sequence[Piece]) -> str:
    """Makes a name that is equal for openings whose rows are equal.

    about: all else that they depend on, as the model, the encoder and the storage type.
    """
    digest = hashlib.sha256(json.dumps([_VERSION, *about, plan.to_json()]).encode())
    for stage, numbers in sorted(tables.items()):
        digest.update(f"{stage}{numbers.values.shape}".encode() + numbers.values.tobytes() + numbers.budgets.tobytes())
    for piece in pieces:
        said = piece.tokens if isinstance(piece, TextPiece) else [piece.key, piece.n_rows]
        digest.update(json.dumps(said).encode())
    return digest.hexdigest()


class Openings:
    """Openings that conversations with one model left: in memory under a bound, and in a folder if there is one."""

    def __init__(self, limit: int, folder: CacheFolder | None = None) -> None:
        """limit: bytes in memory; 0: none."""
        self.memory: ByteCache[Snapshot] = ByteCache(limit)
        self._folder = folder
        self._writing: threading.Thread | None = None

    def get(self, name: str, plan: Plan) -> Snapshot | None:
        """Returns an opening that was put under this name, if it is still there."""
        found = self.memory.get(name)
        if found is None and self._folder is not None and _is_repeatable(plan):
            data = self._folder.get(KIND, name)
            try:
                found = Snapshot.decode(data) if data is not None else None
            except ValueError:
                return None
            if found is not None:
                self.memory.put(name, found)
        return found

    def put(self, name: str, plan: Plan, opening: Snapshot) -> None:
        """Keeps an opening that was read under this plan. The folder has it later: answers do not wait for a disk."""
        self.memory.put(name, opening)
        if self._folder is not None and _is_repeatable(plan):
            self.finish()
            self._writing = threading.Thread(target=self._folder.put, args=(KIND, name, opening.encode()))
            self._writing.start()

    def finish(self) -> None:
        """Waits until the folder has what was put."""
        if self._writing is not None:
            self._writing.join()
