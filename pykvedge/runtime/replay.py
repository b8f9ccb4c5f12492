"""Plans the second pass over a prompt for scorer `replay`: which tokens the pass reads, in which chunks.

KVzip (Kim et al. 2025, arXiv:2505.23416): the model reads a request to repeat the prompt, and then the prompt again,
chunk by chunk. Each chunk starts at the prompt's end, and its tokens are removed before the next chunk. From the second
chunk on the request names the last tokens of the chunk before. Images are read again as embeddings. With source =
instruction the pass is one request, and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pykvedge.errors import ContextError
from pykvedge.library.native_plan import replays
from pykvedge.models.composer import Composer
from pykvedge.models.prompt import Message
from pykvedge.models.vision import ImagePiece, Piece, TextPiece
from pykvedge.native.abi import ReplayChunk
from pykvedge.plans.plan import Plan

REPEAT = "Repeat what was said and shown before, word for word."
GO_ON = "Repeat what was said and shown before, word for word. Go on from here: "
INSTRUCTION = "Describe everything that was said and shown before, with every detail."
NAMED = 8  # last tokens of the previous chunk that a request names
REQUEST = 128  # most tokens of a request, about
LEAST = 64  # least tokens of a chunk, with its request; a smaller context is an error


class Passage:
    """The known text and images that a sequence has read since its last compression."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: list[Piece] = []  # a TextPiece here is never shared with the caller
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, ImagePiece):
            self.pieces.append(piece)
            return
        if not self.pieces or isinstance(self.pieces[-1], ImagePiece):
            self.pieces.append(TextPiece([]))
        self.pieces[-1].tokens.extend(piece.tokens)  # type: ignore[union-attr]

    def drop_last(self, n: int) -> None:
        """Removes the last n tokens, which must be text."""
        while n > 0 and self.pieces:
            last = self.pieces[-1]
            gone = min(n, last.n_tokens)
            if isinstance(last, ImagePiece) or gone == last.n_tokens:
                self.pieces.pop()
            else:
                del last.tokens[-gone:]
            n -= gone

    def tokens(self) -> list[int]:
        return [token for piece in self.pieces if isinstance(piece, TextPiece) for token in piece.tokens]

    def last(self, n: int) -> list[Piece]:
        """Returns the pieces of the last n tokens, as far as known. Never returns a part of an image."""
        out: list[Piece] = []
        for piece in reversed(self.pieces):
            if isinstance(piece, ImagePiece) and piece.n_tokens > n:
                break
            out.append(piece if isinstance(piece, ImagePiece) else TextPiece(piece.tokens[-n:]))
            n -= out[-1].n_tokens
            if n == 0:
                break
        return out[::-1]


@dataclass(frozen=True)
class Part:
    """One chunk of the second pass, and the pieces that the model reads for it."""

    chunk: ReplayChunk
    pieces: list[Piece]


def extra_tokens(plan: Plan, n_tokens: int, largest_image: int) -> int:
    """Returns the extra tokens that the second pass over a prompt of n_tokens needs in the context."""
    if not replays(plan):
        return 0
    settings = plan.settings("scorer")
    again = max(min(n_tokens, settings["chunk"]), largest_image) if settings["source"] == "repeat" else 0
    return again + REQUEST


class Requests:
    """Writes requests as user messages in the model's chat template."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer

    def tokens(self, text: str, named: Sequence[int] = ()) -> list[int]:
        """Returns a user message of the text and of the tokens `named`, up to the point where the assistant answers."""
        composer, asked = self._composer, Message("user", text.rstrip())
        written = composer.following([Message("user", "?"), Message("assistant", "?"), asked]).text
        before, _, after = written.rpartition(asked.text)
        made = composer.tokens_of(before + (text if named else asked.text))
        return [*made, *named, *composer.tokens_of(after + composer.lead)]

    def template_start(self, pieces: Sequence[Piece]) -> int:
        """Returns how many of the pieces' first tokens the chat template always puts before the first message."""
        if not pieces or isinstance(pieces[0], ImagePiece):
            return 0
        composer = self._composer
        others = (composer.tokens(composer.first([Message("user", text)])) for text in ("0", "~"))
        rows = zip(pieces[0].tokens, *others, strict=False)
        return sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, rows))


def parts(
    plan: Plan, pieces: list[Piece], n_pending: int, room: int, requests: Requests, begins: bool
) -> Iterator[Part]:
    """Cuts the second pass over n_pending tokens into chunks that fit `room`. `pieces`: the last of these tokens.

    begins: the pending tokens start the conversation. Raises ContextError if `room` is too small.
    """
    settings = plan.settings("scorer")
    sinks = requests.template_start(pieces) if begins else 0
    if settings["source"] == "instruction":
        asked = requests.tokens(INSTRUCTION)
        _require(len(asked) <= room, room)
        yield Part(ReplayChunk(0, n_pending, len(asked), sinks), [TextPiece(asked)])
        return
    longest = max(len(requests.tokens(REPEAT)), len(requests.tokens(GO_ON)) + NAMED)
    most = settings["chunk"]
    while most + longest > room and most > 1:
        most //= 2
    _require(most + longest >= min(LEAST, n_pending + longest), room)
    first = n_pending - sum(piece.n_tokens for piece in pieces)
    named: list[int] = []
    for i, again in enumerate(_cut(pieces, most)):
        asked = requests.tokens(GO_ON, named) if named else requests.tokens(REPEAT)
        n = sum(piece.n_tokens for piece in again)
        _require(len(asked) + n <= room, room)
        # unknown tokens come before the known pieces, and belong to the first chunk
        yield Part(ReplayChunk(first if i else 0, first + n, len(asked) + n, sinks), [TextPiece(asked), *again])
        first += n
        named = again[-1].tokens[-NAMED:] if isinstance(again[-1], TextPiece) else []


def _require(fits: bool, room: int) -> None:
    if not fits:
        raise ContextError(
            f"the second pass over the prompt does not fit in the context, which has {room} free tokens; raise "
            f"--ctx, or set scorer.source to prompt"
        )


def _cut(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Cuts pieces into lists of at most `most` tokens. An image is never cut, even if larger."""
    out: list[list[Piece]] = [[]]
    left = most
    for piece in pieces:
        rest: Piece | None = piece if piece.n_tokens else None
        while rest is not None:
            if out[-1] and left < (rest.n_tokens if isinstance(rest, ImagePiece) else 1):
                out.append([])
                left = most
            part, rest = split(rest, left)
            out[-1].append(part)
            left -= part.n_tokens
    return out if out[-1] else out[:-1]


def split(piece: Piece, n: int) -> tuple[Piece, Piece | None]:
    """Splits a text behind its first n tokens. An image stays whole. Returns the first part, and the rest or None."""
    if isinstance(piece, ImagePiece) or piece.n_tokens <= n:
        return piece, None
    return TextPiece(piece.tokens[:n]), TextPiece(piece.tokens[n:])
