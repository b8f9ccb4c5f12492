"""Turns a conversation into text by the model's chat template, turn by turn."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import loopcontrols

from pykvedge.errors import ModelError, UsageError
from pykvedge.models import sandbox
from pykvedge.models.images import Picture
from pykvedge.models.sandbox import Sandbox
from pykvedge.models.template_worker import MAX_OUTPUT

# most models without a template are trained on the conversation format of LLaVA-1.5 (Vicuna)
FALLBACK = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }} {% else %}"
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions. {% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} {% endif %}"
    "{% if message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

MAX_SOURCE = 1 << 20  # characters of a template

# The nodes of a plain template: loops only over messages, no variable that could grow, no product.
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test,
    nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.Tuple, nodes.List, nodes.Break, nodes.Continue,
)  # fmt: skip

IMAGE = "<image>"  # the place of a picture in a prompt; the word itself is written \<image>
PLACE = re.compile(r"\\?" + IMAGE)


def escaped(text: str) -> str:
    """Escapes IMAGE, so the text has no place for a picture."""
    return text.replace(IMAGE, "\\" + IMAGE)


def places(text: str) -> int:
    """Returns the number of places for pictures in a prompt."""
    return sum(found == IMAGE for found in PLACE.findall(text))


def check_places(text: str, n_pictures: int) -> None:
    """Raises UsageError unless a prompt has one place for each picture, or no place."""
    n = places(text)
    if n and n != n_pictures:
        raise UsageError(
            f"the prompt has {n} {'place' if n == 1 else 'places'} for images ({IMAGE}), and {n_pictures or 'no'} "
            f"{'image was' if n_pictures == 1 else 'images were'} given; to write the word {IMAGE} itself, write "
            f"\\{IMAGE}"
        )


@dataclass
class Message:
    """One turn of a conversation.

    fields: other values for the chat template, for example the tool calls of an answer.
    """

    role: str  # system, user or assistant; tool, if the template knows it
    text: str
    pictures: list[Picture] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def content(self, marker: str, before: Sequence[Picture] = ()) -> str:
        """Returns the text with the marker in the places of pictures. before: pictures in earlier messages.

        If the text has no places (`IMAGE`), a line with label and marker per picture comes before it. A single picture
        of a first message has no label, unless it is a page.
        """
        if self.role != "user" and not self.pictures:
            return self.text
        n = len(self.pictures)
        placed = places(self.text) == n
        text = PLACE.sub(lambda found: marker if placed and found[0] == IMAGE else IMAGE, self.text)
        if placed or n == 0:
            return text
        if len(before) + n == 1 and not self.pictures[0].page:
            return f"{marker}\n{text}"
        shown = [*before, *self.pictures]
        return "".join(f"{label(p, shown[:i])}: {marker}\n" for i, p in enumerate(self.pictures, len(before))) + text


def label(picture: Picture, before: Sequence[Picture]) -> str:
    """Returns the label of a picture: its number in the conversation, or its page number in the document.

    Pages of a second document also name the document's number. before: earlier pictures of the conversation.
    """
    if not picture.page:
        return f"Image {len(before) + 1}"
    documents = dict.fromkeys(p.document for p in [*before, picture] if p.page)
    number = list(documents).index(picture.document) + 1
    return f"Page {picture.page}" if number == 1 else f"Document {number}, page {picture.page}"


def contents(messages: list[Message], marker: str) -> list[dict[str, Any]]:
    """Returns role, content and fields of each message, as chat templates read them."""
    before: list[Picture] = []
    out = []
    for message in messages:
        out.append({"role": message.role, "content": message.content(marker, before), **message.fields})
        before += message.pictures
    return out


def is_plain(source: str) -> bool:
    """Returns whether a template's work is bounded. Raises ValueError for a template too large or nested too deeply.

    The template is parsed and not compiled, because jinja2 evaluates constants while it compiles.
    """
    if len(source) > MAX_SOURCE:
        raise ValueError(f"the template is too long: {len(source)} characters")
    try:
        return _is_plain(Environment(extensions=[loopcontrols]).parse(source), in_loop=False)
    except TemplateError:  # llama.cpp accepts tags that jinja2 does not know
        return False
    except (RecursionError, MemoryError):
        raise ValueError("the template is nested too deeply") from None


def _is_plain(node: nodes.Node, in_loop: bool) -> bool:
    if isinstance(node, nodes.For):
        over = node.iter.node if isinstance(node.iter, nodes.Getitem) else node.iter
        if in_loop or node.recursive or not (isinstance(over, nodes.Name) and over.name == "messages"):
            return False
        in_loop = True
    elif isinstance(node, nodes.Filter):
        if node.name != "trim" or node.args or node.kwargs:
            return False
    elif isinstance(node, nodes.Call):
        if not (isinstance(node.node, nodes.Name) and node.node.name == "raise_exception"):
            return False
    elif isinstance(node, nodes.Mod):  # with a text on the left, % is a format, which can write any number of blanks
        if not (isinstance(node.left, nodes.Getattr) and isinstance(node.left.node, nodes.Name)):
            return False
        if node.left.node.name != "loop":
            return False
    elif not isinstance(node, _PLAIN):
        return False
    return all(_is_plain(child, in_loop) for child in node.iter_child_nodes())


class ChatTemplate:
    """A Jinja template that llama.cpp runs: a plain template in this process, any other in a child process."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        """source: None takes the fallback. Raises ModelError for an unreadable template, LibraryError."""
        source = source or FALLBACK
        try:
            self._plain = sandbox.here(source, bos, eos) if is_plain(source) else None
        except ValueError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}") from None
        self._sandbox = Sandbox(source, bos, eos)
        self._n_outputs = source.count("{{")

    def first(self, messages: list[Message], marker: str, values: Mapping[str, Any] | None = None) -> str:
        """Writes the conversation up to the place of the assistant's answer. values: variables for the template."""
        return self._render(contents(messages, marker), values=values)

    def following(self, messages: list[Message], marker: str, values: Mapping[str, Any] | None = None) -> str:
        """Writes the text after the last answer: its end, the user's new message, and the start of the next answer.

        messages: the conversation; the last three are user, assistant, user.
        """
        # a stand-in for the answer can be found in any template's output
        stand_in = secrets.token_hex(16)
        rendered = contents(messages, marker)
        rendered[-2] = {"role": "assistant", "content": stand_in}
        _, found, rest = self._render(rendered, values=values).partition(stand_in)
        if not found:  # the template drops earlier answers
            rest = self._render(rendered[-1:], values=values)
        return rest

    def lead(self) -> str:
        """Returns the text that the template puts before an answer: mostly a space or nothing."""
        stand_in = secrets.token_hex(16)
        question = {"role": "user", "content": "?"}
        answered = [question, {"role": "assistant", "content": stand_in}]
        before, found, _ = self._render(answered, prompt=False).partition(stand_in)
        asked = self._render([question])
        return before[len(asked) :] if found and before.startswith(asked) else ""

    def _render(
        self, messages: list[dict[str, Any]], prompt: bool = True, values: Mapping[str, Any] | None = None
    ) -> str:
        """values: llama.cpp knows `tools`, `enable_thinking` and `add_generation_prompt`; others are variables."""
        others = dict(values or {})
        request = {
            "messages": messages,
            "add_generation_prompt": others.pop("add_generation_prompt", prompt),
            "tools": others.pop("tools", []),
            "enable_thinking": others.pop("enable_thinking", True) is not False,
            "values": others,
        }
        try:
            if self._plain and self._n_outputs * len(json.dumps(messages)) <= MAX_OUTPUT:
                return self._plain.write(request)
            return self._sandbox.write(request)
        except ValueError as error:
            raise ModelError(f"the model's chat template fails: {error}") from None
