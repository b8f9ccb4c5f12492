"""A Sequence is one conversation in a context: prompts are read into it pass by pass, compressed, and put aside."""

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
from pykvedge.runtime.llama_context import Place
from pykvedge.runtime.lookup import BREAK, Lookup
from pykvedge.runtime.replay import Part, Passage, Requests, parts, split
from pykvedge.runtime.report import DeviceWork, Kv
from pykvedge.runtime.snapshot import ImageSpan, Snapshot
from pykvedge.system import memory

# what comes next - an image, or all of a text that is not read yet - and whether its last token is asked for its logits
Ahead: TypeAlias = tuple[Piece, bool]
# a generator of them; it is sent how many tokens of the last one a pass has read
Passes: TypeAlias = Generator[Ahead, int, None]

_SMALL = 4 << 20  # bytes of a copy for which nobody asks the system first: a server makes one for each answer


class Spot(NamedTuple):
    """Between two tokens of a sequence: the position, and the number, from 0 on, of the one behind it."""

    position: int
    token: int


class Sequence(Place):
    """What one sequence has read, and what becomes of it. Sequences of one context may take turns, pass by pass.

    replays: whether what is read is noted for a second pass; None: if the plan of the cache goes by one. share: of the
    prompt, or of the second pass over it, that was read. replay_s: seconds that the last second pass took. lookup:
    learns what is read.
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
        self.uncounted = 0  # KV pairs of a head that stand for no cell, as positions turned
        self.passage = Passage()  # since the last compression; where whole rows are kept, since the beginning
        self.said = 0  # tokens of the last message, behind its images
        self.images: list[ImageSpan] = []
        self.answered: list[int] = []  # tokens of an answer, since the last compression
        self.unread: list[int] = []  # tokens of an answer that was taken back
        self.compressed_tokens, self.held = 0, 0.0  # since they were measured, and pairs per head then
        self._n_compressions, self._drops = 0, False
        self._done = self._total = 0
        self._verified: list[int] = []
        self._drafted = 0  # tokens that a verification takes back
        self._replayed, self.replay_s = -1, 0.0  # tokens that there were at the second pass; -1: there was none

    @property
    def share(self) -> float:
        return self._done / max(self._total, 1)

    def steps(self, pieces: Iterable[Piece]) -> Passes:
        """Reads pieces: yields what comes next, and is sent how many tokens of it one pass has read."""
        self.take_back()
        pieces = [piece for piece in pieces if piece.n_tokens]
        self.said = pieces[-1].n_tokens if pieces and isinstance(pieces[-1], TextPiece) else 0
        pieces = [piece for piece in [TextPiece(self.unread), *pieces] if piece.n_tokens]
        self.unread = []
        self._done, self._total = 0, sum(piece.n_tokens for piece in pieces)
        yield from self._steps(pieces, want_logits=True, note=True)

    def take_back(self) -> None:
        """Where whole rows are kept, removes the last answer, which is read again before what comes next, over them.

        So whole rows are those that a prompt has which is read at once.
        """
        cache, tokens = self._driver.cache, self.answered
        if cache is None or not cache.keeps or not tokens or not cache.stats(self.number).whole_bytes:
            return
        if self._driver.context.cut(self.number, self.n_past - len(tokens)):
            self.n_past, self.n_cells = self.n_past - len(tokens), max(self.n_cells - len(tokens), 0)
            self.passage.drop_last(len(tokens))
            self.answered, self.unread = [], tokens

    def again(self, chunks: list[Part], keep_logits: bool = True) -> Passes:
        """Reads a prompt a second time, as `steps` does, chunk by chunk, and takes each chunk back.

        keep_logits: those of the prompt's last token, which was read just before, are there again afterwards.
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
        """Lets `lookup` learn what was read."""
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
        """Appends pieces, images encoded; afterwards the logits of the last token are there.

        Raises ContextError, CancelledError, and what libkvedge met meanwhile.
        """
        if self._driver.cache is not None:
            self._driver.cache.expect(sum(piece.n_tokens for piece in pieces), self.number)
        self.run(self.steps(pieces), "reading the prompt", progress, cancel)

    def run(self, passes: Passes, what: str, progress: Progress, cancel: threading.Event | None) -> None:
        """Reads to the end what `steps` or `again` yields. Raises as `read` does."""
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
        """Appends a piece that one pass holds, an image encoded before. Raises as `read` does."""
        self._driver.decode(self, piece, want_logits)
        self._note(piece)

    def extend(self, token: int) -> None:
        """Appends one generated token; afterwards its logits are there. Raises ContextError."""
        self.read_step(TextPiece([token]), want_logits=True)
        self.answered.append(token)

    def draft(self, token: int) -> None:
        """Appends a token that `verify` over whole rows takes back; afterwards its logits are there."""
        self._driver.decode(self, TextPiece([token]), want_logits=True)
        self._drafted += 1

    def verify(self, tokens: list[int], whole: bool = False) -> None:
        """Appends tokens of an answer in one pass; afterwards the logits of each are there. `accept` has to follow.

        whole: the tokens attend to whole rows, and drafts are gone. Raises as `read` does, UnsupportedError where no
        token can be taken back, and StateError where there are no whole rows.
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
        """Keeps the first n_tokens of those that were verified; the others are gone."""
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
        """Notes that a pass over several sequences read so many tokens of a text into this one."""
        self.n_past, self.n_cells = self.n_past + n_tokens, self.n_cells + n_tokens

    def took(self, token: int) -> None:
        """Notes that such a pass read a generated token."""
        self.move(1)
        self.answered.append(token)
        if self.replays:
            self.passage.add(TextPiece([token]))

    def renumber(self, most: int) -> None:
        """Makes positions smaller, so that the next token comes at `most` at the latest. The last logits are gone.

        Raises UnsupportedError, StateError.
        """
        cache = self._own_cache()
        self.n_past = cache.renumber(self.n_past, most, self.number)
        self.n_cells = cache.cells(self.number)
        self.recount()

    def cut_out(self, begin: Spot, end: Spot) -> None:
        """Removes the tokens between two spots; the positions behind them move up. The last logits are gone.

        Raises StateError, OutOfMemoryError, UnsupportedError.
        """
        cache, context = self._own_cache(), self._driver.context
        if not context.cut(self.number, begin.position, end.position):
            raise StateError("llama.cpp could not remove tokens from the conversation")
        cache.check()
        self.images = [image for image in self.images if not begin.token <= image.first < end.token]
        self.renumber(self.n_past - (end.position - begin.position))

    def spot(self, n_ahead: int) -> Spot:
        """Tells where a message begins that is read next, behind n_ahead tokens of the answer before it."""
        ahead = n_ahead + len(self.unread)
        return Spot(self.n_past + ahead, self._own_cache().stats(self.number).n_tokens + ahead)

    def recount(self) -> None:
        """Counts the KV pairs of a head that are held beyond the cells, once positions have turned."""
        self.uncounted = max(round(self.pairs_held()) - self.n_cells, 0)

    def replay(self, progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        """Reads the prompt a second time if the plan of the cache asks for that. Its logits stay.

        Does nothing where the budget covers the prompt, or where that was done. Raises as `read` does.
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
        self.run(self.again(chunks, told), "reading the prompt again", progress, cancel)
        self._replayed = n

    def compress(self) -> None:
        """Compresses what was read since the last time, after a second pass if there was none."""
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
        """Notes what is compressed next, n_tokens that come with it included, and what is held before it.

        That is not what the last compression left: a decode policy drops rows while an answer is generated, which is
        then not compressed again.
        """
        n_pending = 0 if n_tokens and self._drops else cache.stats(self.number).n_pending
        if not self.compressed_tokens:
            self.held = self.pairs_held() - n_pending
        self.compressed_tokens += n_pending + n_tokens

    def limit_image(self, i: int, most: int, fixed: bool = True) -> None:
        """Lets an image, from 0 on, keep at most so many pairs of a head at the next choice; -1: no limit.

        fixed: as the caller wants it, and not by its age. Raises what kvedge_limit_tokens reports.
        """
        image = self.images[i]
        self._own_cache().limit_tokens(image.first, image.last, most, self.number)
        self.images[i] = image._replace(limit=most, fixed=fixed)

    def pairs_held(self) -> float:
        """Averages the KV pairs per KV head; they are 0 where there is no cache."""
        cache = self._driver.cache
        lengths = [n for heads in cache.lengths(self.number) for n in heads] if cache is not None else []
        return sum(lengths) / len(lengths) if lengths else 0

    @property
    def has_all(self) -> bool:
        """Tells whether the kept rows are all rows, as they were computed."""
        cache, quantised = self._driver.cache, KvType.parse(self._driver.size.kv_type).quantised
        return cache is not None and not quantised and self.pairs_held() >= cache.stats(self.number).n_tokens

    def measure(self) -> Kv:
        """Measures the KV memory, right after compress."""
        cache, kv_type = self._driver.cache, KvType.parse(self._driver.size.kv_type)
        if cache is None:  # llama.cpp allocates for the whole context at once
            n = self._driver.model.kv_bytes_per_token(kv_type.plain.bytes_per_value) * self._driver.context.n_made
            return Kv(n, n, n)
        stats, held = cache.stats(self.number), self.pairs_held()
        # a prompt whose budget covers it is not compressed, and leaves the figures of the last compression alone
        compressed = stats.n_compressions > self._n_compressions
        device = device_work(cache, self.number) if compressed else None
        # what lay on a device was more than rows: masks, queries, and room for tokens to come
        before = stats.before_bytes if compressed and not (device and device.compressed) else 0
        there = max(before, stats.bytes)
        kv = Kv(
            there if stats.whole_bytes else max(there, self.uncompressed_bytes()),  # turns may have left whole rows
            stats.after_bytes if compressed else stats.bytes,
            stats.peak_bytes,
            self.per_layer(),
            self.compressed_tokens,
            round(held - (0 if stats.whole_bytes else self.held)),
            stats.whole_bytes,
            stats.whole_file_bytes,
            device,
        )
        self._n_compressions, self.held, self.compressed_tokens = stats.n_compressions, held, 0
        return kv

    def uncompressed_bytes(self) -> int:
        """Counts the bytes of all tokens that were ever read, had none been dropped and none been quantised."""
        stats, kv_type = self._own_cache().stats(self.number), KvType.parse(self._driver.size.kv_type)
        pairs = stats.n_tokens * stats.n_layers * stats.n_heads_kv
        return int(pairs * self._driver.model.pair_width * kv_type.plain.bytes_per_value)

    def per_layer(self) -> list[float]:
        """Averages the KV pairs that are held now over the heads of each stored layer, to two places."""
        lengths = self._own_cache().lengths(self.number)
        means = (round(sum(heads) / len(heads), 2) for heads in lengths if heads)
        return [int(n) if n == int(n) else n for n in means]

    def notes(self) -> list[str]:
        """Says why no whole rows are kept, and which heads the last compression had too few queries to fit rows in."""
        cache, out = self._driver.cache, list[str]()
        if cache is None:
            return out
        if problem := cache.keep_problem(self.number):
            out.append(f"whole rows are not kept: {problem}; what was evicted is gone")
        if n := cache.stats(self.number).n_unfitted:
            out.append(
                f"{n} heads were not matched, as fewer queries of the prompt were kept than rows are left; they keep "
                "rows as reducer evict leaves them"
            )
        return out

    @property
    def carries_whole(self) -> bool:
        """Tells whether whole rows are saved with others. A method that reads a prompt twice needs more than them."""
        cache = self._driver.cache
        again = cache is not None and (cache.replays if self.replays is None else self.replays)
        return cache is not None and not again and cache.stats(self.number).whole_bytes > 0

    def snapshot(self, model: str, pending: Iterable[int] = ()) -> Snapshot:
        """Returns what was read and compressed as bytes, whole rows too.

        pending: tokens of the answer that were not read. model: a name that `restore` compares. Raises
        UnsupportedError, StateError, OutOfMemoryError.
        """
        cache, whole = self._own_cache(), self.carries_whole
        if whole:
            self.take_back()
        stats = cache.stats(self.number)
        n_bytes = stats.bytes + (stats.whole_bytes if whole else 0)
        if n_bytes > _SMALL:
            memory.require(n_bytes, "a copy of the conversation", "close other programs")
        rows, measured = libkvedge.pack(cache, model, self.number, whole), (self.compressed_tokens, self.held)
        answer, unread = tuple(self.answered or self.passage.tokens()), tuple(self.unread)
        images = tuple(self.images)
        return Snapshot(rows, *self._at(), stats.n_pending, *measured, tuple(pending), answer, unread, images)

    def restore(self, at: Snapshot, model: str) -> None:
        """Goes on from a snapshot where nothing was read. Raises SessionFileError, StateError, OutOfMemoryError."""
        libkvedge.unpack(self._own_cache(), at.rows, model, self.number)
        self.stand(at, "what was kept of an earlier conversation")

    def stand(self, at: Snapshot, name: str) -> None:
        """Goes on where the rows that are in the cache already were. name: what they came from."""
        stats = self._own_cache().stats(self.number)
        if stats.n_tokens < at.n_cells:
            raise SessionFileError(f"{name} contradicts itself; it cannot be used")
        self.begin()
        self.n_past, self.n_cells = at.n_past, at.n_cells
        self._n_compressions, self.compressed_tokens, self.held = stats.n_compressions, at.compressed_tokens, at.held
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
            raise UnsupportedError(f"kvedge does not keep the memory of {name}, so it cannot be put aside")
        return self._driver.cache

    def follow(self, other: Sequence) -> None:
        """Becomes a copy of another sequence of the same context."""
        self._driver.context.copy(other.number, self.number)
        vars(self).update(vars(other), number=self.number, passage=Passage(other.passage.pieces))
        if self._driver.cache is not None:  # a copy counts its own
            self._n_compressions = self._driver.cache.stats(self.number).n_compressions
        self.answered, self.unread, self.images = list(other.answered), list(other.unread), list(other.images)

    def drop(self) -> None:
        self._driver.context.drop(self.number)
        self.begin()


