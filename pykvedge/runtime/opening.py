"""Keeps openings: the beginning of a conversation before its question, read once for all conversations that share it.

An opening ends behind the last image of the prompt. In a prompt without images it ends where prompts with different
questions begin to differ. The opening is compressed alone, so its kept rows do not depend on the question and stay
valid for another question.
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

KIND = "openings"  # name of this kind of entry in a cache folder
LEAST = 64  # least tokens of a text that are worth a separate pass
_VERSION = 2


def cut(pieces: list[Piece], others: Sequence[Sequence[int]] = ()) -> tuple[list[Piece], list[Piece]]:
    """Cuts a prompt into its opening and its question. The opening is empty if it is not worth a separate pass.

    others: for prompts without images, the tokens of the same prompt with other questions.
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
    """Returns whether the plan means the same in another process. A plugin's stage may change between processes."""
    stages = {stage: getattr(plan, stage) for stage in table.STAGES}
    return all(table.get(stage, name) is None for stage, name in stages.items())


def key(about: Sequence[str], plan: Plan, tables: Mapping[str, ProfileTable], pieces: Sequence[Piece]) -> str:
    """Returns a name that is equal for openings with equal rows.

    about: everything else that determines the rows: the model, the encoder, the storage type.
    """
    digest = hashlib.sha256(json.dumps([_VERSION, *about, plan.to_json()]).encode())
    for stage, numbers in sorted(tables.items()):
        digest.update(f"{stage}{numbers.values.shape}".encode() + numbers.values.tobytes() + numbers.budgets.tobytes())
    for piece in pieces:
        said = piece.tokens if isinstance(piece, TextPiece) else [piece.key, piece.n_rows]
        digest.update(json.dumps(said).encode())
    return digest.hexdigest()


class Openings:
    """Openings of conversations with one model: in memory up to a limit, and in a folder if one is given."""

    def __init__(self, limit: int, folder: CacheFolder | None = None) -> None:
        """limit: bytes in memory; 0: no opening in memory."""
        self.memory: ByteCache[Snapshot] = ByteCache(limit)
        self._folder = folder
        self._writing: threading.Thread | None = None

    def get(self, name: str, plan: Plan) -> Snapshot | None:
        """Returns the opening of this name, or None."""
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
        """Keeps an opening, read under this plan. A thread writes to the folder: answers do not wait."""
        self.memory.put(name, opening)
        if self._folder is not None and _is_repeatable(plan):
            self.finish()
            self._writing = threading.Thread(target=self._folder.put, args=(KIND, name, opening.encode()))
            self._writing.start()

    def finish(self) -> None:
        """Waits until the folder holds the last opening."""
        if self._writing is not None:
            self._writing.join()
