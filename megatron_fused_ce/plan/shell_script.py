"""The commands of a bash script with its variables put in, without running any of it.

tree-sitter parses the script; this module follows what it parsed: assignments, tests, ``if``, ``case``,
``&&`` and ``||``, loops, functions, subshells, ``eval``, ``bash -c`` and sourced scripts of the same folder.
Where it is not known which branch runs, each is followed, and what differs between them is marked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from megatron_fused_ce.cli.command_line import read_text
from megatron_fused_ce.plan import shell_words
from megatron_fused_ce.plan.closed_world import arguments, stated
from megatron_fused_ce.plan.shell_words import (
    REDIRECTS,
    SHELLS,
    Truth,
    Value,
    nodes,
    readable,
    settable,
    source,
    unknown,
    unknowns,
)

#: A condition, and the commands that run if it is the first of several to hold.
Choice = tuple[Callable[[], Truth], Sequence[Node]]

_LANGUAGE = Language(tree_sitter_bash.language())
_PLACEHOLDER = re.compile(r"<[^<>]*>|\(e\.g\.[^)]*\)")
#: One that bash reads as redirections, the second of which takes the word behind it.
_TAKES_A_WORD = re.compile(
    r"(?<=[\s=])<[A-Za-z](?:[^<>\n$|&;()`]*[^<>\s$|&;()`])?(?<!\s\d)>(?=\s|$)", re.MULTILINE
)
#: Commands that are taken to end well, and have no part in a launch; and those that read into variables.
_QUIET = ("echo", "printf", "cd", "mkdir", "true", ":", "pushd", "popd", "module", "ulimit", "shopt")
_READERS = ("read", "mapfile", "readarray", "getopts", "let")
#: Functions and scripts within each other, and steps, at most.
_DEEPEST, _MOST_STEPS = 20, 10**5


class Command(NamedTuple):
    """A command that runs or may run."""

    words: list[str]  # behind those of the commands that start it
    values: Mapping[str, Value]  # every variable there, whether exported or not
    why: str = ""  # the variable that decides whether it runs


class Reader(shell_words.Words):
    """Follows scripts, and collects the commands that run or may run."""

    def __init__(self, given: Mapping[str, str], folder: Path | None, values: Mapping[str, str]) -> None:
        super().__init__(given, values)
        self.folder = folder
        self.found: list[Command] = []
        self.names: set[str] = set()  # of every variable
        self.notes: list[str] = []  # sentences about what was not followed
        self._functions: dict[str, Node] = {}
        self._locals: dict[str, Value | None] | None = None  # values to restore behind the function
        self._leaves = ""  # by exit, return, break or continue, until the function or loop is left
        #: what left a function or loop in one of several branches, and the variables there
        self._left: list[tuple[str, dict[str, Value]]] = []
        self._depth = self._steps = 0

    def read(self, text: str) -> Truth:
        """Follow a script. ``ValueError`` where it is no bash, but for placeholders such as ``<path>``."""
        try:
            return self._within(lambda: self._run(self._parse(text)))
        except RecursionError:
            raise ValueError("its commands are too deep within each other") from None

    def _parse(self, text: str) -> Node:
        text = _TAKES_A_WORD.sub(lambda match: unknown(match[0]), text.rstrip().rstrip("\\"))
        lines = f"{text}\n".split("\n")
        while (root := Parser(_LANGUAGE).parse("\n".join(lines).encode()).root_node).has_error:
            error = next(node for node in nodes(root) if node.type == "ERROR" or node.is_missing)
            row = first = error.start_point[0]
            while not _PLACEHOLDER.search(lines[row]) and lines[row].endswith("\\"):
                row += 1
            line = _PLACEHOLDER.sub(lambda match: unknown(match[0]) if match[0][0] == "<" else "", lines[row])
            if line == lines[row]:
                what = readable(lines[first]).strip()[:60]
                wrong = f"{error.type} is missing" if error.is_missing else what
                raise ValueError(f"line {first + 1} cannot be read as bash: {wrong}")
            lines[row] = line
        names = ("variable_name", "special_variable_name")
        self.names |= {source(node) for node in nodes(root) if node.type in names}
        return root

    # --- which commands run ------------------------------------------------------------------

    def _within(self, follow: Callable[[], Truth]) -> Truth:
        """Follow a function or a script, unless too many are within each other."""
        if self._depth >= _DEEPEST:
            return ""
        self._depth += 1
        status = follow()
        self._depth -= 1
        return status

    def _apart(self, follow: Callable[[], Truth]) -> Truth:
        """As a process of its own: its variables are lost, and none but itself is left."""
        before = dict(self.values)
        status = follow()
        status, self._leaves, self.values = "" if self._leaves else status, "", before
        return status

    def _all(self, several: Sequence[Node]) -> Truth:
        status: Truth = True
        for node in several:
            if node.is_named and node.type != "comment":
                status = self._run(node)
        return status

    def _run(self, node: Node) -> Truth:
        if self._leaves:
            return ""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS} steps")
        parts = node.named_children
        match node.type:
            case "program" | "do_group" | "variable_assignments":
                return self._all(parts)
            case "compound_statement":
                return self._sum(node) if node.children[0].type == "((" else self._all(parts)
            case "subshell":
                return self._apart(lambda: self._all(parts))
            case "pipeline":
                return [self._apart(lambda part=part: self._run(part)) for part in parts][-1]  # type: ignore[misc]
            case "list":
                first = self._run(node.children[0])
                goes_on = first if node.children[1].type == "&&" else _not(first)
                return first if goes_on is False else self._choose([(lambda: goes_on, node.children[2:])])
            case "negated_command":
                return _not(self._run(parts[0]))
            case "test_command":
                return self.truth(parts[0], False) if parts else False
            case "if_statement":
                return self._choose(self._clauses(node))
            case "case_statement":
                return self._choose([self._item(self.text(parts[0]), item) for item in parts[1:]])
            case "while_statement" | "for_statement" | "c_style_for_statement":
                return self._loop(node)
            case "function_definition":
                self._functions[source(parts[0])] = parts[-1]
            case "variable_assignment":
                self.assign(node)
            case "declaration_command":
                for part in parts:
                    assigns = part.type == "variable_assignment"
                    name = source(part.named_children[0] if assigns else part)
                    if node.children[0].type == "local" and self._locals is not None:
                        self._locals.setdefault(name, self.values.get(name))
                        self.values[name] = ""
                    if assigns:
                        self.assign(part)
            case "unset_command":
                for part in parts:
                    self.values.pop(source(part), None)
            case "command" | "redirected_statement":
                return self._command(node)
            case _:
                return ""
        return True

    def _choose(self, choices: Sequence[Choice]) -> Truth:
        if not choices:
            return True
        (condition, body), *others = choices
        holds = condition()
        if isinstance(holds, bool):
            return self._all(body) if holds else self._choose(others)
        return self._fork([lambda: self._all(body), lambda: self._choose(others)], holds)

    def _fork(self, branches: Sequence[Callable[[], Truth]], why: str) -> Truth:
        """Follow each branch from here. What differs afterwards is not known: ``why`` decides it."""
        before, commands, leaves, ends = self.values, len(self.found), "", []
        for branch in branches:
            self.values, self._leaves = dict(before), ""
            branch()
            if self._leaves:
                leaves = self._leaves
                self._left.append((leaves, self.values))
            else:
                ends.append(self.values)
        self.found[commands:] = [one._replace(why=one.why or why) for one in self.found[commands:]]
        self._leaves = "" if ends else leaves
        if ends:
            self._join(ends, why)
        return why

    def _rejoin(self, leaves: int, *kinds: str) -> None:
        """Go on with what those who left a loop or function since then had, too."""
        here = [self.values, *(values for kind, values in self._left[leaves:] if kind in kinds)]
        self._left[leaves:] = [left for left in self._left[leaves:] if left[0] not in kinds]
        self._join(here, "")

    def _join(self, ends: Sequence[dict[str, Value]], why: str) -> None:
        """Go on behind several branches. A variable that differs in more than harmless words is not known: it
        asks for ``why``, or else for itself."""
        self.values = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            values = [end.get(name) for end in ends]
            least = min((value for value in values if value is not None), key=len)
            same = all(self._same(least, value) for value in values)
            self.values[name] = least if same else unknown(why or name)

    def _same(self, least: Value, value: Value | None) -> bool:
        """Whether it is, or has behind it words of a command line that change nothing that is asked."""
        words, more = (one.split() if isinstance(one, str) else one or [] for one in (least, value))
        added = more[len(words) :] if type(least) is type(value) and more[: len(words)] == words else []
        known = {arguments()[name].which if name in arguments() else "-" for name in stated(added)}
        return value == least or (known == {"none"} and added[0].startswith("--"))

    def _clauses(self, node: Node) -> list[Choice]:
        """``if`` and each ``elif``; ``else`` has no condition."""
        parts = node.children
        then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
        others = [part for part in parts if part.type in ("elif_clause", "else_clause")]
        body = [part for part in parts[then:] if part not in others]
        behind = [choice for part in others for choice in self._clauses(part)]
        return [(lambda: self._all(parts[:then]), body), *behind]

    def _item(self, value: str, node: Node) -> Choice:
        """Of a ``case``: whether one of the patterns fits, and the commands behind them."""
        patterns = [self.text(part) for part in node.children_by_field_name("value")]
        fits: Truth = any(fnmatchcase(value, pattern) for pattern in patterns)
        if (names := unknowns(" ".join([value, *patterns]))) and "*" not in patterns:
            fits = settable(names)
        end = next(place for place, part in enumerate(node.children) if part.type == ")")
        return lambda: fits, node.children[end:]

    def _loop(self, node: Node) -> Truth:
        """Follow the body until another round changes nothing; the round's commands are the loop's."""
        body, variable = node.children_by_field_name("body"), node.child_by_field_name("variable")
        conditions = node.children_by_field_name("condition") if node.type == "while_statement" else []
        commands, leaves = len(self.found), len(self._left)
        start: dict[str, Value] | None = None
        while start != self.values:
            start = dict(self.values)
            del self.found[commands:]
            if variable:
                self.values[source(variable)] = unknown(source(variable))
            if conditions and self._all(conditions) is (node.children[0].type == "until"):
                return True
            self._fork([lambda: self._all(body), lambda: True], "")
            self._rejoin(leaves, "break", "continue")
        return ""

    def _sum(self, node: Node) -> Truth:
        """``((...))``, which may assign."""
        signs = {source(part) for part in nodes(node) if not part.is_named}
        if not signs & {"=", "+=", "-=", "*=", "/=", "%=", "++", "--"}:
            return self.truth(node.named_children[0], True)
        names = [source(part) for part in nodes(node) if part.type == "variable_name"]
        self.values |= {name: unknown(name) for name in names}
        return ""

    # --- commands ----------------------------------------------------------------------------

    def _command(self, node: Node) -> Truth:
        """``node`` with its redirections; tree-sitter takes words behind one's target for more targets."""
        command = node.child_by_field_name("body") or node
        if command.type not in ("command", "redirected_statement"):
            return self._run(command)
        words: list[str] = []
        before: list[Node] = []
        text, later = "", []
        for part in [*command.children, *(node.children[1:] if node is not command else [])]:
            if part.type == "variable_assignment":
                before.append(part)
            elif part.type in REDIRECTS:
                targets = part.children_by_field_name("destination")
                behind = targets[1:] + part.children_by_field_name("argument")
                words += [word for one in behind for word in self.fields(one)]
                if words[:1] == ["read"] and "-d" in words and part.type == "heredoc_redirect":
                    self.values[words[-1]] = self.heredoc(part).strip()
                    return False  # it found no end of a line
                text += "".join(source(body) for body in part.children if body.type == "heredoc_body")
                later += [one for one in part.children if one.type in ("pipeline", "list")]
            else:
                # A line may end behind two assignments, which tree-sitter overlooks.
                begin, end = before[-1].end_byte if before else part.start_byte, part.start_byte
                between = (command.text or b"")[begin - command.start_byte : end - command.start_byte]
                if not words and b"\n" in between.replace(b"\\\n", b""):
                    self._all(before)
                    before = []
                words += self.fields(part)
        status = self._start(words, before, text)
        return self._all(later) if later else status

    def _start(self, words: list[str], before: Sequence[Node], text: str) -> Truth:
        """Run a command: ``before`` are assignments for it alone, ``text`` is its input."""
        if not words:
            return self._all(before)
        name, *others = words
        if name in self._functions:
            return self._call(self._functions[name], others)
        match name:
            case "exit" | "return" | "break" | "continue":
                self._leaves = name
                return ""
            case "eval":
                return self.read(" ".join(others))
            case "test":
                return self.read(f"[ {shlex.join(others)} ]")
            case "source" | ".":
                # A script of the same folder, whatever the path to it is made of.
                file = readable(" ".join(others[:1])).rpartition("/")[2]
                if self.folder and file and (self.folder / file).is_file():
                    return self.read(read_text(self.folder / file))
                self.notes.append(f"{file} is not in the script's folder: what it sets is not seen.")
                return ""
            case "set":
                if "--" in others or (others[:1] and others[0][0] not in "-+"):
                    self.values["@"] = others[others.index("--") + 1 :] if "--" in others else others
                return True
            case "shift":
                if isinstance(arguments := self.values.get("@"), list):
                    self.values["@"] = arguments[int(others[0]) if others and others[0].isdigit() else 1 :]
                return True
        if name == "false" or name in _QUIET:
            return name != "false"
        if name in _READERS:
            names = [match[0] for word in others if (match := shell_words.NAME.match(word))]
            self.values |= {name: unknown(name) for name in names}
            return ""
        return self._apart(lambda: self._process(words, before, text))

    def _process(self, words: list[str], before: Sequence[Node], text: str) -> Truth:
        """A command that is no part of bash; a script within it is followed, behind the words before it."""
        self._all(before)
        commands = len(self.found)
        for place, word in enumerate(words):
            if word.rpartition("/")[2] in SHELLS:
                option, *others = words[place + 1 :] or [""]
                quoted = re.fullmatch(r"-\w*c", option)
                inner = "".join(others[:1]) if quoted else text if option in ("", "-s") else ""
                if inner:
                    name, others = ("".join(others[1:2]), others[2:]) if quoted else (word, others)
                    self.values |= {"0": name, "@": others[others[:1] == ["--"] :]}
                    status = self.read(inner)
                    inside = [one._replace(words=words[:place] + one.words) for one in self.found[commands:]]
                    self.found[commands:] = inside
                    return status
        if words[0].startswith("-"):
            wrong = readable(" ".join(words))[:60]
            self.notes.append(f"{wrong}: a command of its own, since the line before does not go on.")
        self.found.append(Command(words, dict(self.values)))
        return ""

    def _call(self, body: Node, arguments: list[str]) -> Truth:
        outside, leaves = self._locals, len(self._left)
        self._locals = {"@": self.values.get("@")}
        self.values["@"] = arguments
        status = self._within(lambda: self._run(body))
        if self._leaves:
            status, self._leaves = "", self._leaves if self._leaves == "exit" else ""
        self._rejoin(leaves, "return")
        values = {**self.values, **self._locals}
        self.values = {name: value for name, value in values.items() if value is not None}
        self._locals = outside
        return status


def _not(truth: Truth) -> Truth:
    return not truth if isinstance(truth, bool) else truth
