"""Vocabularies and chat templates of released models, from the pinned llama.cpp source (its models/)."""

import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_source

from .tokens import CONTROL, NORMAL, Vocabulary

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PADDING = 4  # token type that converters use for padding: user-defined


def extract(folder: Path) -> Path:
    """Writes the vocabularies, their references and the templates into `folder`. Returns the folder."""
    inside = f"{llama_source.VENDOR}/models/"
    with tarfile.open(llama_source.fetch()) as archive:
        for member in archive:
            name = member.name.removeprefix(inside)
            if not (member.isfile() and name != member.name and name.startswith(("ggml-vocab-", "templates/"))):
                continue
            if data := archive.extractfile(member):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data.read())
    return folder


def metadata(path: Path) -> dict[str, Any]:
    """Returns all metadata of a GGUF file. Faster than gguf.GGUFReader, which takes minutes for a long vocabulary."""
    data, at = path.read_bytes(), 24

    def number(form: str) -> Any:
        nonlocal at
        at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, data, at - struct.calcsize("<" + form))[0]

    def text() -> str:
        nonlocal at
        n = number("Q")
        at += n
        return data[at - n : at].decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            return number(_SCALARS[kind])
        of, n = number("I"), number("Q")
        return [value(of) for _ in range(n)]

    return {text(): value(number("I")) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


@dataclass(frozen=True)
class Released:
    """A vocabulary and a template of the pinned source. specials: further tokens of the family; they replace padding.

    own: the vocabulary is the family's; else it is the nearest available vocabulary.
    """

    vocabulary: str
    template: str
    specials: tuple[str, ...]
    own: bool = False
    end: str = ""  # the token that ends an answer, if the vocabulary names another token

    def read(self, folder: Path, size: int) -> Vocabulary:
        """Returns the tokenizer with at least `size` tokens, which is the number of rows of the family's matrices."""
        found = metadata(folder / f"ggml-vocab-{self.vocabulary}.gguf")
        meta = {key: value for key, value in found.items() if key.startswith("tokenizer.ggml.")}
        tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
        used = len(tokens)
        while tokens[used - 1].startswith("[PAD"):
            used -= 1
        del tokens[used:], types[used:]
        new = [word for word in self.specials if word not in set(tokens)]
        tokens += new
        types += [CONTROL] * len(new)
        tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
        types += [_PADDING] * (len(tokens) - len(types))
        if scores := meta.get("tokenizer.ggml.scores"):
            scores[used:] = [0.0] * (len(tokens) - used)
        if self.end:
            meta["tokenizer.ggml.eos_token_id"] = tokens.index(self.end)
        meta["tokenizer.chat_template"] = (folder / "templates" / f"{self.template}.jinja").read_text(encoding="utf-8")
        quiet = [i for i, kind in enumerate(types) if kind != NORMAL]
        return Vocabulary(meta, len(tokens), _ranges(quiet))


def _ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for n in numbers:
        if out and out[-1][1] == n:
            out[-1] = (out[-1][0], n + 1)
        else:
            out.append((n, n + 1))
    return tuple(out)
