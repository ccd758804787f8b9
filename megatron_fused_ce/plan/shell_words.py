"""Words of a bash script: what the parts of tree-sitter's tree become with the script's variables put in.

What comes from elsewhere (the environment, a command's output) stays in a word as a mark, which names what to
ask for.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

#: Whether a command ends well; where that is not known, the variable that decides ('' if none does).
Truth = bool | str
Value = str | list[str]

SHELLS = ("bash", "sh", "zsh")
REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
_MARK = re.compile("\ue000([0-9a-f]*)\ue001")
NAME = re.compile(r"(?:[A-Za-z_]\w*|\d+)(?:\[@\])?")
_WORDS_OF_AN_ARRAY = re.compile(r'"\$(?:@|\{(?:\w+\[@\]|@)\})"')
#: Letters of a variable, at most.
_LONGEST = 2**20
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow, "%": operator.mod},
    **{"/": operator.floordiv, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt},
    **{"-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}


class NotKnown(Exception):
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


def settable(names: Sequence[str]) -> str:
    """The first of ``names`` that ``--set`` can give."""
    return next((name.removesuffix("[@]") for name in names if NAME.fullmatch(name)), "")


def source(node: Node) -> str:
    return (node.text or b"").decode()


def nodes(node: Node) -> Iterator[Node]:
    """``node`` and all in it."""
    yield node
    for part in node.children:
        yield from nodes(part)


class Words:
    """The variables of a script, and what its words, sums and tests become with them."""

    def __init__(self, given: Mapping[str, str], values: Mapping[str, str]) -> None:
        """``given`` come before the script's own assignments, ``values`` are what the environment has."""
        self.given = given
        self.values: dict[str, Value] = dict(values)

    def fields(self, node: Node) -> list[str]:
        """The words that one becomes: split where bash finds no quotes."""
        match node.type:
            case "command_name":
                return self.fields(node.children[0])
            case "simple_expansion" | "expansion":
                return [word for value in self._expanded(node) for word in value.split()]
            case "string" if _WORDS_OF_AN_ARRAY.fullmatch(source(node)):
                return self._expanded(node.named_children[0])
            case "concatenation":
                words = [""]
                for part in node.children:
                    first, *others = self.fields(part) or [""]
                    words[-1:] = [words[-1] + first, *others]
                return words
        return [self.text(node)]

    def text(self, node: Node) -> str:
        """The text that a word becomes, unsplit."""
        text = source(node)
        match node.type:
            case "string":
                return self._spliced(node, 1, len(node.text or b"") - 1)
            case "raw_string":
                return text[1:-1]
            case "ansi_c_string":
                return text[2:-1].encode().decode("unicode_escape")
            case "concatenation" | "command_name":
                return "".join(map(self.text, node.children))
            case "simple_expansion" | "expansion":
                return " ".join(self._expanded(node))
            case "arithmetic_expansion":
                try:
                    return str(int(self._evaluate(node.named_children[0], True)))
                except NotKnown as error:
                    return unknown(str(error) or text)
            case "command_substitution" | "process_substitution":
                redirects = [part for part in nodes(node) if part.type in REDIRECTS]
                if len(redirects) == 1 and re.match(r"\s*\$\(\s*cat\s*<<", text):
                    return self.heredoc(redirects[0]).rstrip("\n")
                return unknown(text.strip())
        return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""))

    def _spliced(self, node: Node, begin: int, end: int) -> str:
        """Bytes of a quoted text with its expansions; tree-sitter leaves out blanks between parts."""
        whole, text = node.text or b"", ""
        for part in (part for part in node.named_children if not part.type.endswith("_content")):
            behind = part.end_byte - node.start_byte
            text += _unquoted(whole[begin : behind - len((part.text or b"").lstrip())]) + self.text(part)
            begin = behind
        return text + _unquoted(whole[begin:end])

    def heredoc(self, node: Node) -> str:
        """The text that ``<<END`` gives; of a quoted ``END`` as it stands."""
        quoted, text = re.match(r"<<-?\s*['\"\\\\]", source(node)), ""
        for body in (part for part in node.children if part.type == "heredoc_body"):
            text += source(body) if quoted else self._spliced(body, 0, len(body.text or b""))
        return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if source(node).startswith("<<-") else text

    # --- variables ---------------------------------------------------------------------------

    def _expanded(self, node: Node) -> list[str]:
        """Of ``$NAME`` and ``${NAME:-...}``: the words of an array, or one text."""
        whole = source(node).strip()
        reads, *how = [part for part in node.children if part.type not in ("$", "${", "}")]
        name, every = source(reads), False
        if reads.type == "subscript":
            name, every = source(reads.named_children[0]), source(reads.named_children[-1]) in "@*"
        if (reads.type == "subscript" and not every) or (reads.type in ("#", "!") and how):
            return [unknown(whole)]  # an element, a length, a name in a variable
        value = self.lookup(name, every)
        if every and (value is None or (len(value) == 1 and _MARK.fullmatch(value[0]))):
            value = [unknown(f"{unknowns(value[0])[0] if value else name}[@]")]
        sign, otherwise = how[0].type if how else "", ["".join(map(self.text, how[1:]))]
        empty = value is None or (":" in sign and value in ([], [""]))
        there = [unknown(name)] if value is None else value
        marks = unknowns("".join(there))
        if sign in ("=", ":=") and empty:
            self.values[name] = otherwise[0]
        if value and marks and not _MARK.sub("", "".join(value)) and sign in ("+", ":+"):
            return [unknown(name)]  # which may be empty
        #: of each operator the words where the variable has a value, and where it has none
        either = {"": (there, there), "-": (there, otherwise), "+": (otherwise, [""])}
        either |= {"?": either[""], "=": either["-"]}
        cut = [unknown([*marks, whole][0])]
        return either.get(sign.strip(":"), (cut, cut))[empty]

    def lookup(self, name: str, every: bool) -> list[str] | None:
        """The words of a variable, or its text as the only one; None for one that nothing sets."""
        arguments, every = self.values.get("@"), every or name in ("@", "*")
        if arguments is not None and (name in ("@", "*", "#") or (name.isdigit() and name != "0")):
            if isinstance(arguments, str) or every:
                return [arguments] if isinstance(arguments, str) else arguments
            return [str(len(arguments))] if name == "#" else arguments[int(name) - 1 : int(name)] or [""]
        if name in self.given:
            return shlex.split(self.given[name]) if every else [self.given[name]]
        found = self.values.get(name, [] if name in ("@", "*") else None)
        if isinstance(found, list):
            return found if every else found[:1] or [""]
        return None if found is None else [found]

    def assign(self, node: Node) -> None:
        """Follow ``NAME=...``, ``NAME+=...``, and an array's."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target
        name = source(target.named_children[0] if target.type == "subscript" else target)
        new: Value = "" if value is None else self.text(value)
        if value is not None and value.type == "array":
            parts = [part for part in value.named_children if part.type != "comment"]
            new = [word for part in parts for word in self.fields(part)]
        # Of a command's output, and of an array's element, the variable is asked for.
        elif target.type == "subscript" or (_MARK.fullmatch(str(new)) and not settable(unknowns(str(new)))):
            new = unknown(name)
        if node.children[1].type == "+=":
            old = self.values.get(name, type(new)())
            old = [old] if isinstance(new, list) and isinstance(old, str) else old
            new = old + new if type(old) is type(new) else unknown(name)  # type: ignore[operator]
        if sum(map(len, new)) > _LONGEST:
            raise ValueError(f"{name} has more than {_LONGEST} letters")
        self.values[name] = new

    # --- tests and sums ----------------------------------------------------------------------

    def truth(self, node: Node, numbers: bool) -> Truth:
        """Of ``((...))`` if ``numbers``, else of a test; files and regular expressions are not known."""
        try:
            return bool(self._evaluate(node, numbers))
        except NotKnown as error:
            return str(error)

    def _evaluate(self, node: Node, numbers: bool) -> str | int:
        parts, sign = node.children, ""
        match node.type:
            case "parenthesized_expression":
                return self._evaluate(parts[1], numbers)
            case "unary_expression":
                if (sign := source(parts[0])) not in ("!", "-z", "-n"):
                    raise NotKnown
                value = self._evaluate(parts[-1], numbers)
                return not value if sign == "!" else (value == "") == (sign == "-z")
            case "binary_expression":
                left, sign, right = parts[0], source(parts[1]), parts[2]
                if sign not in ("&&", "-a", "||", "-o"):
                    return self._compared(left, sign, right, numbers)
                truths, decides = [self.truth(part, numbers) for part in (left, right)], sign in ("||", "-o")
                if decides not in truths and (names := [why for why in truths if isinstance(why, str)]):
                    raise NotKnown(names[0])
                return decides if decides in truths else not decides
        if node.type == "variable_name" and numbers:
            text = (self.lookup(source(node), False) or [unknown(source(node))])[0]
        else:
            text = self.text(node)
        if names := unknowns(text):
            raise NotKnown(settable(names))
        return _whole(text or "0") if numbers else text

    def _compared(self, left: Node, sign: str, right: Node, numbers: bool) -> int:
        # tree-sitter orders -a and -o otherwise than bash: no operand of a comparison is a comparison.
        if not numbers and {left.type, right.type} & {"binary_expression", "unary_expression"}:
            raise NotKnown
        one, other = self._evaluate(left, numbers), self._evaluate(right, numbers)
        if sign in ("=", "==", "!=") and not numbers:
            quoted = right.type in ("string", "raw_string")
            return (one == other if quoted else fnmatchcase(str(one), str(other))) == (sign != "!=")
        first, second = _whole(one), _whole(other)
        # bash rounds negative numbers otherwise than Python.
        rounds, powers = sign in ("/", "%") and min(first, second - 1) < 0, sign == "**"
        if sign not in _OPERATORS or rounds or (powers and not 0 <= second < 64):
            raise NotKnown
        return int(_OPERATORS[sign](first, second))


def _whole(text: str | int) -> int:
    """A number of 64 bits, as bash has them."""
    if not re.fullmatch(r"[+-]?\d{1,19}", str(int(text) if isinstance(text, bool) else text)):
        raise NotKnown
    return int(text)


def _unquoted(text: bytes) -> str:
    """Of a text in double quotes."""
    return re.sub(r"\\([\\$`\"])", r"\1", text.decode().replace("\\\n", ""))
