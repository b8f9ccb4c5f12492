"""Reads paths as users write them: with ~, quotes, backslashes, or as the file: URL of a dragged file."""

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
    """Replaces ~ and ~name by home folders. Raises UsageError for an unknown home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"the home folder in the path {path} cannot be found; write the absolute path") from None


def ask(question: Callable[[Path], bool], path: Path) -> bool:
    """Returns Path.exists, Path.is_file or Path.is_dir of a path. Raises UsageError if the system refuses an answer."""
    try:
        return question(path)
    except (OSError, ValueError) as error:  # the name is too long, or the folder is closed to this user
        raise UsageError(f"{path} cannot be accessed: {getattr(error, 'strerror', None) or error}") from None


def check_local(text: str) -> None:
    """Raises UsageError for an address on the web, which pathlib would shorten by a slash."""
    if re.match("https?://", text, re.I):
        raise UsageError(f"{text:.80} is an address on the web; download the file, and give its path")


def typed(text: str) -> Path:
    """Reads a path that was typed, dragged or completed at a prompt; blanks need no quotes.

    Raises UsageError for an empty path, an unknown home folder, and a URL that names no file of this machine.
    """
    text = text.strip()
    if text.lower().startswith("file:"):
        return _of_url(text)
    text = unquoted(text)
    check_local(text)
    if not text:
        raise UsageError("the path is empty")
    return expanded(text)


def unquoted(text: str) -> str:
    """Removes quotes around a text, or backslashes in it. A missing end quote is allowed."""
    if text[:1] in _QUOTED:
        quote, inner = text[0], text[1:]
        inner = inner.removesuffix(quote)
        return re.sub(r'\\(["\\])', r"\1", inner) if quote == '"' and os.sep == "/" else inner
    return _ESCAPED.sub(r"\1", text) if os.sep == "/" else text


def _of_url(text: str) -> Path:
    from urllib.request import url2pathname  # a late import: it loads all of HTTP and would slow every start

    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError(f"{text} is not a file on this machine; write the file's path")
    return Path(url2pathname(parts.path))


def completions(text: str) -> list[str]:
    """Returns completions of a half-typed path, quoted or escaped like the path."""
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
