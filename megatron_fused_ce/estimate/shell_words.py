"""The commands of a shell script with its variables put in, without running any of it.

Words are split by :mod:`shlex`. Of bash, these are understood: comments, continued lines; ``NAME=value``,
``NAME=(...)``, ``NAME+=...``, ``export``; ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME[@]}``; whole
numbers in ``$((...))``; ``if``, ``&&`` and ``||`` with tests of strings; functions; scripts that are sourced
from the same folder. What comes from elsewhere (the environment, a command, a condition that cannot be
read) is an :class:`Unknown`. A script has no arguments.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>[^()]*)\)\)"
    r"|\$\{(?P<braced>\w+|[@*])(?P<array>\[[@*]\])?(?::?[-=](?P<default>[^{}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[\d@*])"
    r"|(?P<other>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{[^{}]*\}|`[^`]*`)"
)
#: References that may hold quotes or spaces, and what stands for one while words are split.
_HELD = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{[^{}]*\}|`[^`]*`")
_MARK = "\ue000"
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1(.*?)\n.*?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
_OPERATORS = set(";&|\n")
_LOOPS = ("for", "while", "until", "select")
_GROUPS = (*_LOOPS, "case", "{")
_ENDS = ("fi", "done", "esac", "}")
#: Functions and scripts within each other, at most.
_DEEPEST = 20
#: Commands that give variables another value, or none.
_SETTERS = ("unset", "read", "mapfile", "readarray")
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}

#: Of a condition: true, false, or not to be read here.
Truth = bool | None


class Unknown(str):
    """The name of a variable (``NAME[@]`` of an array) or the text of a command that has no value."""

    #: the whole word that it stands in
    word: str

    def __new__(cls, name: str, word: str) -> Unknown:
        new = super().__new__(cls, name)
        new.word = word
        return new


def commands(text: str, given: Mapping[str, str], folder: Path | None = None) -> Iterator[list[str]]:
    """The words of each command that runs, or may run.

    Args:
        given: values of variables, which come before the script's own.
        folder: where the script is.
    """
    yield from _Reader(_Variables(given), folder).read(text)


# --- variables -------------------------------------------------------------------------------


@dataclass
class _Variables:
    """What is known while a script is read: words, or that a variable has no certain value."""

    given: Mapping[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)
    #: of the function that is being read; None outside
    arguments: list[str] | None = None

    def assign(self, name: str, words: list[str], certain: bool) -> None:
        self.values[name] = words
        (self.uncertain.discard if certain else self.uncertain.add)(name)

    def of(self, name: str) -> list[str] | None:
        if name in ("@", "*") and "@" not in self.given:
            return self.arguments or []
        if name.isdigit() and self.arguments is not None:
            return self.arguments[int(name) - 1 : int(name)]
        if name in self.given:
            return _split(self.given[name])
        return None if name in self.uncertain else self.values.get(name)

    def expand(self, word: str) -> list[str]:
        """The words that one becomes, split as where bash finds no quotes."""
        match = _REFERENCE.fullmatch(word)
        if match:
            return self._value(match, word)
        whole, place, unknown = "", 0, None
        for match in _REFERENCE.finditer(word):
            found = self._value(match, word)
            unknown = unknown or next((part for part in found if isinstance(part, Unknown)), None)
            value = match[0] if unknown in found else " ".join(found)
            whole += word[place : match.start()] + value
            place = match.end()
        whole += word[place:]
        return [whole if unknown is None else Unknown(unknown, whole)]

    def _value(self, match: re.Match[str], word: str) -> list[str]:
        if match["sum"] is not None:
            return self._sum(match, word)
        name = match["braced"] or match["plain"]
        if name is None:
            return [Unknown(match["other"], word)]
        found = self.of(name)
        if found is None and match["default"] is not None and name not in self.uncertain:
            return [part for piece in _split(match["default"]) for part in self.expand(piece)]
        if found is None:
            return [Unknown(f"{name}{match['array'] or ''}", word)]
        return found

    def _sum(self, match: re.Match[str], word: str) -> list[str]:
        plain = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", match["sum"])
        try:
            return [str(self._number(ast.parse(plain.strip(), mode="eval").body))]
        except (SyntaxError, ValueError, ZeroDivisionError):
            return [Unknown(match[0], word)]

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(str(node.value))
        if isinstance(node, ast.Name):
            return int(" ".join(self.of(node.id) or []))
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            operate = _ARITHMETIC[type(node.op)]
            return int(operate(self._number(node.left), self._number(node.right)))
        raise ValueError

    def holds(self, test: Sequence[str]) -> Truth:
        """Whether a test of strings is true: ``[ a = b ]``, ``[[ -z a ]]``."""
        if not test or test[0] not in ("[", "[[", "test"):
            return None
        words = []
        for word in test[1:]:
            found = self.expand(word)
            if any(isinstance(part, Unknown) for part in found):
                return None
            words.append(" ".join(found))
        while words and words[-1] in ("]", "]]"):
            words.pop()
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        plain = len(words) == 3 and not set(words[2]) & set("*?[")  # no pattern
        if plain and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) == (words[1] != "!=")
        return None


def _split(text: str) -> list[str]:
    """Words as bash splits them, each reference whole."""
    text, held = _hold(text)
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    return [_release(word, held) for word in words]


def _hold(text: str) -> tuple[str, list[str]]:
    """``text`` with a mark in place of each reference that may hold quotes or spaces, and these."""
    held: list[str] = []

    def mark(match: re.Match[str]) -> str:
        held.append(match[0])
        return f"{_MARK}{len(held) - 1}{_MARK}"

    return _HELD.sub(mark, text), held


def _release(word: str, held: Sequence[str]) -> str:
    return re.sub(f"{_MARK}(\\d+){_MARK}", lambda match: held[int(match[1])], word)


# --- which commands run ----------------------------------------------------------------------


def _and(one: Truth, other: Truth) -> Truth:
    if one is False or other is False:
        return False
    return True if one and other else None


def _not(one: Truth) -> Truth:
    return None if one is None else not one


def _or(one: Truth, other: Truth) -> Truth:
    return _not(_and(_not(one), _not(other)))


@dataclass
class _Branches:
    """An open ``if``, or a loop, of which nothing is known."""

    #: whether the commands of the branch at hand run
    runs: Truth = None
    #: whether a branch before it ran
    taken: Truth = None
    #: of the condition that is being read
    condition: Truth = None
    deciding: bool = False


#: A command and the operator before it.
Item = tuple[str, list[str]]


class _Reader:
    """Carries out assignments, one command after another, and passes on the rest."""

    def __init__(self, variables: _Variables, folder: Path | None) -> None:
        self.variables = variables
        self.folder = folder
        self.functions: dict[str, list[Item]] = {}
        self.opened: list[_Branches] = []
        #: how the last command of a list of ``&&`` and ``||`` ended
        self.status: Truth = None
        #: functions and scripts that are being read within each other
        self.depth = 0

    def read(self, text: str) -> Iterator[list[str]]:
        yield from self._run(list(_simple_commands(text)))

    def _run(self, items: list[Item]) -> Iterator[list[str]]:
        place = 0
        while place < len(items):
            before, command = items[place]
            place += 1
            if command[0] == "function" or (
                command[1:3] == ["(", ")"] and not _ASSIGNMENT.fullmatch(command[0])
            ):
                place = self._define(items, place - 1)
                continue
            words = self._keywords(before, command)
            runs = self._runs(before)
            if not words or runs is False:
                continue
            left = self._assign(words, certain=runs is True)
            self.status = self.variables.holds(left) if left else True
            # What a function does where it may not be called is uncertain, too.
            self.opened.append(_Branches(runs=runs))
            if left:
                yield from self._command(left)
            self.opened.pop()

    def _runs(self, before: str) -> Truth:
        """Whether the command behind this operator runs, within all that is open."""
        runs: Truth = True
        if before in ("&&", "||"):
            runs = self.status if before == "&&" else _not(self.status)
        for branches in self.opened:
            runs = _and(runs, branches.runs)
        return runs

    def _command(self, words: list[str]) -> Iterator[list[str]]:
        expanded = [part for word in words for part in self.variables.expand(word)]
        if words[0] in self.functions:
            yield from self._call(self.functions[words[0]], expanded[1:])
        elif words[0] in ("source", ".") and len(expanded) > 1:
            yield from self._source(expanded[1])
        elif words[0] in _SETTERS:
            self.variables.uncertain.update(words[1:])
        elif words[0] == "shift" and self.variables.arguments:
            self.variables.arguments = self.variables.arguments[1:]
        else:
            yield expanded

    def _define(self, items: list[Item], place: int) -> int:
        """Keep a function's commands, between its braces; where the script goes on behind it."""
        before, words = items[place]
        named = words[0] == "function"
        rest = [word for word in words[1 + named :] if word not in ("(", ")")]
        body: list[Item] = []
        depth = 0
        for end, (operator_before, command) in enumerate([(before, rest), *items[place + 1 :]]):
            if command[:1] == ["{"]:
                depth += 1
                command = command[1:] if depth == 1 else command
            elif command[:1] == ["}"]:
                depth -= 1
            if depth == 0 and end:
                self.functions[words[named]] = body
                return place + end + 1
            if command:
                body.append((operator_before, command))
        raise ValueError(f"function {words[named]} has no end")

    def _call(self, body: list[Item], arguments: list[str]) -> Iterator[list[str]]:
        if self.depth < _DEEPEST:
            before, self.variables.arguments = self.variables.arguments, arguments
            self.depth += 1
            yield from self._run(body)
            self.depth -= 1
            self.variables.arguments = before

    def _source(self, word: str) -> Iterator[list[str]]:
        """Read a script of the same folder, whatever the path to it is made of."""
        text = word.word if isinstance(word, Unknown) else word
        path = self.folder / text.rpartition("/")[2] if self.folder else None
        if path and path.is_file() and self.depth < _DEEPEST:
            self.depth += 1
            yield from self.read(path.read_text())
            self.depth -= 1

    def _keywords(self, before: str, words: list[str]) -> list[str]:
        """What is left of a command behind ``if``, ``then``, ``fi`` and the like."""
        while words:
            top, word = self.opened[-1] if self.opened else _Branches(), words[0]
            if word in _ENDS:
                self.opened[-1:] = []
            elif word in _GROUPS:
                self.opened.append(_Branches())
                if word in _LOOPS:
                    return []
                words = words[words.index("in") :] if word == "case" and "in" in words else words
            elif word in ("if", "elif"):
                if word == "if":
                    top = _Branches(taken=False)
                    self.opened.append(top)
                top.deciding, top.condition = True, self.variables.holds(words[1:])
                return []
            elif word == "then":
                top.deciding, top.runs = False, _and(_not(top.taken), top.condition)
                top.taken = _or(top.taken, top.condition)
            elif word == "else":
                top.runs = _not(top.taken)
            elif top.deciding:
                combine = {"&&": _and, "||": _or}.get(before, lambda one, other: None)
                top.condition = combine(top.condition, self.variables.holds(words))
                return []
            elif self.opened and ")" in words and "(" not in words:
                words = words[words.index(")") :]  # a pattern of case
            elif word != "do":
                return words
            words = words[1:]
        return words

    def _assign(self, words: list[str], certain: bool) -> list[str]:
        """What is left of a command behind its assignments."""
        if words[0] in ("export", "declare", "local", "readonly"):
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            name, adds, value = match.groups()
            parts, words = _split(value), words[1:]
            if not value and words[:1] == ["("]:
                end = words.index(")")
                parts, words = words[1:end], words[end + 1 :]
            found = [new for part in parts for piece in _split(part) for new in self.variables.expand(piece)]
            known = not adds or name not in self.variables.uncertain
            old = self.variables.values.get(name, []) if adds else []
            self.variables.assign(name, [*old, *found], certain and known)
        return words


