"""Finds the places where a change makes a Python file a different program. A Site is one change of one expression."""

from __future__ import annotations

import ast
from dataclasses import dataclass

KINDS = ("comparison", "constant", "dropped call", "swapped arguments", "boolean", "return")
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
DECLARATIONS = ("TypeVar", "ParamSpec", "NamedTuple", "cast")  # only a type checker reads these


@dataclass(frozen=True)
class Site:
    """A change: bytes begin to end of a file become `text`. inside: the functions and classes around the place."""

    kind: str  # one of KINDS
    line: int
    begin: int
    end: int
    text: str
    inside: tuple[str, ...]

    def applied(self, source: str) -> str:
        data = source.encode()
        return (data[: self.begin] + self.text.encode() + data[self.end :]).decode()


class _Finder(ast.NodeVisitor):
    """Finds the sites of a file. Ignores annotations, docstrings and code that only a type checker reads."""

    def __init__(self, source: str) -> None:
        lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._data = source.encode()
        self._inside: tuple[str, ...] = ()
        self.found: list[Site] = []

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self._data[begin:end].decode()

    def _add(self, kind: str, node: ast.AST, span: tuple[int, int], text: str) -> None:
        self.found.append(Site(kind, node.lineno, *span, text, self._inside))  # type: ignore[attr-defined]

    def _between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        """Returns the bytes of the operator, with the blanks and parentheses around it."""
        return self._span(left)[1], self._span(right)[0]

    # ------------------------------------------------------------------------------------------- ignored code

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test or "__main__" in test:
            return
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # before Python 3.12, the parts of an f-string have no positions

    def _visit_inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        before, self._inside = self._inside, (*self._inside, node.name)
        for child in [*node.decorator_list, *node.body]:
            self.visit(child)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.visit(default)
        self._inside = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_inside  # noqa: N815

    # ------------------------------------------------------------------------------------------- changed code

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            begin, end = self._between(left, right)
            between = self._data[begin:end].decode()
            word = {ast.IsNot: "is not", ast.NotIn: "not in"}.get(type(op)) or ast.unparse(
                ast.Compare(ast.Name("a"), [op], [ast.Name("b")])
            )[2:-2]
            if between.count(word) == 1:
                self._add("comparison", node, (begin, end), between.replace(word, OTHER[type(op)]))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for i, (left, right) in enumerate(zip(node.values, node.values[1:], strict=False)):
            begin, end = self._between(left, right)
            between = self._data[begin:end].decode()
            if between.count(word) == 1 and i == 0:  # only the first operator: a later one would regroup the parts
                self._add("boolean", node, (begin, end), between.replace(word, other))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("boolean", node, self._span(node), f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, self._span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self._add("constant", node, self._span(node), repr(node.value * 2 if node.value else 1.0))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("dropped call", node, self._span(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).rpartition(".")[2] in DECLARATIONS:
            return
        plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
        for first, second in zip(node.args, node.args[1:], strict=False) if plain else ():
            a, b = self._text(first), self._text(second)
            if a != b:
                span = self._span(first)[0], self._span(second)[1]
                between = self._data[self._span(first)[1] : self._span(second)[0]].decode()
                self._add("swapped arguments", node, span, b + between + a)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):  # many constants are as false as None
            self._add("return", node, self._span(node.value), "None")
        self.generic_visit(node)


def sites(source: str) -> list[Site]:
    """Returns the sites of a file, sorted by place."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda site: (site.begin, site.end, site.kind))


def compiles(source: str) -> bool:
    """Returns whether a changed file is valid Python."""
    try:
        compile(source, "changed", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
