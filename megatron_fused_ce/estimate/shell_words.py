"""The commands of a shell script with its variables put in, without running any of it.

Words are split by :mod:`shlex`. Of bash, these are understood: comments, continued lines; ``NAME=value``,
``NAME=(...)``, ``NAME+=...``, ``export``; ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME[@]}``; whole
numbers in ``$((...))``; ``if``, ``&&`` and ``||`` with tests of strings. What comes from elsewhere (the
environment, a command, a condition that cannot be read) is an :class:`Unknown`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


def commands(text: str, given: Mapping[str, str]) -> Iterator[list[str]]:
    """The words of each command that runs, or may run.

    Args:
        given: values of variables, which come before the script's own.
    """
    yield from _Reader(_Variables(given)).read(text)


# --- variables -------------------------------------------------------------------------------


@dataclass
class _Variables:
    """What is known while a script is read: words, or that a variable has no certain value."""

    given: Mapping[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)

    def assign(self, name: str, words: list[str], certain: bool) -> None:
        self.values[name] = words
        (self.uncertain.discard if certain else self.uncertain.add)(name)

    def of(self, name: str) -> list[str] | None:
        if name in self.given:
            return _split(self.given[name])
        return None if name in self.uncertain else self.values.get(name)

    def expand(self, word: str) -> list[str]:
        """The words that one becomes, split as where bash finds no quotes."""
        match = _REFERENCE.fullmatch(word)
        if match:
            return self._value(match, word)
        whole, place = "", 0
        for match in _REFERENCE.finditer(word):
            found = self._value(match, word)
            for part in found:
                if isinstance(part, Unknown):
                    return [Unknown(part, word)]
            whole += word[place : match.start()] + " ".join(found)
            place = match.end()
        return [whole + word[place:]]

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


class _Reader:
    """Carries out assignments, one command after another, and passes on the rest."""

    def __init__(self, variables: _Variables) -> None:
        self.variables = variables
        self.opened: list[_Branches] = []
        #: how the last command of a list of ``&&`` and ``||`` ended
        self.status: Truth = None

    def read(self, text: str) -> Iterator[list[str]]:
        for before, command in _simple_commands(text):
            words = self._keywords(before, command)
            if not words:
                continue
            allowed: Truth = True
            if before in ("&&", "||"):
                allowed = self.status if before == "&&" else _not(self.status)
            runs = allowed
            for branches in self.opened:
                runs = _and(runs, branches.runs)
            if runs is False:
                continue
            left = self._assign(words, certain=runs is True)
            self.status = self.variables.holds(left) if left else True
            if left and left[0] in _SETTERS:
                self.variables.uncertain.update(left[1:])
            elif left:
                yield [part for word in left for part in self.variables.expand(word)]

    def _keywords(self, before: str, words: list[str]) -> list[str]:
        """What is left of a command behind ``if``, ``then``, ``fi`` and the like."""
        while words:
            top, word = self.opened[-1] if self.opened else _Branches(), words[0]
            if word in _ENDS:
                self.opened[-1:] = []
            elif words[1:3] == ["(", ")"] and not word.endswith("="):
                words = words[2:]  # a function: its braces are a group of which nothing is known
            elif word == "function":
                words = words[1:]
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
            found = [
                new
                for part in parts
                for piece in _split(part)
                for new in self.variables.expand(piece)
            ]
            known = not adds or name not in self.variables.uncertain
            old = self.variables.values.get(name, []) if adds else []
            self.variables.assign(name, [*old, *found], certain and known)
        return words


# --- words -----------------------------------------------------------------------------------


def _simple_commands(text: str) -> Iterator[tuple[str, list[str]]]:
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
