"""Limits the JSON of a request by scanning its bytes, because a JSON parser builds all values before any check.

Most bytes of a body are pictures: strings that begin with `data:`, have the key "data", or are in the list
"multimodal_data".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pykvedge.errors import RequestError
from pykvedge.serve.errors import TOO_LONG

_BRACKET = re.compile(rb"[\[\]{}]")
_BLANKS = b" \t\r\n"
_LISTED = re.compile(rb"\s*:\s*\[\s*")  # between the key of a list and its first string
_LIST = b'"multimodal_data"'
_PICTURE = 32 << 20  # most bytes of a string with one picture, in base64


@dataclass(frozen=True)
class Bounds:
    """text: bytes outside pictures. values: number of objects, lists and their members. depth: of nesting."""

    text: int = 1 << 20
    values: int = 100_000
    depth: int = 64

    @classmethod
    def of(cls, n_ctx: int) -> Bounds:
        """Returns the limits of a server whose conversations have n_ctx tokens."""
        return cls(max(1 << 20, 64 * n_ctx), 100_000 + n_ctx)

    def check(self, body: bytes | bytearray) -> int:
        """Returns the bytes of the body's pictures. Raises RequestError for a body over a limit."""
        pictures = depth = values = at = 0
        listed = False  # inside a list of pictures
        while True:
            quote = body.find(b'"', at)
            end = quote if quote >= 0 else len(body)
            if end - pictures > self.text:
                raise self._long(len(body))
            between = body[at:end]
            values += between.count(b",") + between.count(b"{") + between.count(b"[")
            if values > self.values:
                raise RequestError(413, f"the body has more than {self.values} JSON values; send less", "too_large")
            depth = self._depth(between, depth)
            if quote < 0:
                return pictures
            begun = _LISTED.fullmatch(between) is not None and body.endswith(_LIST, 0, at)
            listed = begun or (listed and b"]" not in between)
            named = between.rstrip(_BLANKS).endswith(b":") and body.endswith(b'"data"', 0, at)
            picture = listed or named or body[quote + 1 : quote + 6].lower() == b"data:"
            at, plain = self._end_of_string(body, quote, pictures)
            if picture and plain:
                pictures += at - quote
                if at - quote > _PICTURE:
                    raise RequestError(
                        413,
                        f"a text in the body has {(at - quote) >> 20} MiB, more than {_PICTURE >> 20} MiB; send less",
                        "too_large",
                    )
            elif at - pictures > self.text:
                raise self._long(len(body))

    def _depth(self, between: bytes | bytearray, depth: int) -> int:
        for found in _BRACKET.findall(between):
            depth += 1 if found in b"{[" else -1
            if depth > self.depth:
                raise RequestError(400, "the body is nested too deeply", "invalid_json")
        return depth

    def _end_of_string(self, body: bytes | bytearray, quote: int, pictures: int) -> tuple[int, bool]:
        """Returns the end of the string that begins at `quote`, and whether the string has no escaped quote."""
        at, plain = quote + 1, True
        while (end := body.find(b'"', at)) >= 0:
            before = _backslashes(body, at, end, self.text)
            if before % 2 == 0 and before < self.text:
                return end + 1, plain
            at, plain = end + 1, False
            if at - pictures > self.text:
                raise self._long(len(body))
        return len(body), plain

    def _long(self, n_bytes: int) -> RequestError:
        most = f"{self.text / (1 << 20):.3g} MiB"
        return RequestError(400, f"the body has {n_bytes / (1 << 20):.3g} MiB; without its pictures it may have "
        f"{most}; "
                            "more exceeds the available context size", TOO_LONG, "messages")  # fmt: skip


def _backslashes(body: bytes | bytearray, begin: int, end: int, most: int) -> int:
    """Counts the backslashes directly before `end`, at most about `most`."""
    width = 64
    while True:
        before = body[max(begin, end - width) : end]
        n = len(before) - len(before.rstrip(b"\\"))
        if n < width or n >= most:
            return n
        width *= 2
