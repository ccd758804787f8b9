"""150 mechanical mutants, drawn with a fixed seed: what nobody thought of when the faults were written.

A mutant is one small change of an expression or statement: a comparison, an operator, a number, a condition,
``and``/``or``, two arguments, or a statement left out. Each area of the product gets its number, so that a
long file does not crowd out a short one. The same sources always give the same mutants.
"""

from __future__ import annotations

import ast
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.trial import ROOT, Change

SEED = 17


@dataclass(frozen=True)
class Area:
    """Files that draw their mutants together."""

    name: str
    number: int
    #: path from the root of the tree -> its tests, see trial.Change
    files: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Edit:
    """``source[start:stop]`` becomes ``new``; offsets in bytes, as ast counts columns."""

    kind: str
    start: int
    stop: int
    new: str


def draw(areas: tuple[Area, ...], root: Path = ROOT) -> list[Change]:
    """Each area's number of mutants: one of each kind in turn, from all edits of its files alike."""
    return [change for area in areas for change in _of_area(area, root)]


def _of_area(area: Area, root: Path) -> list[Change]:
    source = {file: (root / file).read_text() for file in area.files}
    by_kind: dict[str, list[tuple[str, Edit]]] = {}
    for file in area.files:
        for edit in edits(source[file]):
            by_kind.setdefault(edit.kind, []).append((file, edit))
    generator = random.Random(f"{SEED} {area.name}")
    for candidates in by_kind.values():
        generator.shuffle(candidates)
    drawn: list[Change] = []
    kinds = itertools.cycle(sorted(by_kind))
    while len(drawn) < area.number:
        kind = next(kinds)
        while by_kind[kind]:
            file, edit = by_kind[kind].pop()
            change = _change(f"{area.name}-{len(drawn) + 1}", file, edit, source[file], area.files[file])
            if _differs(source[file], change.text):
                drawn.append(change)
                break
    return drawn


def _change(name: str, file: str, edit: Edit, source: str, tests: tuple[str, ...]) -> Change:
    in_bytes = source.encode()
    before, old = in_bytes[: edit.start], in_bytes[edit.start : edit.stop].decode()
    line = before.count(b"\n") + 1
    words = f"{file}:{line} {edit.kind}: {_in_one_line(old)} -> {_in_one_line(edit.new)}"
    text = (before + edit.new.encode() + in_bytes[edit.stop :]).decode()
    return Change(name, words, file, text, tests)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _differs(source: str, text: str) -> bool:
    """Whether the edit is still Python, and not the same in other words."""
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}


def edits(source: str) -> list[Edit]:
    """All edits of a source file, in its order."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    finder = _Finder(source.encode(), starts)
    finder.visit(tree)
    return sorted(set(finder.found), key=lambda edit: (edit.start, edit.stop, edit.new))


class _Finder(ast.NodeVisitor):
    """Walks what runs: no annotations, docstrings, decorators, assertions or texts of errors."""

    def __init__(self, source: bytes, line_starts: list[int]) -> None:
        self.source = source
        self.line_starts = line_starts
        self.found: list[Edit] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._visit_body(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """For mypy and readers."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words for people."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("statement left out", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self._replace("statement left out", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("statement left out", node, "pass")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in COMPARISONS:
                self._between("comparison", left, right, COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        numbers = not isinstance(node.left, (ast.List, ast.Tuple, ast.JoinedStr)) and not (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        if type(node.op) in OPERATORS and numbers:
            self._between("operator", node.left, node.right, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and/or", left, right, other)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("number", node, str(not value))
        elif isinstance(value, (int, float)):
            for changed in (value + 1, value - 1):
                self._replace("number", node, f"({changed})" if changed < 0 else str(changed))

    def visit_Call(self, node: ast.Call) -> None:
        for left, right in zip(node.args, node.args[1:], strict=False):
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                words = f"{self._text(right)}, {self._text(left)}"
                self._cut("arguments swapped", *self._span(left, right), words)
        self.generic_visit(node)

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def _negate(self, test: ast.expr) -> None:
        self._replace("condition", test, f"(not ({self._text(test)}))")

    def _between(self, kind: str, left: ast.expr, right: ast.expr, new: str) -> None:
        """The operator between two operands, with the operands' own parentheses left where they are."""
        start, stop = self._span(left, right)
        first, last = self._span(left, left)[1], self._span(right, right)[0]
        between = self.source[first:last].decode()
        before = between[: len(between) - len(between.lstrip(") \n"))]
        after = between[len(between.rstrip("( \n")) :]
        words = f"{self._text(left)}{before.rstrip(' ')} {new} {after.lstrip(' ')}{self._text(right)}"
        self._cut(kind, start, stop, words)

    def _replace(self, kind: str, node: ast.expr | ast.stmt, new: str) -> None:
        self._cut(kind, *self._span(node, node), new)

    def _cut(self, kind: str, start: int, stop: int, new: str) -> None:
        self.found.append(Edit(kind, start, stop, new))

    def _span(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> tuple[int, int]:
        assert last.end_lineno is not None and last.end_col_offset is not None
        return (
            self.line_starts[first.lineno - 1] + first.col_offset,
            self.line_starts[last.end_lineno - 1] + last.end_col_offset,
        )

    def _text(self, node: ast.expr) -> str:
        return self.source[slice(*self._span(node, node))].decode()
