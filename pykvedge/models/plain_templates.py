"""Plain chat templates do work that is bounded by their length and the length of the messages.

A template is a program by the maker of the model file. A plain one runs in this process, others in a child process that
a runaway template cannot hurt (models/sandbox.py).
"""

from __future__ import annotations

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import loopcontrols

MOST_SOURCE = 1 << 20  # characters of a template

# a plain template has only these nodes: no loop but over the messages, no variable that could grow, no product
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test,
    nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.Tuple, nodes.List, nodes.Break, nodes.Continue,
)  # fmt: skip


def is_plain(source: str) -> bool:
    """Tells whether a template's work is bounded. Raises ValueError for one that is too large or nested too deeply.

    Nothing is compiled for that, since jinja2 computes what is constant while it compiles.
    """
    if len(source) > MOST_SOURCE:
        raise ValueError(f"it has {len(source)} characters")
    try:
        return _is_plain(Environment(extensions=[loopcontrols]).parse(source), in_loop=False)
    except TemplateError:  # llama.cpp takes tags that jinja2 does not know
        return False
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


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
