"""Turns a conversation into the tokens and images that a model reads, by the model's chat template.

Only the template writes special tokens. If users wrote the text of a special token or of the picture marker, the
template receives a stand-in for it. Later the text replaces the stand-in and is tokenised as plain text.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pykvedge.errors import ModelError, UsageError
from pykvedge.models import toolresults
from pykvedge.models.images import Picture
from pykvedge.models.prompt import IMAGE, PLACE, ChatTemplate, Message, places
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.models.vocabulary import LONG, Vocabulary

USUAL_MARKER = "<__media__>"  # the picture marker of llama.cpp's mtmd
_CERTAIN = 32  # characters of a text that is in a prompt only if the template wrote it there
_TRIED = 8  # most messages that are tried one by one
_PATTERNS = 1024  # sequences of roles that are remembered


@dataclass(frozen=True)
class PromptText:
    """A prompt as text, with a marker for each picture. hidden: stand-in in the text -> the words it replaces."""

    text: str
    hidden: Mapping[str, str] = field(default_factory=dict)


class Composer:
    """Writes a model's prompts as text, and cuts them into pieces of tokens and images."""

    def __init__(self, model: Vocabulary, vision: Vision | None) -> None:
        """Raises ModelError for an unreadable chat template, or a first token that no text writes."""
        self._model, self._vision = model, vision
        self._bos = model.special_text("bos")
        self._template = ChatTemplate(model.chat_template(), self._bos, model.special_text("eos"))
        self.marker = vision.marker if vision else ""
        self._written_whole: set[tuple[object, ...]] = set()  # sequences of roles whose texts the template writes
        if model.adds_bos and model.tokenize(self._bos) != [model.bos]:
            raise ModelError(
                f"the model's first token {self._bos!r:.40} is not marked as special, so a prompt cannot begin with "
                f"it; convert the model again"
            )

    def first(self, messages: list[Message], values: Mapping[str, Any] | None = None) -> PromptText:
        """Writes the conversation up to the assistant's answer, or up to the end of an assistant message to continue.

        values: variables for the template.
        """
        hidden: dict[str, str] = {}
        known, safe = self._hide_in(values or {}, hidden), self._safe(self._known(messages), hidden)
        begun = self.lead + safe.pop().text if len(safe) > 1 and safe[-1].role == "assistant" else ""
        text = self._written(safe, known) + begun
        if self._model.adds_bos and not text.startswith(self._bos):
            text = self._bos + text
        return PromptText(text, hidden)

    def following(self, messages: list[Message], values: Mapping[str, Any] | None = None) -> PromptText:
        """Writes the text after the last answer. messages: the last three are user, assistant, user."""
        hidden: dict[str, str] = {}
        safe, known = self._safe(self._known(messages), hidden), self._hide_in(values or {}, hidden)
        return PromptText(self._written(safe, known, later=True), hidden)

    def _written(self, messages: list[Message], values: Mapping[str, Any], later: bool = False) -> str:
        """Runs the template, and checks that it writes the text of the last question and of each system message.

        later: the messages before the last question were read before. A system message that the template drops, and
        that does not begin the conversation, moves into a user message. Short texts may be in the prompt by chance, so
        other texts stand for them, once for each sequence of roles.
        """
        write = self._template.following if later else self._template.first
        text = write(messages, self.marker, values)
        asked = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
        first = asked if later else 0
        given = "\n".join(message.text for message in messages[first:])
        roles = (later, *(message.role for message in messages))
        known = roles in self._written_whole
        stand_ins: dict[int, str] = {}
        for i, message in enumerate(messages[first:], first):
            said = message.text.strip() if i == asked or message.role == "system" else ""
            if said and ((len(said) < _CERTAIN and not known) or text.count(said) < given.count(said)):
                stand_ins[i] = secrets.token_hex(16)
        changed = [replace(message, text=stand_ins.get(i, message.text)) for i, message in enumerate(messages)]
        without = write(changed, self.marker, values) if stand_ins else ""
        for i in [i for i, stand_in in stand_ins.items() if stand_in not in without][:_TRIED]:
            one_changed = [*messages[:i], changed[i], *messages[i + 1 :]]
            if write(one_changed, self.marker, values) != text:
                continue  # the template changes texts, for example their case
            if (moved := toolresults.later_systems_as_text(messages)) != messages:
                return self._written(moved, values, later)
            what = "use another model file" if i == asked else "write this text into the question"
            raise ModelError(f"the model's chat template drops the text of the {messages[i].role} message; {what}")
        if len(self._written_whole) >= _PATTERNS:
            self._written_whole.clear()
        self._written_whole.add(roles)
        return text

    @functools.cached_property
    def lead(self) -> str:
        """The text that the template puts before an answer: mostly a space or nothing.

        Raises ModelError for a template that cannot write answers.
        """
        return self._template.lead()

    def text(self, messages: list[Message], values: Mapping[str, Any] | None = None) -> str:
        """Returns the prompt of `first` as one text, in which special tokens and users' words look alike."""
        prompt = self.first(messages, values)
        text = prompt.text
        for word, meant in prompt.hidden.items():
            text = text.replace(word, meant)
        return text

    @property
    def knows_calls(self) -> bool:
        """Whether the template itself writes tool calls and their results."""
        return self._tool_adapter is not toolresults.as_text

    @functools.cached_property
    def _tool_adapter(self) -> toolresults.ToolAdapter:
        return toolresults.tool_adapter(self._template, self.marker)

    def _known(self, messages: list[Message]) -> list[Message]:
        """Rewrites tool calls and their results so that the template can write them."""
        tools = any(message.role == "tool" or message.fields.get("tool_calls") for message in messages)
        return self._tool_adapter(messages) if tools else messages

    def pieces(self, prompt: PromptText, pictures: list[Picture]) -> list[Piece]:
        """Cuts the prompt into pieces, with the pictures at their markers. Raises ImageError, UsageError."""
        if self._vision is None or not pictures:
            if not (tokens := self.tokens(prompt)):
                raise ModelError("the model's tokeniser makes no tokens of the prompt; convert the model again")
            return [TextPiece(tokens)]
        if len(prompt.text) <= LONG and not any(word in prompt.text for word in prompt.hidden):
            return self._vision.split(prompt.text, pictures)
        texts = prompt.text.split(self.marker)
        if len(texts) != len(pictures) + 1:
            raise UsageError(
                f"the number of image places in the prompt differs from the number of images, {len(pictures)}"
            )
        out: list[Piece] = []
        for text, picture in zip(texts, [*pictures, None], strict=True):
            _join(out, TextPiece(self.tokens(PromptText(text, prompt.hidden)) if text else []))
            for piece in self._vision.split(self.marker, [picture]) if picture else []:
                _join(out, piece)
        return out

    def as_written(self, parts: Sequence[str | int], pictures: list[Picture]) -> list[Piece]:
        """Cuts a prompt that is no conversation. parts: texts, and numbers of tokens.

        The text of a special token becomes the token. `marker`, or USUAL_MARKER in a text without `marker`, becomes a
        picture. If the first part is a text, the tokeniser's first token comes before it.

        Raises ImageError, UsageError.
        """
        if pictures:
            if self._vision is None or len(parts) != 1 or not isinstance(parts[0], str):
                raise UsageError("a prompt with pictures must be one text")
            text = parts[0] if self.marker in parts[0] else parts[0].replace(USUAL_MARKER, self.marker)
            return self._vision.split((self._bos if self._model.adds_bos else "") + text, pictures)
        out: list[int] = []
        for i, part in enumerate(parts):
            out += self._model.tokenize(part, begins=i == 0) if isinstance(part, str) else [part]
        self._model.check(out)
        if not out:
            raise UsageError("the prompt is empty; give a text")
        return [TextPiece(out)]

    def reply(self, prompt: PromptText, reply: str) -> list[int]:
        """Tokenises a reply after its prompt, because tokens depend on the text before them."""
        hidden = dict(prompt.hidden)
        reply = self._hide(reply, hidden)
        text = prompt.text.rpartition(self.marker)[2] if self.marker else prompt.text
        before = self.tokens(PromptText(text, hidden))
        both = self.tokens(PromptText(text + self.lead + reply, hidden))
        return both[len(before) :] if both[: len(before)] == before else self.tokens(PromptText(reply, hidden))

    def tokens(self, prompt: PromptText) -> list[int]:
        """Tokenises a text without picture markers."""
        model, rest = self._model, prompt.text
        stand_ins = [word for word in prompt.hidden if word in rest]
        if not stand_ins:
            return model.tokenize(rest)
        put_back = re.compile("|".join(stand_ins))
        # special tokens split a text: the text between two of them is tokenised separately
        special = model.special_words(rest)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", rest) if special else [rest]
        out, plain, before = [], "", ""
        for part in parts:
            text = put_back.sub(lambda found: prompt.hidden[found[0]], part)
            if text == part:
                plain += part
            else:
                text = text.lstrip() if model.eats_blanks(before) else text
                out += model.tokenize(plain) + model.tokenize(text, special=False)
                plain = ""
            before = part
        return out + model.tokenize(plain)

    def tokens_of(self, text: str) -> list[int]:
        """Tokenises a text from the template."""
        return self._model.tokenize(text)

    def _safe(self, messages: list[Message], hidden: dict[str, str]) -> list[Message]:
        return [
            replace(message, text=self._hide_said(message, hidden), fields=self._hide_in(message.fields, hidden))
            for message in messages
        ]

    def _hide_said(self, message: Message, hidden: dict[str, str]) -> str:
        """Hides special words in a message, except at the places of pictures: that word is special in some models."""
        text = message.text
        if IMAGE not in text or (message.role != "user" and not message.pictures) or not self._is_image_special:
            return self._hide(text, hidden)
        placed = places(text) == len(message.pictures)
        parts = re.split(f"({PLACE.pattern})", text)
        return "".join(
            part if placed and part == IMAGE else self._hide(IMAGE if PLACE.fullmatch(part) else part, hidden)
            for part in parts
        )

    @functools.cached_property
    def _is_image_special(self) -> bool:
        return IMAGE in self._model.special_words(IMAGE)

    def _hide_in(self, value: Any, hidden: dict[str, str]) -> Any:
        """Returns a JSON value with stand-ins in all texts."""
        every = "\n".join(texts(value))  # one search instead of thousands of searches in short texts
        if (self.marker and self.marker in every) or self._model.special_words(every):
            return self._hide_each(value, hidden)
        return value

    def _hide_each(self, value: Any, hidden: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._hide(value, hidden)
        if isinstance(value, Mapping):
            return {self._hide(str(key), hidden): self._hide_each(part, hidden) for key, part in value.items()}
        return [self._hide_each(part, hidden) for part in value] if isinstance(value, (list, tuple)) else value

    def _hide(self, text: str, hidden: dict[str, str]) -> str:
        """Returns the text with stand-ins for special tokens and markers, and adds the stand-ins to `hidden`."""
        words = [self.marker] if self.marker and self.marker in text else []
        while words := words or self._model.special_words(text):
            for word in words:
                stand_in = secrets.token_hex(16)
                hidden[stand_in] = word
                text = text.replace(word, stand_in)
            words = []
        return text


def texts(value: Any) -> Iterator[str]:
    """Yields all texts in a JSON value, including keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts(part)


def _join(pieces: list[Piece], piece: Piece) -> None:
    """Appends a piece. Joins a text piece to a text piece at the end."""
    if isinstance(piece, ImagePiece) or not pieces or isinstance(pieces[-1], ImagePiece):
        if piece.n_tokens:
            pieces.append(piece)
    else:
        pieces[-1] = TextPiece([*pieces[-1].tokens, *piece.tokens])
