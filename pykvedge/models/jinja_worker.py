"""This renders chat templates, in this process or as a program of its own that a runaway template cannot hurt.

A template is a program by the maker of the model file. `is_plain` finds templates whose work is bounded by their length
and the length of the messages. Others run in `main`, a child process with a limit of memory; its parent ends it when it
takes too long (models/sandbox.py). The child imports only jinja2, since its start is part of the first answer.

The same child finds a template's dialect (models/dialect.py), for which llama.cpp renders the template several times.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import sys
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SOURCE, MOST_OUTPUT = 1 << 20, 1 << 24  # characters of a template, and of what it writes
MEMORY = 1 << 29  # bytes of address space that a child may take

# a plain template has only these nodes: no loop but over the messages, no variable that could grow, no product
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test,
    nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.Tuple, nodes.List, nodes.Break, nodes.Continue,
)  # fmt: skip


def environment() -> ImmutableSandboxedEnvironment:
    """Makes the environment that chat templates expect."""
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    found.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return found


def is_plain(source: str) -> bool:
    """Tells whether a template's work is bounded. Raises TemplateError if the source is no template.

    Nothing is compiled for that, since jinja2 computes what is constant while it compiles.
    """
    if len(source) > MOST_SOURCE:
        raise TemplateError(f"it has {len(source)} characters")
    try:
        return _is_plain(environment().parse(source), in_loop=False)
    except (RecursionError, MemoryError):
        raise TemplateError("it is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python takes
        raise TemplateError(str(error)) from None


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
    elif isinstance(node, nodes.Mod):  # of text it would be a format, which writes any number of blanks
        if not (isinstance(node.left, nodes.Getattr) and isinstance(node.left.node, nodes.Name)):
            return False
        if node.left.node.name != "loop":
            return False
    elif not isinstance(node, _PLAIN):
        return False
    return all(_is_plain(child, in_loop) for child in node.iter_child_nodes())


def render(template: Template, values: dict[str, Any]) -> str:
    """Writes a prompt. Raises TemplateError if it is too long, and any exception that the template raises."""
    out, length = [], 0
    for piece in template.generate(**values):
        length += len(piece)
        if length > MOST_OUTPUT:
            raise TemplateError(f"it writes more than {MOST_OUTPUT} characters")
        out.append(piece)
    return "".join(out)


def _refuse(message: str) -> Any:
    raise TemplateError(message)


@functools.cache
def chat_library(path: str) -> ctypes.CDLL:
    """Loads libkvedge-chat (native/chat/kvedge-chat.h). Raises OSError."""
    library, pointer, text = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_char_p
    library.kvedge_chat_describe.argtypes = [text, ctypes.POINTER(pointer)]
    library.kvedge_chat_open.argtypes = [text, ctypes.POINTER(pointer), ctypes.POINTER(pointer)]
    library.kvedge_chat_read.argtypes = [pointer, text, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(pointer)]
    library.kvedge_chat_close.argtypes = library.kvedge_chat_free.argtypes = [pointer]
    library.kvedge_chat_close.restype = library.kvedge_chat_free.restype = None
    return library


def taken(library: ctypes.CDLL, answer: ctypes.c_void_p) -> str:
    """Copies a text that the library made, and frees the library's copy."""
    text = ctypes.string_at(answer.value).decode("utf-8", "replace") if answer.value else ""
    library.kvedge_chat_free(answer)
    return text


def describe(library: str, request: dict[str, Any]) -> dict[str, Any]:
    """Finds the dialect of a template. Raises TemplateError, OSError."""
    chat, answer = chat_library(library), ctypes.c_void_p()
    failed = chat.kvedge_chat_describe(json.dumps(request).encode(), ctypes.byref(answer))
    text = taken(chat, answer)
    if failed:
        raise TemplateError(text)
    return json.loads(text)


# ---------------------------------------------------------------------------------------------------


def _answer(templates: dict[str, Template], request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "library" in request:
            return {"dialect": describe(request["library"], request["describe"])}
        source = request["source"]
        if source not in templates:
            templates[source] = environment().from_string(source)
        return {"text": render(templates[source], request["values"])}
    except MemoryError:
        return {"fatal": "it takes too much memory"}
    except RecursionError:
        return {"fatal": "it is nested too deeply"}
    except Exception as error:
        return {"error": str(error)[:1000] or type(error).__name__}


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent looks at the memory from time to time
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ValueError, OSError):  # macOS takes no such limit
        return


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers a line of JSON for each line of JSON."""
    _limit()
    templates: dict[str, Template] = {}
    for line in requests:
        answers.write(json.dumps(_answer(templates, json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
