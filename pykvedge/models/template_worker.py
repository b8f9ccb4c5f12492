"""Runs chat templates by llama.cpp's chat code, in this process or in a separate program (`main`).

The program has a memory limit, and its parent ends it if it takes too long (models/sandbox.py). It imports only the
standard library, because its start delays the first answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

MAX_OUTPUT = 1 << 24  # characters of a prompt
MEMORY = 1 << 29  # bytes of address space of a child process


@functools.cache
def chat_library(path: str) -> ctypes.CDLL:
    """Loads libkvedge-chat (native/chat/kvedge-chat.h). Raises OSError."""
    library, pointer, text = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_char_p
    out = ctypes.POINTER(pointer)
    library.kvedge_chat_read_template.argtypes = [text, out, out]
    library.kvedge_chat_write.argtypes = library.kvedge_chat_describe.argtypes = [pointer, text, out]
    library.kvedge_chat_open.argtypes = [text, out, out]
    library.kvedge_chat_read.argtypes = [pointer, text, ctypes.c_size_t, ctypes.c_int, out]
    for end in (library.kvedge_chat_close_template, library.kvedge_chat_close, library.kvedge_chat_free):
        end.argtypes, end.restype = [pointer], None
    return library


def taken(library: ctypes.CDLL, answer: ctypes.c_void_p) -> str:
    """Copies a text that the library allocated, and frees the library's copy."""
    text = ctypes.string_at(answer.value).decode("utf-8", "replace") if answer.value else ""
    library.kvedge_chat_free(answer)
    return text


class NativeTemplate:
    """A template that llama.cpp has parsed. Not thread-safe."""

    def __init__(self, library: str, source: str, bos: str, eos: str) -> None:
        """library: the path of libkvedge-chat. bos, eos: texts of the model's tokens. Raises ValueError, OSError."""
        self._library, self._handle, why = chat_library(library), ctypes.c_void_p(), ctypes.c_void_p()
        given = _encoded({"template": source, "bos": bos, "eos": eos})
        if self._library.kvedge_chat_read_template(given, ctypes.byref(self._handle), ctypes.byref(why)):
            raise ValueError(_reason(taken(self._library, why)))
        self.free = functools.partial(self._library.kvedge_chat_close_template, self._handle)  # for dropped.add

    def write(self, request: Mapping[str, Any]) -> str:
        """Writes a prompt. request: the JSON object of kvedge_chat_write. Raises ValueError."""
        prompt = str(self._run("write", request))
        if len(prompt) > MAX_OUTPUT:
            raise ValueError(f"its output has more than {MAX_OUTPUT} characters")
        return prompt

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the dialect of answers to a request: the JSON object of kvedge_chat_describe. Raises ValueError."""
        return dict(self._run("describe", request))

    def _run(self, what: str, request: Mapping[str, Any]) -> Any:
        answer = ctypes.c_void_p()
        run = getattr(self._library, f"kvedge_chat_{what}")
        failed = run(self._handle, _encoded(request), ctypes.byref(answer))
        text = taken(self._library, answer)
        if failed:
            raise ValueError(_reason(text))
        return json.loads(text)


def _reason(text: str) -> str:
    """Returns llama.cpp's one-line reason from a message that also quotes the template."""
    return text.rpartition("Error: ")[2].strip().partition("\n")[0] or "unknown error"


def _encoded(value: Any) -> bytes:
    # half of a surrogate pair is invalid in UTF-8
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _answer(template: Callable[[], NativeTemplate], what: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": getattr(template(), what)(request)}
    except MemoryError:
        return {"fatal": "it takes too much memory"}
    except Exception as error:
        message = str(error)[:1000] or type(error).__name__
        return {"fatal": "it takes too much memory"} if message == "out of memory" else {"error": message}


def _limit() -> None:
    # Windows has no resource module, and macOS ignores the limit: the parent watches the memory there
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers each line of JSON with a line of JSON. The first line is the template."""
    _limit()
    template = functools.cache(functools.partial(NativeTemplate, *json.loads(requests.readline())))
    for line in requests:
        answers.write(json.dumps(_answer(template, *json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
