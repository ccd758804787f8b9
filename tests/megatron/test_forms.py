"""Digests of functions, and what counts as Megatron's own."""

from __future__ import annotations

import ast
import functools
import importlib
import types
from pathlib import Path

import pytest
import torch

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


def test_the_digest_is_that_of_every_python():
    assert forms.digest(function(SNIPPET)) == DIGEST


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
    for old, new in SAME + OTHER:
        assert SNIPPET.count(old) == 1
        changed = forms.digest(function(SNIPPET.replace(old, new)))
        assert (changed == DIGEST) == ((old, new) in SAME), new


def plain(x, y=2, *, z=None):
    return x


def decorator(function):
    @functools.wraps(function)
    def around(*given, **named):
        return function(*given, **named)

    return around


def rebuilt(**changes):
    parts = {"globals": globals(), "argdefs": plain.__defaults__, **changes}
    made = types.FunctionType(parts.pop("code", plain.__code__), **parts)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def without_source():
    return rebuilt(code=plain.__code__.replace(co_filename="<nowhere>", co_name="other"))


@pytest.mark.parametrize(
    ("found", "known", "has_digest"),
    [
        (lambda: plain, True, True),
        (lambda: types.MethodType(plain, object()), False, False),
        (lambda: decorator(plain), False, False),
        (lambda: functools.partial(plain), False, False),
        (lambda: functools.wraps(plain)(rebuilt()), True, True),
        (lambda: rebuilt(globals={"__name__": "elsewhere"}), False, True),
        (lambda: function, False, True),
        (lambda: torch.no_grad()(plain), False, False),
        (lambda: custom_fwd(plain), False, False),
        (lambda: torch.compile(plain), False, False),
        (lambda: rebuilt(argdefs=(3,)), False, False),
        (lambda: rebuilt(argdefs=(2, 3)), False, False),
        (lambda: rebuilt(argdefs=(2.0,)), False, False),
        (without_source, False, False),
    ],
)
def test_what_is_megatrons_own(found, known, has_digest):
    digest, own = forms._source_of(found(), __name__, "plain")
    assert (own, bool(digest)) == (known, has_digest)


def test_a_copy_of_a_file_is_another(tmp_path):
    copied = tmp_path / "copied.py"
    copied.write_bytes(Path(__file__).read_bytes())
    of_copy = rebuilt(code=plain.__code__.replace(co_filename=str(copied)))
    digest, own = forms._source_of(of_copy, __name__, "plain")
    assert not own and digest == forms._source_of(plain, __name__, "plain")[0]


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
#: In a file of its own: torch.compile takes seconds, which no collection has to wait for.
DECORATED = """
import functools, torch
custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
jit_fuser = torch.compile

@custom_fwd
def custom(x):
    return x

@jit_fuser
def jitted(x):
    return x
"""


@pytest.mark.parametrize("name", ["custom", "jitted"])
def test_decorators_of_megatrons_are_seen_through(name, tmp_path, monkeypatch):
    """As many as there are in the source, and nothing that only says what it wraps."""
    (tmp_path / f"decorated_{name}.py").write_text(DECORATED)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"decorated_{name}")
    found = getattr(module, name)
    inner = getattr(found, "__wrapped__", found)  # of torch.compile, where it is off, none
    lies = custom_fwd(plain)
    lies.__wrapped__ = inner
    known = [
        forms._source_of(one, module.__name__, name)[1]
        for one in (found, inner, custom_fwd(module.jit_fuser(found)), lies)
    ]
    assert known == [True, True, False, False]


def test_the_table_has_the_installed_core():
    pytest.importorskip("megatron.core.models.gpt.gpt_model")
    for of in ("", "native", "te"):
        held = forms.Held(of, frozenset())
        assert held.digests and held.why_unknown == held.changed() == ""
