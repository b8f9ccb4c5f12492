"""Prepares jobs for a slot: finds the earlier conversation, cuts the prompt into tokens, and encodes images."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pykvedge.errors import ContextError, KvedgeError, RequestError, UsageError
from pykvedge.library import libkvedge, native_plan
from pykvedge.models.composer import Composer, texts
from pykvedge.models.images import notes
from pykvedge.models.packaged import hints
from pykvedge.models.prompt import Message, check_places
from pykvedge.models.shape import ModelShape
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.making import check_protection
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.drafting import check_policy
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import N_UBATCH
from pykvedge.runtime.loaded import Loan
from pykvedge.runtime.pruning import planned
from pykvedge.runtime.replay import Part, Passage, Requests, parts
from pykvedge.runtime.report import Drafts
from pykvedge.runtime.sequence import encode
from pykvedge.runtime.sessionfile import fingerprint
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.serve.edited import KnownConversations
from pykvedge.serve.job import Job, Limits, Request, Step
from pykvedge.serve.parked import Park, message_keys, name_of
from pykvedge.system.guard import undoing

_QUICK_TEXT = 100_000  # bytes: shorter texts are looked up at once
_PART = 1 << 14  # characters per part
_TOKEN = 16  # most bytes of text per token of the context


@dataclass
class Work:
    """A prepared job: its prompt is cut and its images are encoded.

    snapshot: the conversation to continue; with logits: an equal prompt that was read before. need: most bytes of keys
    and values. max_answer: most tokens of the answer. replays: whether the plan has a second pass. second_pass: chunks.
    """

    job: Job
    pieces: list[Piece]
    generation: Generation
    snapshot: Snapshot | None
    need: int = 0
    max_answer: int = 0
    replays: bool = False
    second_pass: list[Part] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)


class Preparer:
    """Prepares jobs. Any thread may call the methods."""

    def __init__(self, loan: Loan, park: Park, limits: Limits) -> None:
        """Raises ModelError for an unreadable chat template."""
        self._share = limits.share_prompts
        self._model, self._park, self._limits, self._threads = loan.model, park, limits, loan.threads
        self.vision = Vision(loan.encoder, loan.caches.images) if loan.encoder is not None else None
        self._known = KnownConversations()
        self.composer, self.composing = Composer(loan.model, self.vision), threading.Lock()
        encoder = fingerprint(loan.encoder.header) if loan.encoder is not None else ""
        self.model_name = fingerprint(loan.model.header)
        keeps = ["exact" if limits.exact else "keep"] if limits.keep is not None else []
        self._about = [libkvedge.version(), self.model_name, encoder, limits.storage.key, *keeps]
        element = KvType.parse(limits.kv_type).plain.bytes_per_value
        self.bytes_per_token = int(ModelShape.of(loan.model.header).kv_per_token(element))
        self.bytes_per_answered = self.bytes_per_token * (2 if limits.exact else 1)  # whole rows too

    def warm(self) -> None:
        """Prepares the vocabulary for grammars ahead of time. 100,000 tokens take a second."""
        with suppress(KvedgeError):  # a request with a grammar raises this error again
            self._model.table()

    def prepare(self, job: Job) -> Work:
        """Prepares a job. Raises ContextError, RequestError, ImageError, UsageError, ModelError, GrammarError,
        CancelledError."""
        request = job.request
        self._check(request)
        if (there := self._known_prompt(job)) is not None:
            return there
        parked = self._find(job)
        pieces = self._pieces(job, parked)
        job.forget_messages()
        with undoing(lambda: self.release(pieces)):
            if request.plan.pruner == "none":  # a pruner reduces the tokens only after encoding
                self._room(parked, sum(piece.n_tokens for piece in pieces))
            self._encode(job, pieces)
            job.report.tokens.add(pieces)
            job.report.notes += [*notes(request.pictures), *hints(self._model.path, request.pictures)]
            if parked is not None:
                job.report.tokens.reused = parked.n_cells
                job.report.tokens.prompt += len(parked.unread)
            return self._fitting(Work(job, pieces, self._generation(job), parked))

    def at_once(self, job: Job) -> Work | None:
        """Prepares a job whose prompt was read before, or returns None. Fast. Raises the errors of `prepare`."""
        request = job.request
        if request.count_only or request.sampling.constrained:
            return None
        return self._known_prompt(job) if request.n_text <= _QUICK_TEXT else None

    def measured(self, request: Request) -> Request:
        """Returns the request with the bytes of its text, before a template or a tokenizer reads the text.

        Raises ContextError for more text than a conversation holds.
        """
        prompt = request.prompt.parts if request.prompt is not None else ()
        content = [[message.text, message.fields] for message in request.messages]
        given = texts([request.values, prompt, content])  # texts that a chat template may write
        n, n_ctx = sum(len(text.encode("utf-8", "replace")) for text in given), self._limits.n_ctx
        if n > 4 * n_ctx and n > (most := n_ctx * self._longest):
            raise _too_long(f"{n} bytes of text", -(-n * n_ctx // most), n_ctx, f" tokens, at most {most} bytes")
        if n > 4 * n_ctx and (least := self._at_least(request, n_ctx + n_ctx // 4)) > n_ctx:
            raise _too_long(f"{least} tokens or more", least, n_ctx)
        return replace(request, n_text=n)

    def _at_least(self, request: Request, enough: int) -> int:
        """Counts the text's tokens part by part. Returns the count once it exceeds `enough`, else 0.

        Each cut may add a token to the count, so `enough` must include a margin.
        """
        parts = request.prompt.parts if request.prompt is not None else ()
        text, n = "\n".join([part for part in parts if isinstance(part, str)] + [m.text for m in request.messages]), 0
        for begin in range(0, len(text), _PART):
            n += len(self._model.tokenize(text[begin : begin + _PART], special=False))
            if n > enough:
                return n
        return 0

    @functools.cached_property
    def _longest(self) -> int:
        return self._model.longest(_TOKEN)

    def _known_prompt(self, job: Job) -> Work | None:
        request = job.request
        job.message_keys = job.message_keys or _request_keys(request)
        alone = request.patches or (request.prompt is not None and not request.prompt.keep)
        owner = "" if self._share else request.owner
        job.name = "" if alone else self._name(request, job.message_keys, owner)
        read = self._park.get_read(job.name) if job.name else None
        if read is None and request.edited and not alone:
            name = self._name(request, job.message_keys, owner, edited=True)
            if (read := self._park.get_read(name)) is not None:
                job.name, job.edited = name, True
        if read is None:
            return None
        job.report.demoted_images = _forgotten(read) if request.edited else None
        job.forget_messages()
        job.report.tokens.reused = read.n_cells
        return self._fitting(Work(job, [], self._generation(job), read))

    def _generation(self, job: Job) -> Generation:
        request = job.request
        shown = request.dialect.shown if request.dialect is not None else frozenset[int]()
        job.report.drafts = Drafts() if self._limits.drafts else None
        begun = bool(job.begun) or request.prompt is not None
        return Generation(self._model, request.sampling, job.report, begun, shown)

    def count(self, job: Job) -> None:
        """Writes the number of prompt tokens into the report. Raises ImageError, UsageError, ModelError."""
        self._check(job.request)
        pieces = self._pieces(job, None)
        job.forget_messages()
        job.report.tokens.add(pieces)
        self.release(pieces)

    def written(self, request: Request) -> str:
        """Returns the prompt text of a conversation, without the BOS token that the tokenizer adds.

        Raises UsageError, ModelError.
        """
        with self.composing:
            text = self.composer.text(request.messages, request.values)
        return text.removeprefix(self._model.special_text("bos")) if self._model.adds_bos else text

    def template_can(self) -> dict[str, bool]:
        """Returns what the chat template supports, under llama-server's names."""
        source = self._model.chat_template() or ""
        with self.composing:
            calls = self.composer.knows_calls
        return {
            "supports_string_content": True,
            "supports_typed_content": False,  # typed content becomes text before the template
            "supports_system_role": True,  # without support its text begins the first message
            "supports_tools": "tools" in source,
            "supports_tool_calls": calls,
            "supports_parallel_tool_calls": calls,
            "supports_object_arguments": True,
            "supports_preserve_reasoning": "reasoning_content" in source,
        }

    def name_after(self, job: Job) -> str:
        request = job.request
        return self._name(request, self._said_after(job), request.owner, job.edited)

    def _said_after(self, job: Job) -> list[Any]:
        keys = job.message_keys[:-1] if job.begun else job.message_keys
        return [*keys, *message_keys([Message("assistant", job.begun + job.report.text)])]

    def remember(self, job: Job) -> None:
        """Remembers a conversation's messages, to recognise it when its pictures are left out."""
        if self._limits.keep is not None and not self._limits.exact:
            self._known.add(self.name_after(job), self._frame(job.request), self._said_after(job))

    def release(self, pieces: list[Piece]) -> None:
        """Frees the encoder's data of the pieces."""
        if self.vision is not None:
            self.vision.release(pieces)

    def _check(self, request: Request) -> None:
        if self._limits.exact:
            check_policy(request.plan, "--exact")
        if request.pictures and self.vision is None:
            raise UsageError(
                f"{self._model.path.name} was loaded without an image encoder, so it cannot read "
                f"images; start the server with --mmproj"
            )
        for message in request.messages:
            if message.role == "user":
                check_places(message.text, len(message.pictures))

    def _find(self, job: Job) -> Snapshot | None:
        """Returns the parked conversation that the last user message continues, or None. Raises RequestError."""
        request, messages = job.request, job.request.messages
        goes_on = [m.role for m in messages[-3:]] == ["user", "assistant", "user"] and not messages[-2].fields
        found = self._park.get(self._name(request, job.message_keys[:-1], request.owner)) if goes_on else None
        if not request.edited:
            return found
        why = "edited does not work with --exact; start the server without --exact" if self._limits.exact else ""
        if self._limits.keep is None:
            why = "edited needs uncompressed KV rows; start the server with --keep ram or --keep disk"
        if why:
            raise RequestError(400, f"kvedge.edited: {why}", "unsupported", "kvedge")
        job.report.demoted_images = 0
        if found is None and any(m.role == "assistant" for m in messages):
            if not goes_on:
                raise unknown_conversation("the last three messages must be user, assistant (text only) and user")
            if (found := self._find_edited(job)) is None:
                raise unknown_conversation("the server has no conversation with the same texts and more pictures")
        return found

    def _find_edited(self, job: Job) -> Snapshot | None:
        """Returns the conversation before pictures were left out, or None. Records which pictures were left out."""
        request, keys, owner = job.request, job.message_keys[:-1], job.request.owner
        name = self._name(request, keys, owner, edited=True)
        known = [(name, list[bool]()), *self._known.find(self._frame(request), keys)]
        for name, dropped in known:
            if (found := self._park.get(name)) is None:
                continue
            shown = [i for i, image in enumerate(found.images) if image.limit != 0]
            if dropped and len(shown) != len(dropped):
                raise unknown_conversation("the model reads a picture in several parts, so pictures cannot be demoted")
            job.demoted = [i for i, gone in zip(shown, dropped, strict=False) if gone]
            job.edited, job.report.demoted_images = True, len(job.demoted) + _forgotten(found)
            job.name = job.name and self._name(request, job.message_keys, "" if self._share else owner, edited=True)
            return found
        return None

    def _frame(self, request: Request) -> list[Any]:
        return [*self._about, request.plan.to_json(), request.values, request.owner]

    def _name(self, request: Request, keys: Sequence[Any], owner: str, edited: bool = False) -> str:
        return name_of([*self._about, *(["edited"] if edited else [])], request.plan, request.values, keys, owner)

    def _pieces(self, job: Job, parked: Snapshot | None) -> list[Piece]:
        request, composer = job.request, self.composer
        before: list[Piece] = [TextPiece(list(parked.pending))] if parked is not None and parked.pending else []
        if request.prompt is not None:
            pieces = composer.as_written(request.prompt.parts, request.pictures)
        else:
            write, shown = composer.first, request.pictures
            if parked is not None:
                write, shown = composer.following, request.messages[-1].pictures
            with self.composing:
                prompt = write(request.messages, request.values)
            pieces = composer.pieces(prompt, shown)
        return before + planned(pieces, request.plan, self._threads)

    def _encode(self, job: Job, pieces: list[Piece]) -> None:
        images = [piece for piece in pieces if isinstance(piece, ImagePiece)]
        largest = max((piece.n_tokens for piece in images), default=0)
        if self.vision is not None and largest > N_UBATCH and self.vision.non_causal():
            raise ContextError(f"an image has {largest} tokens, and one pass holds {N_UBATCH}; send a smaller image")
        for piece in images:
            piece.key = piece.key if self._share else job.request.owner + piece.key
        encode(self.vision, pieces, lambda what, share: job.emit(Step(what, share)), job.cancelled)
        stop_if_set(job.cancelled)

    def _fitting(self, work: Work) -> Work:
        with undoing(work.generation.close):
            self._fit(work)
        return work

    def _fit(self, work: Work) -> None:
        """Sets the answer's limits. Raises ContextError or RequestError for a prompt above context or memory."""
        limits, n = self._limits, work.n_tokens
        plan = work.job.request.plan
        before = work.snapshot
        there, kept = (before.n_cells, len(before.rows)) if before is not None else (0, 0)
        n += len(before.unread) if before is not None else 0
        if before is None:
            check_protection(plan, n)
        room = self._room(before, work.n_tokens)
        beside = native_plan.plan_budget(plan, there + n) if limits.keep is not None else 0  # beside whole rows
        prompt = kept + (n + beside) * self.bytes_per_token
        if prompt + self.bytes_per_token > limits.memory:
            raise RequestError(
                413,
                f"the keys and values of the prompt need {prompt >> 20} MiB, more than the limit of "
                f"{limits.memory >> 20} MiB for all conversations; send less, or start the server with a larger "
                f"--memory",
                "too_large",
            )
        fits = (limits.memory - prompt) // max(self.bytes_per_answered, 1)
        work.max_answer = min(room, fits)
        answer = min(work.max_answer, work.job.request.sampling.max_tokens)
        work.replays = native_plan.replays(plan)
        if work.replays and work.pieces:
            work.second_pass = self._second_pass(work)
        chunk = max((part.chunk.n_tokens for part in work.second_pass), default=0)
        work.need = prompt + max(answer * self.bytes_per_answered, chunk * self.bytes_per_token)

    def _room(self, before: Snapshot | None, n: int) -> int:
        """Returns how many tokens fit behind a prompt of n tokens. Raises ContextError if none."""
        there, n_ctx = before.n_cells if before is not None else 0, self._limits.n_ctx
        n += len(before.unread) if before is not None else 0
        if there + n < n_ctx:
            return n_ctx - there - n
        after = f" after {there} tokens of the conversation" if there else ""
        raise _too_long(f"{n} tokens{after}", there + n, n_ctx)

    def _second_pass(self, work: Work) -> list[Part]:
        """Returns the second pass's chunks; none if not needed. Raises ContextError, UsageError, RequestError."""
        if why := self.why_no_replay():
            raise UsageError(
                f"method '{work.job.request.plan.method}' needs a second pass over the prompt: {why}; "
                f"use another method"
            )
        plan, before = work.job.request.plan, work.snapshot or Snapshot(b"", 0, 0)
        pending, whole = before.n_pending + work.n_tokens, before.n_cells + work.n_tokens
        if native_plan.plan_budget(plan, pending, later=pending < whole) >= pending:
            return []
        answer: list[Piece] = [TextPiece(list(before.answer))] if before.answer else []
        known = Passage([*answer, *work.pieces])
        requests, begins = Requests(self.composer), pending == whole
        try:
            return list(parts(plan, known.last(pending), pending, work.max_answer, requests, begins))
        except ContextError as error:
            if work.max_answer == self._limits.n_ctx - whole:
                raise
            raise RequestError(413, f"{error}; or start the server with a larger --memory", "too_large") from None

    def why_no_replay(self) -> str:
        """Returns why the model cannot read a prompt a second time, or an empty string."""
        if self._model.recurrent:
            return f"{self._model.path.name} has recurrent layers, which cannot remove tokens"
        return ""


def _too_long(size: str, n_tokens: int, n_ctx: int, unit: str = "") -> ContextError:
    why = f"the message of {size} exceeds the available context size ({n_ctx}{unit})"
    return ContextError(f"{why}; send less, or start the server with a larger --ctx", n_tokens, n_ctx)


def _forgotten(at: Snapshot) -> int:
    return sum(image.limit == 0 for image in at.images)


def unknown_conversation(why: str) -> RequestError:
    """Returns the error for pictures that cannot be demoted."""
    return RequestError(
        409, f"kvedge.edited: {why}; omit kvedge.edited to read all messages again", "unknown_conversation", "kvedge"
    )


def _request_keys(request: Request) -> list[Any]:
    """Returns what the request says, with hashes in place of pictures."""
    if request.prompt is None:
        return message_keys(request.messages)
    return [["", list(request.prompt.parts), {}, [picture.key for picture in request.pictures]]]