# --- words -----------------------------------------------------------------------------------


def _simple_commands(text: str) -> Iterator[Item]:
    """Each command with the operator before it; an array and its parentheses stay in one."""
    before, depth = "\n", 0
    command: list[str] = []
    for token in _tokens(text):
        if depth == 0 and set(token) <= _OPERATORS and token:
            if command:
                yield before, command
            before, command = (before if token == "\n" and not command else token), []
            continue
        opens = token == "(" and bool(command) and bool(_ASSIGNMENT.fullmatch(command[-1]))
        depth += opens - (token == ")" and depth > 0)
        if token != "\n":
            command.append(token)
    if depth:
        raise ValueError("an array's parenthesis has no end")
    if command:
        yield before, command


def _tokens(text: str) -> Iterator[str]:
    """Words and operators, the end of a line among them."""
    text = _HERE_DOCUMENT.sub(lambda match: match[3], text)
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\") and not line.lstrip().startswith("#"):
            pending = pending[:-1] + " "
            continue
        try:
            words = list(_line(pending))
        except ValueError:
            pending += "\n"  # a quotation goes on
            continue
        yield from (*words, "\n")
        pending = ""
    yield from _line(pending)


def _line(line: str) -> Iterator[str]:
    line, held = _hold(line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();&|")
    lexer.whitespace_split = True
    for token in lexer:
        # Operators come in runs: "&&", but also ");".
        if token and set(token) <= set("();&|"):
            yield from re.findall(r"[()]|[;&|]+", token)
        else:
            yield _release(token, held)
