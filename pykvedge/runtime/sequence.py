"""Reads one conversation into a context, pass by pass, compresses the conversation, and makes snapshots."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple, TypeAlias

from pykvedge.errors import SessionFileError, StateError, UnsupportedError
from pykvedge.library import libkvedge
from pykvedge.models.composer import Composer
from pykvedge.models.model import Progress, silent
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import SequenceEnd
from pykvedge.runtime.lookup import BREAK, Lookup
from pykvedge.runtime.replay import Part, Passage, Requests, parts, split
from pykvedge.runtime.report import DeviceWork, Kv
from pykvedge.runtime.snapshot import ImageSpan, Snapshot
from pykvedge.system import memory

# the next piece to read, and whether its last token needs logits
NextPiece: TypeAlias = tuple[Piece, bool]
# yields the next piece; `send` passes back how many of the piece's tokens one pass has read
Passes: TypeAlias = Generator[NextPiece, int, None]

_SMALL = 4 << 20  # bytes: smaller copies skip the memory check, because a server makes one copy per answer


class TokenBoundary(NamedTuple):
    """A place between two tokens of a sequence: the position and the number (from 0) of the token behind it."""

    position: int
    token: int


class Sequence(SequenceEnd):
    """The state of one sequence: tokens read, compressions, the current answer. Sequences of a context take turns.

    replays: whether to record tokens for a second pass; None: as the plan requires. share: the read part of the prompt,
    or of its second pass. replay_s: seconds of the last second pass. lookup: learns the read tokens; or None.
    """

    def __init__(self, driver: Driver, number: int = 0) -> None:
        super().__init__(number)
        self._driver = driver
        self.replays: bool | None = None
        self.lookup: Lookup | None = None
        self.begin()

    def begin(self) -> None:
        self.lookup = None if self.lookup is None else Lookup()
        self.n_past = self.n_cells = 0
        self.pairs_without_cell = 0  # KV pairs per KV head without a llama.cpp cell: their positions were renumbered
        self.passage = Passage()  # read since the last compression; if whole rows are kept, since the beginning
        self.n_question = 0  # tokens of the last message behind its images
        self.images: list[ImageSpan] = []
        self.answered: list[int] = []  # tokens of an answer since the last compression
        self.unread: list[int] = []  # tokens of the last answer that were removed, to be read again
        self.compressed_tokens, self.measured_pairs = 0, 0.0  # since the last `measure`, and pairs per head then
        self.peak = 0  # largest number of bytes before the last return to a copy
        self._n_compressions, self._drops = 0, False
        self._done = self._total = 0
        self._verified: list[int] = []
        self._drafted = 0  # drafted tokens that the next verification removes
        self._replayed, self.replay_s = -1, 0.0  # number of pending tokens at the last second pass; -1: no second pass

    @property
    def share(self) -> float:
        return self._done / max(self._total, 1)

    def steps(self, pieces: Iterable[Piece]) -> Passes:
        """Reads pieces: yields the next piece, and receives how many of its tokens one pass has read."""
        self.take_back()
        pieces = [piece for piece in pieces if piece.n_tokens]
        self.n_question = pieces[-1].n_tokens if pieces and isinstance(pieces[-1], TextPiece) else 0
        pieces = [piece for piece in [TextPiece(self.unread), *pieces] if piece.n_tokens]
        self.unread = []
        self._done, self._total = 0, sum(piece.n_tokens for piece in pieces)
        yield from self._steps(pieces, want_logits=True, note=True)

    def take_back(self) -> None:
        """Removes the last answer if whole rows are kept. The next message reads the answer again, over all whole rows.

        The whole rows then equal the rows of a prompt that is read at once.
        """
        cache, tokens = self._driver.cache, self.answered
        if cache is None or not cache.keeps or not tokens or not cache.stats(self.number).whole_bytes:
            return
        if self._driver.context.cut(self.number, self.n_past - len(tokens)):
            self.n_past, self.n_cells = self.n_past - len(tokens), max(self.n_cells - len(tokens), 0)
            self.passage.drop_last(len(tokens))
            self.answered, self.unread = [], tokens

    def second_pass(self, chunks: list[Part], keep_logits: bool = True) -> Passes:
        """Reads a prompt a second time, chunk by chunk, as `steps` does, and removes each chunk afterwards.

        keep_logits: restores the logits of the prompt's last token, which must be the last token read before this call.
        """
        cache, context, at, started = self._own_cache(), self._driver.context, self._at(), time.perf_counter()
        logits = context.logits().copy() if keep_logits else None
        self._done, self._total = 0, sum(part.chunk.n_tokens for part in chunks)
        for part in chunks:
            cache.begin_replay(part.chunk, self.number)
            try:
                yield from self._steps(part.pieces, keep_logits and part is chunks[-1], note=False)
            finally:
                self.n_past, self.n_cells = at
                cache.end_replay(self.number)
        if logits is not None:
            context.put_back(logits)
        self.replay_s = time.perf_counter() - started

    def _at(self) -> tuple[int, int]:
        return self.n_past, self.n_cells

    def _steps(self, pieces: list[Piece], want_logits: bool, note: bool) -> Passes:
        for i, piece in enumerate(pieces):
            left: Piece | None = piece
            while left is not None:
                n = yield left, want_logits and i == len(pieces) - 1
                part, left = split(left, n)
                self._done += n
                if note:
                    self._note(part)

    def see(self, pieces: Iterable[Piece]) -> None:
        """Adds pieces to `lookup`. An image is a break there."""
        if (lookup := self.lookup) is not None:
            for piece in pieces:
                lookup.add(piece.tokens if isinstance(piece, TextPiece) else [BREAK])

    def _note(self, piece: Piece) -> None:
        self.see([piece])
        cache = self._driver.cache
        if isinstance(piece, ImagePiece):
            last = self.n_cells if cache is None else cache.stats(self.number).n_tokens
            self.images.append(ImageSpan(last - piece.n_tokens, last))
        if cache is not None and (cache.replays if self.replays is None else self.replays):
            self.passage.add(piece)

    def read(self, pieces: list[Piece], progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        """Appends pieces, and makes the logits of the last token. Images must be encoded.

        Raises ContextError, CancelledError, and errors of libkvedge during a pass.
        """
        if self._driver.cache is not None:
            self._driver.cache.expect(sum(piece.n_tokens for piece in pieces), self.number)
        self.run(self.steps(pieces), "reading the prompt", progress, cancel)

    def run(self, passes: Passes, what: str, progress: Progress, cancel: threading.Event | None) -> None:
        """Reads all pieces that `steps` or `second_pass` yields. Raises the errors of `read`."""
        most = self._driver.context.n_ubatch
        with closing(passes):
            ahead = next(passes, None)
            while ahead is not None:
                progress(what, self.share)
                stop_if_set(cancel)
                piece, want_logits = ahead
                part, rest = split(piece, most)
                self._driver.decode(self, part, want_logits and rest is None)
                try:
                    ahead = passes.send(part.n_tokens)
                except StopIteration:
                    ahead = None
        progress(what, 1.0)

    def read_step(self, piece: Piece, want_logits: bool) -> None:
        """Appends a piece of at most one pass; an image must be encoded. Raises the errors of `read`."""
        self._driver.decode(self, piece, want_logits)
        self._note(piece)

    def extend(self, token: int) -> None:
        """Appends one generated token, and makes its logits. Raises ContextError."""
        self.read_step(TextPiece([token]), want_logits=True)
        self.answered.append(token)

    def draft(self, token: int) -> None:
        """Appends a drafted token, and makes its logits. `verify` removes the token again."""
        self._driver.decode(self, TextPiece([token]), want_logits=True)
        self._drafted += 1

    def verify(self, tokens: list[int], whole: bool = False) -> None:
        """Appends tokens of an answer in one pass, and makes the logits of each. Call `accept` afterwards.

        whole: removes drafted tokens, and the tokens attend to whole rows. Raises the errors of `read`,
        UnsupportedError if the model cannot take tokens back, StateError without whole rows.
        """
        cache, context = self._driver.cache, self._driver.context
        self.move(-self._drafted)
        self._drafted = 0
        if cache is not None:
            cache.begin_verify(len(tokens), self.number, whole)
        context.at = self
        try:
            with self._driver.explained():
                context.decode_all(tokens)
        except BaseException:
            if cache is not None:
                cache.end_verify(0, self.number)
            raise
        self._verified = tokens

    def accept(self, n_tokens: int) -> None:
        """Keeps the first n_tokens of the verified tokens, and removes the others."""
        tokens, cache = self._verified, self._driver.cache
        self.move(n_tokens - len(tokens))
        if cache is not None:
            cache.end_verify(n_tokens, self.number)
        elif n_tokens < len(tokens):
            self._driver.context.cut(self.number, self.n_past)
        self._verified = []
        self.answered.extend(tokens[:n_tokens])
        self._note(TextPiece(tokens[:n_tokens]))

    def move(self, n_tokens: int) -> None:
        """Records that a pass over several sequences read n_tokens text tokens into this sequence."""
        self.n_past, self.n_cells = self.n_past + n_tokens, self.n_cells + n_tokens

    def took(self, token: int) -> None:
        """Records that a pass over several sequences read a generated token into this sequence."""
        self.move(1)
        self.answered.append(token)
        if self.replays:
            self.passage.add(TextPiece([token]))

    def renumber(self, most: int) -> None:
        """Renumbers the positions: the next token gets at most position `most`. The last logits become invalid.

        Raises UnsupportedError, StateError.
        """
        cache = self._own_cache()
        self.n_past = cache.renumber(self.n_past, most, self.number)
        self.n_cells = cache.cells(self.number)
        self.recount()

    def cut_out(self, begin: TokenBoundary, end: TokenBoundary) -> None:
        """Removes the tokens between two boundaries, and renumbers the tokens behind them. Invalidates the last logits.

        Raises StateError, OutOfMemoryError, UnsupportedError.
        """
        cache, context = self._own_cache(), self._driver.context
        if not context.cut(self.number, begin.position, end.position):
            raise StateError("llama.cpp could not remove tokens from the conversation; start a new conversation")
        cache.check()
        self.images = [image for image in self.images if not begin.token <= image.first < end.token]
        self.renumber(self.n_past - (end.position - begin.position))

    def boundary(self, n_ahead: int) -> TokenBoundary:
        """Returns where the next message will begin. n_ahead: tokens of the answer before it that are not yet read."""
        ahead = n_ahead + len(self.unread)
        return TokenBoundary(self.n_past + ahead, self._own_cache().stats(self.number).n_tokens + ahead)

    def recount(self) -> None:
        """Counts the KV pairs per head that have no cell, because positions were renumbered."""
        self.pairs_without_cell = max(round(self.pairs_held()) - self.n_cells, 0)

    def replay(self, progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        """Reads the prompt a second time if the plan of the cache requires that. Keeps the prompt's logits.

        Does nothing if the budget covers the prompt, or after a second pass. Raises the errors of `read`.
        """
        cache = self._driver.cache
        self.replay_s = 0.0
        if cache is None or not cache.replays:
            return
        stats = cache.stats(self.number)
        n = stats.n_pending
        if self._replayed == n or cache.keeps_all(self.number):
            return
        pieces, room = self.passage.last(n), self._driver.context.n_ctx - self.n_cells
        requests = Requests(Composer(self._driver.model, self._driver.vision))
        chunks = list(parts(cache.plan, pieces, n, room, requests, begins=n == stats.n_tokens))
        told = bool(pieces) and isinstance(pieces[-1], TextPiece)
        self.run(self.second_pass(chunks, told), "reading the prompt again", progress, cancel)
        self._replayed = n

    def compress(self) -> None:
        """Compresses the tokens read since the last compression. Runs the second pass first, if it is still missing."""
        cache = self._driver.cache
        if cache is None:
            return
        self.replay()
        self.count_pending(cache)
        cache.compress(self.number)
        self._drops = cache.plan.drops
        self.answered, self._replayed = [], -1
        if not cache.stats(self.number).whole_bytes:
            self.passage = Passage()

    def count_pending(self, cache: libkvedge.Cache, n_tokens: int = 0) -> None:
        """Counts the tokens of the next compression, with n_tokens of the same pass, and the KV pairs held before them.

        The held pairs differ from the last compression's result: a decode policy drops rows during an answer, and the
        remaining rows of the answer are not compressed again.
        """
        n_pending = 0 if n_tokens and self._drops else cache.stats(self.number).n_pending
        if not self.compressed_tokens:
            self.measured_pairs = self.pairs_held() - n_pending
        self.compressed_tokens += n_pending + n_tokens

    def limit_image(self, i: int, most: int, fixed: bool = True) -> None:
        """Limits the KV pairs per head that image i (from 0 on) keeps from the next choice of rows on. -1: no limit.

        fixed: the caller sets the limit; False: ageing sets it. Raises the errors of kvedge_limit_tokens.
        """
        image = self.images[i]
        self._own_cache().limit_tokens(image.first, image.last, most, self.number)
        self.images[i] = image._replace(limit=most, fixed=fixed)

    def pairs_held(self) -> float:
        """Returns the KV pairs per KV head, averaged over heads and layers. 0 without a cache."""
        cache = self._driver.cache
        lengths = [n for heads in cache.lengths(self.number) for n in heads] if cache is not None else []
        return sum(lengths) / len(lengths) if lengths else 0

    @property
    def holds_every_row(self) -> bool:
        """Returns whether the cache holds all rows, without quantisation."""
        cache, quantised = self._driver.cache, KvType.parse(self._driver.size.kv_type).quantised
        return cache is not None and not quantised and self.pairs_held() >= cache.stats(self.number).n_tokens

    def measure(self) -> Kv:
        """Returns the figures of the KV memory. Call this right after compress."""
        cache, kv_type = self._driver.cache, KvType.parse(self._driver.size.kv_type)
        if cache is None:  # llama.cpp allocates cells for the whole context at once
            n = self._driver.model.kv_bytes_per_token(kv_type.plain.bytes_per_value) * self._driver.context.n_made
            return Kv(n, n, n)
        stats, held, kept = cache.stats(self.number), self.pairs_held(), self.row_bytes()
        # a prompt within the budget is not compressed: stats then show an older compression
        compressed = stats.n_compressions > self._n_compressions
        # on a device the size before the compression also counts masks, queries and room for new tokens
        before = stats.before_bytes if compressed and not stats.device_bytes else 0
        n_tokens = self.n_cells if stats.whole_bytes else stats.n_tokens  # whole rows do not have dropped turns
        kv = Kv(
            max(before, kept, self.plain_bytes(n_tokens)),
            kept,
            self.peak_bytes(),
            self.per_layer(),
            self.compressed_tokens,
            round(held - (0 if stats.whole_bytes else self.measured_pairs)),
            stats.whole_bytes,
            stats.whole_file_bytes,
            device_work(cache, self.number) if compressed else None,
        )
        self._n_compressions, self.measured_pairs, self.compressed_tokens = stats.n_compressions, held, 0
        return kv

    def peak_bytes(self) -> int:
        """Returns the largest KV memory so far in bytes, including messages that were taken back."""
        return max(self.peak, self._own_cache().stats(self.number).peak_bytes)

    def row_bytes(self) -> int:
        """Returns the bytes of the kept rows.

        On a device the statistics also count masks, queries and free rows, so this multiplies the number of pairs.
        """
        stats, kv_type = self._own_cache().stats(self.number), KvType.parse(self._driver.size.kv_type)
        if not stats.device_bytes:
            return stats.bytes
        held = self.pairs_held()
        pending = min(held, stats.n_pending)  # pending rows are not quantised yet
        element = kv_type.held_bytes_per_value(round(held - pending))
        of_head = self._driver.model.pair_width * (pending * kv_type.plain.bytes_per_value + (held - pending) * element)
        return round(of_head * stats.n_layers * stats.n_heads_kv)

    def plain_bytes(self, n_tokens: int) -> int:
        """Returns the bytes of all rows of n_tokens tokens, not quantised."""
        stats, kv_type = self._own_cache().stats(self.number), KvType.parse(self._driver.size.kv_type)
        pairs = n_tokens * stats.n_layers * stats.n_heads_kv
        return int(pairs * self._driver.model.pair_width * kv_type.plain.bytes_per_value)

    def per_layer(self) -> list[float]:
        """Returns the current KV pairs, averaged over the heads of each stored layer, to two decimal places."""
        lengths = self._own_cache().lengths(self.number)
        means = (round(sum(heads) / len(heads), 2) for heads in lengths if heads)
        return [int(n) if n == int(n) else n for n in means]

    def notes(self) -> list[str]:
        """Returns notes: why no whole rows are kept, and how many heads had too few queries for reducer match."""
        cache, out = self._driver.cache, list[str]()
        if cache is None:
            return out
        if problem := cache.keep_problem(self.number):
            out.append(f"--keep has no effect on this conversation: {problem}; the dropped KV pairs are lost")
        if n := cache.stats(self.number).n_unfitted:
            out.append(
                f"reducer match had no effect on {n} KV heads, which have fewer observed queries than kept KV pairs; "
                f"these heads use reducer evict"
            )
        return out

    @property
    def saves_whole_rows(self) -> bool:
        """Returns whether a snapshot includes whole rows. A method with a second pass needs more than whole rows."""
        cache = self._driver.cache
        again = cache is not None and (cache.replays if self.replays is None else self.replays)
        return cache is not None and not again and cache.stats(self.number).whole_bytes > 0

    def snapshot(self, model: str, pending: Iterable[int] = ()) -> Snapshot:
        """Returns the read and compressed tokens as bytes, with whole rows if they exist.

        pending: tokens of the answer that were not read. model: the model's name, which `restore` compares. Raises
        UnsupportedError, StateError, OutOfMemoryError.
        """
        cache, whole = self._own_cache(), self.saves_whole_rows
        if whole:
            self.take_back()
        stats = cache.stats(self.number)
        n_bytes = stats.bytes + (stats.whole_bytes if whole else 0)
        if n_bytes > _SMALL:
            memory.require(n_bytes, "a copy of the conversation", "close other programs")
        rows, measured = libkvedge.pack(cache, model, self.number, whole), (self.compressed_tokens, self.measured_pairs)
        answer, unread = tuple(self.answered or self.passage.tokens()), tuple(self.unread)
        images = tuple(self.images)
        return Snapshot(rows, *self._at(), stats.n_pending, *measured, tuple(pending), answer, unread, images)

    def restore(self, at: Snapshot, model: str) -> None:
        """Continues from a snapshot in an empty sequence. Raises SessionFileError, StateError, OutOfMemoryError."""
        libkvedge.unpack(self._own_cache(), at.rows, model, self.number)
        self.stand(at, "the kept state of an earlier conversation")

    def stand(self, at: Snapshot, name: str) -> None:
        """Restores the state of a snapshot whose rows are already in the cache. name: for errors."""
        stats = self._own_cache().stats(self.number)
        if stats.n_tokens < at.n_cells:
            raise SessionFileError(
                f"{name} is inconsistent: its state has more tokens than its KV rows; {name} cannot be used"
            )
        self.begin()
        self.n_past, self.n_cells = at.n_past, at.n_cells
        self._n_compressions = stats.n_compressions
        self.compressed_tokens, self.measured_pairs = at.compressed_tokens, at.held
        self.unread = list(at.unread)
        self.images = [image for image in at.images if image.last <= stats.n_tokens]
        for i, image in enumerate(self.images):
            if image.limit >= 0 and stats.whole_bytes:
                self.limit_image(i, image.limit, image.fixed)
        if at.answer:
            self.passage.add(TextPiece(list(at.answer)))

    def _own_cache(self) -> libkvedge.Cache:
        if self._driver.cache is None:
            name = self._driver.model.path.name
            raise UnsupportedError(f"kvedge cannot manage the KV cache of {name}, so the conversation cannot be copied")
        return self._driver.cache

    def follow(self, other: Sequence) -> None:
        """Becomes a copy of another sequence of the same context."""
        self._driver.context.copy(other.number, self.number)
        vars(self).update(vars(other), number=self.number, passage=Passage(other.passage.pieces))
        if self._driver.cache is not None:  # stats count per sequence
            self._n_compressions = self._driver.cache.stats(self.number).n_compressions
        self.answered, self.unread, self.images = list(other.answered), list(other.unread), list(other.images)

    def drop(self) -> None:
        self._driver.context.drop(self.number)
        self.begin()


class Positions:
    """Renumbers the positions of a sequence, and rotates its keys to match, before they pass `trained` (0: unknown).

    bound: KV pairs that a head keeps after compression; 0: unknown. n_renumberings: their number. why_not: why the
    model's keys cannot be rotated, or empty; positions then exceed the trained length.
    """

    def __init__(self, sequence: Sequence, cache: libkvedge.Cache, trained: int, bound: int = 0) -> None:
        self._sequence, self.trained = sequence, trained
        self._most = max(trained // 2, min(bound, trained * 3 // 4))
        self.n_renumberings, self.why_not = 0, ""
        try:
            cache.renumber(0, 1, sequence.number)  # changes nothing; raises if keys cannot rotate
        except UnsupportedError as error:
            self.why_not = str(error)

    def needed(self, n_tokens: int) -> bool:
        """Returns whether n_tokens more would pass the trained length."""
        return 0 < self.trained < self._sequence.n_past + n_tokens

    def make_room(self, n_tokens: int) -> None:
        """Renumbers the positions if n_tokens more would pass the trained length. The last logits become invalid then.

        A prompt longer than the trained length still passes that length. Raises StateError.
        """
        most = max(min(self._most, self.trained - n_tokens), self.trained // 8, 1)
        if not self.why_not and self.needed(n_tokens) and self._sequence.n_past > most:
            self._sequence.renumber(most)
            self.n_renumberings += 1


def device_work(cache: libkvedge.Cache, sequence: int = 0) -> DeviceWork | None:
    """Returns what the last compression did on devices, or None if it compressed no rows on devices."""
    stats, problem = cache.stats(sequence), cache.device_problem(sequence)
    if not stats.device_compressed and not problem:
        return None
    steps = (f"device_{name}_us" for name in ("measure", "choose", "gather", "merge", "upload"))
    moved = stats.device_fetched_bytes, stats.device_sent_bytes, stats.device_operations
    return DeviceWork(bool(stats.device_compressed), problem, *moved, *(getattr(stats, step) / 1e6 for step in steps))


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Cuts text into parts of at most `most` tokens, one pass each, for progress and Ctrl-C. Images stay whole."""
    for piece in pieces:
        rest: Piece | None = piece if piece.n_tokens else None
        while rest is not None:
            part, rest = split(rest, most)
            yield part


def encode(vision: Vision | None, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
    """Computes the embeddings of images. Raises ImageError, CancelledError, StateError."""
    images = [piece for piece in pieces if isinstance(piece, ImagePiece)]

    def look(i: int, share: float) -> None:
        progress(f"encoding image {i + 1} of {len(images)}", (i + share) / len(images))
        stop_if_set(cancel)

    for i, piece in enumerate(images):
        look(i, 0.0)
        if vision is None:
            raise StateError("the model was loaded without an image encoder; load the model with its mmproj file")
        vision.encode(piece, functools.partial(look, i))
