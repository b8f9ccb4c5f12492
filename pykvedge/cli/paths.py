"""People give paths with a home folder, quotes, backslashes, or as the URL of a file that was dragged here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from pykvedge.errors import UsageError

_ESCAPED = re.compile(r"\\(.)")
_QUOTED = ("'", '"')


def expanded(path: Path | str) -> Path:
    """Replaces ~ and ~name by home folders. Raises UsageError for a name without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path} names a home folder that cannot be found; write the whole path") from None


def ask(question: Callable[[Path], bool], path: Path) -> bool:
    """Answers Path.exists, Path.is_file or Path.is_dir. Raises UsageError where that cannot be told."""
    try:
        return question(path)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be looked into
        raise UsageError(f"{path} cannot be looked for: {getattr(error, 'strerror', None) or error}") from None


def typed(text: str) -> Path:
    """Reads a path that somebody typed, dragged or completed at a prompt; blanks need no quotes.

    Raises UsageError for an empty one, a home folder that is unknown, and a URL that names no file of this machine.
    """
    text = text.strip()
    if text.lower().startswith("file:"):
        return _of_url(text)
    text = unquoted(text)
    if not text:
        raise UsageError("the path is empty")
    return expanded(text)


def unquoted(text: str) -> str:
    """Takes away the quotes around it, or the backslashes in it; an open quote counts as closed at the end."""
    if text[:1] in _QUOTED:
        quote, inner = text[0], text[1:]
        inner = inner.removesuffix(quote)
        return re.sub(r'\\(["\\])', r"\1", inner) if quote == '"' and os.sep == "/" else inner
    return _ESCAPED.sub(r"\1", text) if os.sep == "/" else text


def _of_url(text: str) -> Path:
    from urllib.request import url2pathname  # brings all of HTTP, for which every start would wait

    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError(f"{text} names no file of this machine; write its path")
    return Path(url2pathname(parts.path))


def completions(text: str) -> list[str]:
    """Lists what a half-typed path may become, written in the same manner: with an open quote, or with backslashes."""
    quote = text[:1] if text[:1] in _QUOTED else ""
    folder, begun = os.path.split(unquoted(text))
    try:
        found = sorted(os.scandir(expanded(folder or ".")), key=lambda entry: entry.name)
        hidden = begun.startswith(".")
        found = [e for e in found if e.name.startswith(begun) and (hidden or not e.name.startswith("."))]
        names = [(os.path.join(folder, e.name), e.is_dir()) for e in found]  # noqa: PTH118 - "./" and "~/" stay
    except (OSError, ValueError, UsageError):
        return []
    return [_written(name, quote) + ("/" if is_dir else quote) for name, is_dir in names]


def _written(name: str, quote: str) -> str:
    if quote == '"' and os.sep == "/":
        return quote + re.sub(r'(["\\])', r"\\\1", name)
    if quote or os.sep != "/":
        return quote + name
    return re.sub(r"([\s'\"\\])", r"\\\1", name)
