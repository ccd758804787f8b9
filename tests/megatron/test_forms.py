"""Digests of functions. What counts as Megatron's own: tests/parallel/test_known_forms.py."""

from __future__ import annotations

import ast
import types

import pytest

from megatron_fused_ce.adapter import forms

SNIPPET = '''
@decorated(1, by="x")
def f(self, a: int, /, b: str = "d", *rest: float, c: float = -1.5e-3, d=None, **named) -> "T":
    """Words."""
    r"""More words."""
    x: int = 0
    y = f"a{x!r:>{a}}b" "c" f"{b=}" f"" f"{x:}"
    if (n := len(rest)) > 10 and not named:
        return [*rest, *(z ** 2 for z in rest if z)], {**named, "k": 1j, b"b": ...}
    match named:
        case {"a": 1, **others}:
            pass
        case [1, *_] | Point(x=0):
            lambda q=2, *, r: q @ r
    try:
        with open(a) as g, h:
            del x[1:2, ::3]
    except (ValueError, TypeError) as error:
        raise KeyError(f"{error}") from error
    finally:
        self.total += 1_000
    return yes if a < b <= c else u"no"
'''
#: The same on every Python from 3.10 on.
DIGEST = "00e874a11a4d8d0c"


def function(text):
    return ast.parse(text).body[0]


#: Nothing that runs: words of docstrings, annotations, comments, how numbers and strings are written.
SAME = [
    ('"""Words."""', '"""Other words."""'),
    ("a: int", "a"),
    ('-> "T"', ""),
    ("x: int = 0", "x: float = 0"),
    ("pass", "pass  # a comment"),
    ('f"a{x!r:>{a}}b" "c"', 'f"a{x!r:>{a}}bc"'),
    ("1_000", "1000"),
    ('u"no"', '"no"'),
]
OTHER = [
    ("{x!r:", "{x!s:"),
    ("-1.5e-3", "-1.6e-3"),
    ("1_000", "1000.0"),
    ("c: float", "c2: float"),
    ("@decorated(1", "@decorated(2"),
    ("Point(x=0)", "Point(x=1)"),
    ("a < b <= c", "a < b < c"),
    ("def f(", "def g("),
    (", /, b", ", b"),
    ("case [1, *_] | Point", "case [1] | Point"),
]


def test_what_a_digest_sees():
    assert forms.digest(function(SNIPPET)) == DIGEST
    for old, new in SAME + OTHER:
        assert SNIPPET.count(old) == 1
        changed = forms.digest(function(SNIPPET.replace(old, new)))
        assert (changed == DIGEST) == ((old, new) in SAME), new


def plain(x, y=2, *, z=None):
    return x


def test_defaults_are_those_of_the_source():
    """Other stand-ins, on Megatron's own functions: tests/parallel/test_known_forms.py."""
    for y, z, is_own in ((2, None, True), (2.0, None, False), (2, 0, False)):
        made = types.FunctionType(plain.__code__, globals(), argdefs=(y,))
        made.__kwdefaults__ = {"z": z}
        assert forms.is_own(made, __name__, "plain") == is_own
    assert not forms.is_own(types.MethodType(plain, 1), __name__, "plain")


def test_the_table_has_the_installed_core():
    pytest.importorskip("megatron.core.models.gpt.gpt_model")
    for of in ("", "native", "te"):
        held = forms.Held(of, frozenset())
        assert held.digests and held.why_unknown == held.changed() == ""
