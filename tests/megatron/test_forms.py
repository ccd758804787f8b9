"""Digests of functions, and what counts as Megatron's own."""

from __future__ import annotations

import ast
import functools
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.adapter import forms
from megatron_fused_ce.scripts.dev import known_forms
from megatron_fused_ce.scripts.lib import launches
from tests.support.checkouts import on_checkouts
from tests.support.known_forms import table_until

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


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""Words."""', '"""Other words."""', True),
        ("a: int", "a", True),
        ('-> "T"', "", True),
        ("x: int = 0", "x: float = 0", True),
        ("pass", "pass  # a comment", True),
        ('f"a{x!r:>{a}}b" "c"', 'f"a{x!r:>{a}}bc"', True),
        ("1_000", "1000", True),
        ('u"no"', '"no"', True),
        ("{x!r:", "{x!s:", False),
        ("-1.5e-3", "-1.6e-3", False),
        ("1_000", "1000.0", False),
        ("c: float", "c2: float", False),
        ("@decorated(1", "@decorated(2", False),
        ("Point(x=0)", "Point(x=1)", False),
        ("a < b <= c", "a < b < c", False),
        ("def f(", "def g(", False),
        (", /, b", ", b", False),
        ("case [1, *_] | Point", "case [1] | Point", False),
    ],
)
def test_what_a_digest_sees(old, new, same):
    assert SNIPPET.count(old) == 1
    changed = forms.digest(function(SNIPPET.replace(old, new)))
    assert (changed == forms.digest(function(SNIPPET))) == same


def test_names_that_a_function_reads():
    text = """
def f(self, logits: Annotated, scale=default):
    "words"
    from somewhere import imported as own
    total = self.config.weight * logits
    if hasattr(self, "flag") and self.cuda_graph_impl and get_pg_rank(self.tp_group):
        total = own(total, key=scale)
    return total
"""
    assert forms.read_names(function(text)) == {
        *("default", "imported", "config", "weight", "hasattr", "flag")
    }


KEY = f"{__name__}:plain"


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
    ("found", "words"),
    [
        (lambda: plain, ""),
        (lambda: types.MethodType(plain, object()), ""),
        (lambda: decorator(plain), "stands in its place"),
        (lambda: functools.partial(plain), "stands in its place"),
        (lambda: functools.wraps(plain)(rebuilt()), "stands in its place"),
        (lambda: rebuilt(globals={"__name__": "elsewhere"}), "stands in its place"),
        (lambda: torch.no_grad()(plain), "wrapped by torch's"),
        (lambda: rebuilt(argdefs=(3,)), "its defaults were changed"),
        (lambda: rebuilt(argdefs=(2, 3)), "its defaults were changed"),
        (without_source, "its source cannot be read"),
    ],
)
def test_what_is_megatrons_own(found, words):
    form = forms.form_of(KEY, found())
    assert words in form.strange and bool(words) == bool(form.strange)
    assert bool(form.digest) == (not words)


def test_functions_of_torch_that_megatron_wraps_itself():
    form = forms.form_of(f"{__name__}:custom", custom)
    assert not form.strange and form.digest


@torch.no_grad()
def custom(x):
    return x


def test_the_table_has_the_installed_core():
    pytest.importorskip("megatron.core.models.gpt.gpt_model")
    from megatron_fused_ce.adapter import consumer

    for impl in ("", "native", "te"):
        config = types.SimpleNamespace(cross_entropy_loss_fusion=bool(impl), cross_entropy_fusion_impl=impl)
        unknown, watched = forms.look_at(config, frozenset(), consumer.stock_of)
        assert unknown == [] and not watched.changed()
    assert not forms.is_released("0.20.0") and forms.is_released("0.16.1+abc1234")
    assert sys.modules[forms.LANGUAGE_MODULE]


#: The last release before each that launches are tried with.
BEFORE = {(0, 16): "0.15.3", (0, 17): "0.16.1", (0, 18): "0.17.1", (0, 19): "0.18.2", (0, 20): "0.19.1"}


@on_checkouts
def test_a_release_reads_no_new_names(checkout):
    """Or a trial would be refused, and a new Megatron switch the plugin off: no name is new to the table of
    the release before. The trials themselves: tests/parallel/test_known_forms.py."""
    version = launches.Checkout.at(checkout).version
    if version not in BEFORE:
        pytest.skip("the table begins with it, or ends before it")
    for module, names in forms.LOOKED_AT.items():
        source = (Path(checkout) / f"{module.replace('.', '/')}.py").read_text()
        with table_until(BEFORE[version]):
            for name, node in known_forms.functions(source, names):
                form = forms.Form(f"{module}:{name}", "", "", frozenset(forms.read_names(node)))
                assert not forms.new_names(form), name
