"""The commands of a bash script with its variables put in, without running any of it.

tree-sitter parses the script; this module follows what it parsed: assignments and arrays, expansions,
arithmetic, tests, ``if``, ``case``, ``&&`` and ``||``, loops, functions, subshells, ``eval``, ``bash -c`` and
sourced scripts of the same folder. What comes from elsewhere (the environment, a command's output, a
condition that cannot be read) stays in the words as a mark, which names what to ask for. Where it is not
known which branch runs, each is followed, and what differs between them is marked.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

#: Whether a command ends well; where that is not known, the variable that decides ('' if none does).
Truth = bool | str
Value = str | list[str]
#: Conditions, each with the commands that run if it is the first to hold.
Choices = Sequence[tuple[Callable[[], Truth], Sequence[Node]]]

_LANGUAGE = Language(tree_sitter_bash.language())
_MARK = re.compile("\ue000([0-9a-f]*)\ue001")
_NAME = re.compile(r"(?:[A-Za-z_]\w*|\d+)(?:\[@\])?")
_PLACEHOLDER = re.compile(r"<[^<>]*>|\(e\.g\.[^)]*\)")
_WORDS_OF_AN_ARRAY = re.compile(r'"\$(?:@|\{(?:\w+\[@\]|@)\})"')
_SHELLS = ("bash", "sh", "zsh")
#: Commands that are taken to end well, and have no part in a launch.
_QUIET = ("echo", "printf", "cd", "mkdir", "true", ":", "pushd", "popd", "module", "ulimit", "shopt")
_READERS = ("read", "mapfile", "readarray", "getopts", "let")
#: Commands that change files that they name; some only when told so.
_WRITERS, _IN_PLACE = ("tee", "cp", "mv", "patch", "sed", "perl"), re.compile(r"-\w*i.*|--in-place.*")
_REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
#: Functions and scripts within each other, steps, and letters of a variable, at most.
_DEEPEST, _MOST_STEPS, _LONGEST = 20, 10**5, 2**20
_EXPRESSIONS = {"binary_expression", "unary_expression"}
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow, "%": operator.mod},
    **{"/": operator.floordiv, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt},
    **{"-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}


class _Leave(Exception):
    """``exit``, ``return``, ``break`` or ``continue``."""


class _NotKnown(Exception):
    """A test or a sum has something that is not known; its variable."""


def unknown(name: str) -> str:
    """The mark of a value that is not known: the variable's name, or a command's text."""
    return f"\ue000{name.encode().hex()}\ue001"


def unknowns(text: str) -> list[str]:
    """What the marks in ``text`` name."""
    return [bytes.fromhex(name).decode() for name in _MARK.findall(text)]


def readable(text: str) -> str:
    """``text`` with names in place of marks."""
    return _MARK.sub(lambda match: bytes.fromhex(match[1]).decode(), text)


class Command(NamedTuple):
    """A command that runs or may run."""

    #: behind those of the commands that start it
    words: list[str]
    #: the variable that decides whether it runs
    why: str
    #: every variable there, whether exported or not
    values: Mapping[str, Value]


class Reader:
    """Follows scripts, and collects the commands that run or may run."""

    def __init__(
        self,
        given: Mapping[str, str],
        folder: Path | None,
        values: Mapping[str, str],
        harmless: Callable[[Sequence[str]], bool] = lambda words: False,
    ) -> None:
        """``given`` come before the script's own assignments, ``values`` are what the environment has;
        ``harmless`` words of a command line change nothing that is asked."""
        self.given = given
        self.harmless = harmless
        self.folder = folder
        self.values: dict[str, Value] = dict(values)
        self.found: list[Command] = []
        #: every variable of the scripts
        self.names: set[str] = set()
        #: sentences about what was not followed
        self.notes: list[str] = []
        #: files that are read and that the script changed before, with a clause
        self.doubts: dict[str, str] = {}
        self._written: set[str] = set()
        self._prefix: list[str] = []
        self._why = ""
        self._functions: dict[str, Node] = {}
        #: how a branch left its function or loop, and the variables there
        self._left: list[tuple[str, dict[str, Value]]] = []
        #: of the functions that are being followed: values to restore
        self._locals: list[dict[str, Value | None]] = []
        self._depth = self._steps = 0

    def read(self, text: str) -> Truth:
        """Follow a script. ``ValueError`` where it is no bash, but for placeholders such as ``<path>``."""
        if self._depth >= _DEEPEST:
            return ""
        self._depth += 1
        try:
            return self._run(self._parse(text))
        except RecursionError:
            raise ValueError("its commands are too deep within each other") from None
        except _Leave:
            if self._depth > 1:
                raise
            return ""
        finally:
            self._depth -= 1

    def _parse(self, text: str) -> Node:
        lines = (text.rstrip().rstrip("\\") + "\n").split("\n")
        while (root := Parser(_LANGUAGE).parse("\n".join(lines).encode()).root_node).has_error:
            error = next(node for node in _nodes(root) if node.type == "ERROR" or node.is_missing)
            row = first = error.start_point[0]
            while not _PLACEHOLDER.search(lines[row]) and lines[row].endswith("\\"):
                row += 1
            line = _PLACEHOLDER.sub(lambda match: unknown(match[0]) if match[0][0] == "<" else "", lines[row])
            if line == lines[row]:
                wrong = (
                    f"{error.type} is missing" if error.is_missing else readable(lines[first]).strip()[:60]
                )
                raise ValueError(f"line {first + 1} cannot be read as bash: {wrong}")
            lines[row] = line
        for node in _nodes(root):
            if node.type in ("variable_name", "special_variable_name"):
                self.names.add(_source(node))
        return root

    # --- which commands run ------------------------------------------------------------------

    def _all(self, nodes: Sequence[Node]) -> Truth:
        status: Truth = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                status = self._run(node)
        return status

    def _run(self, node: Node) -> Truth:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS} steps")
        match node.type:
            case "program" | "do_group" | "variable_assignments":
                return self._all(node.children)
            case "compound_statement":
                return self._arithmetic(node) if node.children[0].type == "((" else self._all(node.children)
            case "subshell":
                return self._apart(lambda: self._all(node.children))
            case "pipeline":
                for part in node.named_children:
                    status = self._apart(lambda part=part: self._run(part))  # type: ignore[misc]
                return status
            case "list":
                left, between, right = node.children
                first = self._run(left)
                goes_on = first if between.type == "&&" else _not(first)
                return first if goes_on is False else self._choose([(lambda: goes_on, [right])])
            case "negated_command":
                return _not(self._run(node.named_children[0]))
            case "test_command":
                return self._truth(node.named_children[0], False) if node.named_children else False
            case "if_statement":
                return self._choose(self._clauses(node))
            case "case_statement":
                value, *items = node.named_children
                return self._choose([self._item(self._text(value), item) for item in items])
            case "while_statement" | "for_statement" | "c_style_for_statement":
                return self._loop(node)
            case "function_definition":
                name, *_, body = node.named_children
                self._functions[_source(name)] = body
                return True
            case "variable_assignment":
                self._assign(node)
                return True
            case "declaration_command":
                return self._declare(node)
            case "unset_command":
                for part in node.named_children:
                    self.values.pop(_source(part), None)
                return True
            case "command" | "redirected_statement":
                return self._command(node)
        return ""

    def _apart(self, follow: Callable[[], Truth]) -> Truth:
        """As a process of its own: its variables are lost."""
        before = dict(self.values)
        try:
            return follow()
        except _Leave:
            return ""
        finally:
            self.values = before

    def _fork(self, branches: Sequence[Callable[[], Truth]], why: str) -> Truth:
        """Follow each branch from here. What differs afterwards is not known: ``why`` decides it."""
        before, ends, outside = self.values, [], self._why
        left: _Leave | None = None
        self._why = why or outside
        for branch in branches:
            self.values = dict(before)
            try:
                branch()
                ends.append(self.values)
            except _Leave as leave:
                left = leave
                self._left.append((str(leave), self.values))
        self._why = outside
        if left and not ends:
            raise left
        self.values = self._joined(ends, why)
        return why

    def _choose(self, choices: Choices) -> Truth:
        if not choices:
            return True
        (condition, body), *others = choices
        holds = condition()
        if isinstance(holds, bool):
            return self._all(body) if holds else self._choose(others)
        return self._fork([lambda: self._all(body), lambda: self._choose(others)], holds)

    def _clauses(self, node: Node) -> Choices:
        """``if`` and each ``elif``; ``else`` has no condition."""
        condition: list[Node] = []
        body: list[Node] = []
        others: list[tuple[Callable[[], Truth], Sequence[Node]]] = []
        into = body if node.type == "else_clause" else condition
        for part in node.children:
            if part.type == "then":
                into = body
            elif part.type in ("elif_clause", "else_clause"):
                others += self._clauses(part)
            else:
                into.append(part)
        return [(lambda: self._all(condition), body), *others]

    def _item(self, value: str, node: Node) -> tuple[Callable[[], Truth], Sequence[Node]]:
        """Of a ``case``: whether one of the patterns fits, and the commands behind them."""
        patterns = [self._text(part) for part in node.children_by_field_name("value")]
        names = unknowns(" ".join([value, *patterns]))
        fits: Truth = any(fnmatchcase(value, pattern) for pattern in patterns)
        if names and "*" not in patterns:
            fits = _settable(names)
        end = next(index for index, part in enumerate(node.children) if part.type == ")")
        return lambda: fits, node.children[end:]

    def _loop(self, node: Node) -> Truth:
        """Follow the body until another round changes nothing; the round's commands are the loop's."""
        body, variable = node.child_by_field_name("body"), node.child_by_field_name("variable")
        conditions = node.children_by_field_name("condition") if node.type == "while_statement" else []
        commands, leaves = len(self.found), len(self._left)
        start: dict[str, Value] | None = None
        while start != self.values:
            start = dict(self.values)
            del self.found[commands:]
            if variable:
                self.values[_source(variable)] = unknown(_source(variable))
            if conditions and self._all(conditions) is (node.children[0].type == "until"):
                return True
            self._fork([lambda: self._all([body] if body else []), lambda: True], "")
            self._rejoin(leaves, "break", "continue")
        return ""

    def _rejoin(self, leaves: int, *kinds: str) -> None:
        """Go on with what those who left a loop or function since then had, too."""
        here = [self.values, *(values for kind, values in self._left[leaves:] if kind in kinds)]
        self._left[leaves:] = [left for left in self._left[leaves:] if left[0] not in kinds]
        self.values = self._joined(here, "")

    def _joined(self, ends: Sequence[dict[str, Value]], why: str) -> dict[str, Value]:
        """Variables after one of several branches: ``why``, or else itself, is asked for where one differs in
        more than words that change nothing."""
        joined: dict[str, Value] = {}
        for name in {name: None for end in ends for name in end}:
            values = [end.get(name) for end in ends]
            least = min((value for value in values if value is not None), key=len)
            joined[name] = (
                least if all(self._same(least, value) for value in values) else unknown(why or name)
            )
        return joined

    def _same(self, least: Value, value: Value | None) -> bool:
        words, more = (one.split() if isinstance(one, str) else one or [] for one in (least, value))
        longer = type(least) is type(value) and more[: len(words)] == words and len(more) > len(words)
        return value == least or (longer and self.harmless(more[len(words) :]))

    # --- commands ----------------------------------------------------------------------------

    def _command(self, node: Node) -> Truth:
        """``node`` with its redirections; tree-sitter takes words behind one's target for more targets."""
        command = node.child_by_field_name("body") or node
        if command.type not in ("command", "redirected_statement"):
            return self._run(command)
        words: list[str] = []
        before: list[Node] = []
        for index, part in enumerate(command.children):
            if part.type == "variable_assignment":
                before.append(part)
            elif part.type == "command_name" or command.field_name_for_child(index) == "argument":
                if before and not words and _ends_line(command, before[-1], part):
                    self._all(before)
                    before = []
                words += self._fields(part)
        text, later = "", []
        for redirect in {part.id: part for part in (*command.children, *node.children)}.values():
            if redirect.type in _REDIRECTS:
                behind = redirect.children_by_field_name("destination")[1:]
                behind += redirect.children_by_field_name("argument")
                if any(">" in part.type for part in redirect.children):
                    target = redirect.children_by_field_name("destination")[:1]
                    self._written |= {self._text(part).rpartition("/")[2] for part in target}
                words += [word for part in behind for word in self._fields(part)]
                if words[:1] == ["read"] and "-d" in words and redirect.type == "heredoc_redirect":
                    self.values[words[-1]] = self._heredoc(redirect).strip()
                    return False  # it found no end of a line
                text += "".join(_source(part) for part in redirect.children if part.type == "heredoc_body")
                later += [part for part in redirect.children if part.type in ("pipeline", "list")]
        status = self._start(words, before, text)
        return self._all(later) if later else status

    def _start(self, words: list[str], before: Sequence[Node], text: str) -> Truth:
        """Run a command: ``before`` are assignments for it alone, ``text`` is its input."""
        if not words:
            self._all(before)
            return True
        name, *others = words
        if name in self._functions:
            return self._call(self._functions[name], others)
        if name in ("exit", "return", "break", "continue"):
            raise _Leave(name)
        if name == "eval":
            return self.read(" ".join(others))
        if name == "test":
            return self.read(f"[ {shlex.join(others)} ]")
        if name in ("source", "."):
            # of the same folder, whatever the path to it is made of
            file = readable(" ".join(others[:1])).rpartition("/")[2]
            if file in self._written:
                self.doubts[file] = f"{file}, which the script changes before it reads it, is not counted"
            path = self.folder / file if self.folder and file else None
            if path and path.is_file():
                return self.read(path.read_text())
            self.notes.append(f"{file} is not in the script's folder: what it sets is not seen.")
            return ""
        if name == "set":
            if "--" in others or (others[:1] and others[0][0] not in "-+"):
                self.values["@"] = others[others.index("--") + 1 :] if "--" in others else others
            return True
        if name == "shift":
            arguments = self.values.get("@")
            if isinstance(arguments, list):
                self.values["@"] = arguments[int(others[0]) if others and others[0].isdigit() else 1 :]
            return True
        if name in _READERS:
            for word in others:
                if match := _NAME.match(word):
                    self.values[match[0]] = unknown(match[0])
            return ""
        if name == "false" or name in _QUIET:
            return name != "false"
        if name in _WRITERS and (name not in ("sed", "perl") or any(map(_IN_PLACE.fullmatch, others))):
            self._written |= {word.rpartition("/")[2] for word in others}
        return self._apart(lambda: self._process(words, before, text))

    def _process(self, words: list[str], before: Sequence[Node], text: str) -> Truth:
        """A command that is no part of bash; a script within it is followed, behind the words before it."""
        self._all(before)
        outside = self._prefix
        for place, word in enumerate(words):
            if word.rpartition("/")[2] in _SHELLS:
                option, *others = words[place + 1 :] or [""]
                quoted = re.fullmatch(r"-\w*c", option)
                inner = "".join(others[:1]) if quoted else text if option in ("", "-s") else ""
                if inner:
                    name, others = ("".join(others[1:2]), others[2:]) if quoted else (word, others)
                    self.values |= {"0": name, "@": others[others[:1] == ["--"] :]}
                    self._prefix = [*outside, *words[:place]]
                    status = self.read(inner)
                    self._prefix = outside
                    return status
        if words[0].startswith("-"):
            wrong = readable(" ".join(words))[:60]
            self.notes.append(f"{wrong}: a command of its own, since the line before does not go on.")
        self.found.append(Command([*outside, *words], self._why, dict(self.values)))
        return ""

    def _call(self, body: Node, arguments: list[str]) -> Truth:
        if self._depth >= _DEEPEST:
            return ""
        before, leaves = self.values.get("@"), len(self._left)
        self.values["@"] = arguments
        self._locals.append({})
        self._depth += 1
        status: Truth = ""
        try:
            status = self._run(body)
        except _Leave as leave:
            if str(leave) == "exit":
                raise
        finally:
            self._depth -= 1
            self._rejoin(leaves, "return")
            for name, value in {**self._locals.pop(), "@": before}.items():
                self.values.pop(name, None)
                if value is not None:
                    self.values[name] = value
        return status

    def _declare(self, node: Node) -> Truth:
        kind = node.children[0].type
        for part in node.named_children:
            name = _source(part.named_children[0] if part.type == "variable_assignment" else part)
            if kind == "local" and self._locals:
                self._locals[-1].setdefault(name, self.values.get(name))
                self.values[name] = ""
            if part.type == "variable_assignment":
                self._assign(part)
        return True

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target
        name = _source(target.named_children[0] if target.type == "subscript" else target)
        new: Value = "" if value is None else self._text(value)
        if value is not None and value.type == "array":
            new = [
                word for part in value.named_children if part.type != "comment" for word in self._fields(part)
            ]
        # Of a command's output, and of an array's element, the variable is asked for.
        elif target.type == "subscript" or (_MARK.fullmatch(str(new)) and not _settable(unknowns(str(new)))):
            new = unknown(name)
        if node.children[1].type == "+=":
            old = self.values.get(name, type(new)())
            old = [old] if isinstance(new, list) and isinstance(old, str) else old
            new = old + new if type(old) is type(new) else unknown(name)  # type: ignore[operator]
        if sum(map(len, new)) > _LONGEST:
            raise ValueError(f"{name} has more than {_LONGEST} letters")
        self.values[name] = new

    # --- words -------------------------------------------------------------------------------

    def _fields(self, node: Node) -> list[str]:
        """The words that one becomes: split where bash finds no quotes."""
        match node.type:
            case "command_name":
                return self._fields(node.children[0])
            case "simple_expansion" | "expansion":
                return [word for value in self._value(node) for word in value.split()]
            case "string" if _WORDS_OF_AN_ARRAY.fullmatch(_source(node)):
                return self._value(node.named_children[0])
            case "concatenation":
                words = [""]
                for part in node.children:
                    first, *others = self._fields(part) or [""]
                    words[-1] += first
                    words += others
                return words
        return [self._text(node)]

    def _text(self, node: Node) -> str:
        """The text that a word becomes, unsplit."""
        source = _source(node)
        match node.type:
            case "string":
                return self._spliced(node, 1, len(node.text or b"") - 1)
            case "raw_string":
                return source[1:-1]
            case "ansi_c_string":
                return source[2:-1].encode().decode("unicode_escape")
            case "concatenation" | "command_name":
                return "".join(map(self._text, node.children))
            case "simple_expansion" | "expansion":
                lead = source[: source.index("$")]  # blanks of a string that tree-sitter counts in
                return lead + " ".join(self._value(node))
            case "arithmetic_expansion":
                try:
                    return str(int(self._evaluate(node.named_children[0], True)))
                except _NotKnown as error:
                    return unknown(str(error) or source)
            case "command_substitution" | "process_substitution":
                redirects = [part for part in _nodes(node) if part.type in _REDIRECTS]
                if len(redirects) == 1 and re.match(r"\$\(\s*cat\s*<<", source.strip()):
                    return self._heredoc(redirects[0]).rstrip("\n")
                return source[: len(source) - len(source.lstrip())] + unknown(source.strip())
        return re.sub(r"\\(.)", r"\1", source.replace("\\\n", ""))

    def _spliced(self, node: Node, begin: int, end: int) -> str:
        """Bytes of a quoted text with its expansions; tree-sitter leaves out blanks between parts."""
        whole, text = node.text or b"", ""
        for part in (part for part in node.named_children if not part.type.endswith("_content")):
            text += _unquoted(whole[begin : part.start_byte - node.start_byte]) + self._text(part)
            begin = part.end_byte - node.start_byte
        return text + _unquoted(whole[begin:end])

    def _heredoc(self, node: Node) -> str:
        """The text that ``<<END`` gives; of a quoted ``END`` as it stands."""
        text = ""
        for body in (part for part in node.children if part.type == "heredoc_body"):
            quoted = re.match(r"<<-?\s*['\"\\\\]", _source(node))
            text += _source(body) if quoted else self._spliced(body, 0, len(body.text or b""))
        return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if _source(node).startswith("<<-") else text

    def _value(self, node: Node) -> list[str]:
        """Of ``$NAME`` and ``${...}``: the words of an array, or one text."""
        source = _source(node).strip()
        reads, *how = [part for part in node.children if part.type not in ("$", "${", "}")]
        if reads.type in ("#", "!") and how:
            return [unknown(source)]
        name, every = _source(reads), False
        if reads.type == "subscript":
            name, every = _source(reads.named_children[0]), _source(reads.named_children[-1]) in "@*"
            if not every:
                return [unknown(source)]
        value = self._lookup(name, every)
        if every and (value is None or (len(value) == 1 and _MARK.fullmatch(value[0]))):
            value = [unknown(f"{unknowns(value[0])[0] if value else name}[@]")]
        kind, otherwise = how[0].type if how else "?", "".join(map(self._text, how[1:]))
        empty = value is None or (":" in kind and value in ([], [""]))
        if kind.strip(":") in ("-", "="):
            if empty and "=" in kind:
                self.values[name] = otherwise
            return [otherwise] if empty else value or []
        if kind.strip(":") == "+":
            text = "".join(value or [])
            if text and not _MARK.sub("", text):
                return [unknown(name)]  # which may be empty
            return [""] if empty else [otherwise]
        if value is None or kind.strip(":") == "?":
            return [unknown(name)] if value is None else value
        return [unknown((unknowns(" ".join(value)) or [source])[0])]

    def _lookup(self, name: str, every: bool) -> list[str] | None:
        """None for a variable that nothing sets."""
        arguments = self.values.get("@")
        if name in ("@", "*", "#") or (name.isdigit() and name != "0"):
            if arguments is None:
                given = self.given.get(name)
                return shlex.split(given) if given is not None else [] if name in "@*" else None
            if isinstance(arguments, str):
                return [arguments]
            if name == "#":
                return [str(len(arguments))]
            return arguments if name in "@*" else arguments[int(name) - 1 : int(name)] or [""]
        if name in self.given:
            return shlex.split(self.given[name]) if every else [self.given[name]]
        found = self.values.get(name)
        if isinstance(found, list):
            return found if every else found[:1] or [""]
        return None if found is None else [found]

    # --- tests and numbers -------------------------------------------------------------------

    def _truth(self, node: Node, numbers: bool) -> Truth:
        try:
            return bool(self._evaluate(node, numbers))
        except _NotKnown as error:
            return str(error)

    def _evaluate(self, node: Node, numbers: bool) -> str | int:
        """Of ``((...))`` if ``numbers``, else of a test; files and regular expressions are not known."""
        left, right, sign = node, node, ""
        if node.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
            left, right = node.children[0], node.children[-1]
            sign = _source(node.children[1] if node.type[0] == "b" else left)
        match sign:
            case "":
                known = node.type != "variable_name" or not numbers
                text = (
                    self._text(node)
                    if known
                    else (self._lookup(_source(node), False) or [unknown(_source(node))])[0]
                )
                if names := unknowns(text):
                    raise _NotKnown(_settable(names))
                return _whole(text or "0") if numbers else text
            case "(":
                return self._evaluate(node.children[1], numbers)
            case "!":
                return not self._evaluate(right, numbers)
            case "-z" | "-n":
                return (self._evaluate(right, numbers) == "") == (sign == "-z")
            case "&&" | "-a" | "||" | "-o":
                truths = [self._truth(left, numbers), self._truth(right, numbers)]
                decides = sign in ("||", "-o")
                if (
                    decides not in truths
                    and (why := next((t for t in truths if isinstance(t, str)), None)) is not None
                ):
                    raise _NotKnown(why)
                return decides if decides in truths else not decides
        # tree-sitter orders -a and -o otherwise than bash: no operand of a comparison is a comparison.
        if node.type[0] == "u" or (not numbers and {left.type, right.type} & _EXPRESSIONS):
            raise _NotKnown
        one, other = self._evaluate(left, numbers), self._evaluate(right, numbers)
        if sign in ("=", "==", "!=") and not numbers:
            quoted = right.type in ("string", "raw_string")
            return (one == other if quoted else fnmatchcase(str(one), str(other))) == (sign != "!=")
        first, second = _whole(one), _whole(other)
        divides, powers = sign in ("/", "%"), sign == "**"  # bash rounds negative ones otherwise than Python
        if (
            sign not in _OPERATORS
            or (divides and min(first, second - 1) < 0)
            or (powers and not 0 <= second < 64)
        ):
            raise _NotKnown
        return int(_OPERATORS[sign](first, second))

    def _arithmetic(self, node: Node) -> Truth:
        """``((...))``, which may assign."""
        signs = {_source(part) for part in _nodes(node) if not part.is_named}
        if not signs & {"=", "+=", "-=", "*=", "/=", "%=", "++", "--"}:
            return self._truth(node.named_children[0], True)
        for part in _nodes(node):
            if part.type == "variable_name":
                self.values[_source(part)] = unknown(_source(part))
        return ""


def _whole(text: str | int) -> int:
    """A number of 64 bits, as bash has them."""
    if not re.fullmatch(r"[+-]?\d{1,19}", str(int(text) if isinstance(text, bool) else text)):
        raise _NotKnown
    return int(text)


def _unquoted(text: bytes) -> str:
    """Of a text in double quotes."""
    return re.sub(r"\\([\\$`\"])", r"\1", text.decode().replace("\\\n", ""))


def _source(node: Node) -> str:
    return (node.text or b"").decode()


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for part in node.children:
        yield from _nodes(part)


def _ends_line(whole: Node, part: Node, following: Node) -> bool:
    """Whether a line ends between two parts, which tree-sitter overlooks behind two assignments."""
    between = (whole.text or b"")[part.end_byte - whole.start_byte : following.start_byte - whole.start_byte]
    return b"\n" in between.replace(b"\\\n", b"")


def _settable(names: Sequence[str]) -> str:
    """The first of ``names`` that ``--set`` can give."""
    return next((name.removesuffix("[@]") for name in names if _NAME.fullmatch(name)), "")


def _not(truth: Truth) -> Truth:
    return not truth if isinstance(truth, bool) else truth