class Positions:
    """Makes the positions of a sequence smaller, and turns its keys, before they pass `trained`; 0: not known.

    bound: KV pairs that a head keeps for good, 0: that is not known. turned: so many times. why_not: why the model's
    keys cannot turn, or empty; positions go on counting then.
    """

    def __init__(self, sequence: Sequence, cache: libkvedge.Cache, trained: int, bound: int = 0) -> None:
        self._sequence, self.trained = sequence, trained
        self._most = max(trained // 2, min(bound, trained * 3 // 4))
        self.turned, self.why_not = 0, ""
        try:
            cache.renumber(0, 1, sequence.number)  # nothing was read: whether the model can
        except UnsupportedError as error:
            self.why_not = str(error)

    def needed(self, n_tokens: int) -> bool:
        """Tells whether so many tokens more would pass the trained length."""
        return 0 < self.trained < self._sequence.n_past + n_tokens

    def make_room(self, n_tokens: int) -> None:
        """Turns, if need be, for so many tokens more; the logits of the last token are gone then.

        A prompt that is longer than the model was trained for passes that length nevertheless. Raises StateError.
        """
        most = max(min(self._most, self.trained - n_tokens), self.trained // 8, 1)
        if not self.why_not and self.needed(n_tokens) and self._sequence.n_past > most:
            self._sequence.renumber(most)
            self.turned += 1


def device_work(cache: libkvedge.Cache, sequence: int = 0) -> DeviceWork | None:
    """Tells what the last compression did on devices; None where no rows lay there."""
    stats, problem = cache.stats(sequence), cache.device_problem(sequence)
    if not stats.device_compressed and not problem:
        return None
    steps = (f"device_{name}_us" for name in ("measure", "choose", "gather", "merge", "upload"))
    moved = stats.device_fetched_bytes, stats.device_sent_bytes, stats.device_operations
    return DeviceWork(bool(stats.device_compressed), problem, *moved, *(getattr(stats, step) / 1e6 for step in steps))


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Cuts text so that each step is one pass through the model: progress shows, and Ctrl-C is heard."""
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
            raise StateError("no image encoder was loaded")
        vision.encode(piece, functools.partial(look, i))
