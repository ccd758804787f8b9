"""The functions of Megatron's that the head stands in for, and whether their code is known.

A user's function in the place of one of them, or an edit in a fork's own source, is another loss, which must
not be replaced in silence. :mod:`.known_forms` has a digest of every form that each had since 0.15.0.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import compress
from operator import attrgetter, is_, is_not, or_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

_CORE = "megatron.core."
LANGUAGE_MODULE = f"{_CORE}models.common.language_module.language_module"
RL = "megatron.rl.rl_utils"
_CROSS_ENTROPY = f"{_CORE}tensor_parallel.cross_entropy"
_NATIVE = f"{_CORE}fusions.fused_cross_entropy"
_LAYERS = f"{_CORE}tensor_parallel.layers"
_MAPPINGS = f"{_CORE}tensor_parallel.mappings"
_UTILS = f"{_CORE}utils"
_PARTS = f"{_CORE}tensor_parallel.utils"

LOSS = f"{LANGUAGE_MODULE}:LanguageModule.compute_language_model_loss"
LOG_SOFTMAX = f"{RL}:selective_log_softmax"
_LAYER = f"{_LAYERS}:ColumnParallelLinear"
FORWARD, PRODUCT = f"{_LAYER}.forward", f"{_LAYER}._forward_impl"
#: Module -> functions in it, of all versions.
LOOKED_AT = {
    LANGUAGE_MODULE: ("LanguageModule.compute_language_model_loss",),
    RL: ("selective_log_softmax",),
    _CROSS_ENTROPY: (
        *("vocab_parallel_cross_entropy", "_VocabParallelCrossEntropy.forward"),
        "_VocabParallelCrossEntropy.backward",
        *(
            f"VocabParallelCrossEntropy.{part}"
            for part in (
                *("calculate_logits_max", "calculate_predicted_logits", "calculate_cross_entropy_loss"),
                *("prepare_gradient_calculation_operands", "calculate_gradients"),
            )
        ),
    ),
    _NATIVE: (
        *("fused_vocab_parallel_cross_entropy", "_VocabParallelCrossEntropy.forward"),
        *("_VocabParallelCrossEntropy.backward", "calculate_logits_max", "calculate_predicted_logits"),
        *("calculate_cross_entropy_loss", "calculate_gradients"),
    ),
    _LAYERS: (
        *("ColumnParallelLinear.forward", "ColumnParallelLinear._forward_impl"),
        *("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"),
        *(f"LinearWithFrozenWeight.{step}" for step in ("forward", "backward")),
        *(f"LinearWithGradAccumulationAndAsyncCommunication.{step}" for step in ("forward", "backward")),
        *("_linear_forward", "_wgrad_gemm"),
    ),
    _MAPPINGS: (
        *("copy_to_tensor_model_parallel_region", "_reduce"),
        *(f"_CopyToModelParallelRegion.{step}" for step in ("forward", "backward")),
    ),
    _PARTS: (
        "VocabUtility.vocab_range_from_per_partition_vocab_size",
        "VocabUtility.vocab_range_from_global_vocab_size",
    ),
    _UTILS: ("prepare_input_tensors_for_wgrad_compute",),
}


#: Modules of Megatron's whose functions these call without changing a loss: for what is read from there it is
#: enough that it is what was defined there. Transformer Engine's loss is trusted.
_HELPERS = {
    *(_MAPPINGS, _PARTS, _UTILS),
    *(f"{_CORE}{name}" for name in ("extensions.transformer_engine", "parallel_state", "transformer.enums")),
}
_LOOKED_AT = {f"{module}:{name}" for module, names in LOOKED_AT.items() for name in names}
_LIBRARIES = {"apex", "torch", "transformer_engine", *sys.stdlib_module_names}
#: Loss -> the name by which ``compute_language_model_loss`` calls it; of :func:`kind_of`.
_LOSSES = {
    "": "vocab_parallel_cross_entropy",
    "native": "fused_vocab_parallel_cross_entropy",
    "te": "te_parallel_cross_entropy",
}


def is_of_layer(key: str) -> bool:
    """Whether a looked-at function makes logits, not a loss of them."""
    return key.startswith((_LAYERS, _MAPPINGS, _UTILS))


def kind_of(config: Any) -> str:
    """Megatron's loss for this config: native, te, or empty for the one that is not fused."""
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    return str(getattr(config, "cross_entropy_fusion_impl", "native")) if fused else ""


# --- digests ---------------------------------------------------------------------------------------

#: What does not change what a function computes, or is not the same in all versions of Python.
_LEFT_OUT = {"ctx", "kind", "type_comment", "annotation", "returns", "type_ignores"}


def digest(function: ast.AST) -> str:
    """Of a function's syntax tree, its name and decorators; not of comments, docstrings and annotations.

    The same from Python 3.10 to 3.14, which ``ast.dump`` is not.
    """
    return hashlib.sha256(_text(function).encode()).hexdigest()[:16]


def is_digest(text: object) -> bool:
    return re.fullmatch("[0-9a-f]{16}", str(text)) is not None


def _text(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(map(_text, node))}]"
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        if isinstance(node, ast.JoinedStr):
            value = list(_pieces(node))
        elif name == "body" and isinstance(value, list):
            value = [line for line in value if not _says_nothing(line)]
        elif name == "format_spec" and value is not None and not list(_pieces(value)):
            value = None
        if name not in _LEFT_OUT and value is not None and value != []:
            parts.append(f" {name}={_text(value)}")
    return f"({type(node).__name__}{''.join(parts)})"


def _pieces(joined: ast.JoinedStr) -> Iterator[ast.AST]:
    """Of an f-string, which Pythons cut differently: its neighbouring texts joined, empty ones left out."""
    text = ""
    for piece in joined.values:
        for part in _pieces(piece) if isinstance(piece, ast.JoinedStr) else (piece,):
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            if text:
                yield ast.Constant(text)
            text = ""
            yield part
    if text:
        yield ast.Constant(text)


def _says_nothing(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


_OF_RUN = re.compile(r"^cuda_?graph|batch_invariant|^get_pg_|(^|_)(pgs?|group|rank|world_size)$", re.I)


def read_names(function: ast.AST) -> set[str]:
    """Names that a function reads, of attributes too, and strings that could be such; not its own variables.

    Without those of process groups, CUDA graphs and batch invariance: releases rename them, and what they
    say stays the same through a run.
    """
    read: set[str] = set()
    own: set[str] = set()
    nodes = list(_walk(function))
    for node in nodes:
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add(node.asname or node.name)
    read -= own
    for node in nodes:
        if isinstance(node, ast.Attribute):
            read.add(node.attr)
        elif isinstance(node, ast.alias):
            read.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            read.add(node.value)
    return {name for name in read if not _OF_RUN.search(name)}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, which nothing reads."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _says_nothing(child):
                    yield from _walk(child)


# --- what runs -------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A running function: what it is called, and either why its code has no digest, or that and its names."""

    key: str
    strange: str
    digest: str = ""
    names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.key.replace(":", ".")


def form_of(key: str, function: Any, module: str = "") -> Form:
    """Of the function that runs in the place of ``key``, by its source; of another ``module`` in tests."""
    inner, wrappers = _inner(function)
    module = module or key.partition(":")[0]
    plain = type(inner) is FunctionType and set(inner.__code__.co_freevars) <= {"__class__"}
    own = plain and inner.__globals__ is vars(sys.modules.get(module, sys))
    if not own or hasattr(inner, "__wrapped__"):
        return Form(key, f"{where(function)} stands in its place")
    try:
        node = _written(inner.__code__)
    except (OSError, SyntaxError, ValueError):
        return Form(key, f"its source cannot be read ({inner.__code__.co_filename})")
    if node is None:
        return Form(key, f"its code is not what {inner.__code__.co_filename} says")
    if not _has_defaults(inner, node.args):
        return Form(key, "its defaults were changed")
    if wrappers > sum(getattr(d, "id", "") != "staticmethod" for d in node.decorator_list):
        return Form(key, "it is wrapped by torch's functions")
    return Form(key, "", digest(node), frozenset(read_names(node)))


def _inner(function: Any) -> tuple[Any, int]:
    """The function under a method and under what torch wraps around it, and the number of such wrappers."""
    if type(function) in (MethodType, staticmethod, classmethod):
        function = function.__func__
    wrappers = 0
    while (
        type(function) is FunctionType  # a proxy would pass another's attributes on
        and _module(function).startswith("torch.")  # custom_fwd, torch.compile
        and hasattr(function, "__wrapped__")
    ):
        function, wrappers = function.__wrapped__, wrappers + 1
    return function, wrappers


@lru_cache(maxsize=64)
def _file(name: str) -> tuple[ast.Module, CodeType]:
    with tokenize.open(name) as file:
        text = file.read()
    return ast.parse(text), compile(text, name, "exec", dont_inherit=True)


@lru_cache(maxsize=1024)
def _written(code: CodeType) -> ast.FunctionDef | None:
    """The definition in a code's file of which it was compiled; None where the file has another there."""
    tree, whole = _file(code.co_filename)
    compiled = [whole]
    for each in compiled:  # which grows
        compiled += [part for part in each.co_consts if isinstance(part, CodeType)]
    if code not in compiled:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _has_defaults(function: FunctionType, written: ast.arguments) -> bool:
    positional = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    pairs = list(zip(written.defaults, positional, strict=False))
    for arg, node in zip(written.kwonlyargs, written.kw_defaults, strict=True):
        if node is not None:
            pairs.append((node, named.get(arg.arg)))
    same = (not isinstance(node, ast.Constant) or node.value == value for node, value in pairs)
    return len(written.defaults) == len(positional) and all(same)


def _module(function: Any) -> str:
    if type(function) is FunctionType:
        return str(function.__globals__.get("__name__", ""))
    return str(getattr(function, "__module__", ""))


def where(function: Any) -> str:
    """Its name, and its file if it has one."""
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    return f"{name} ({code.co_filename})" if code is not None else name


def running(key: str) -> Any:
    """The function that runs in the place of ``key``, None where this version has none."""
    module, _, name = key.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_released(version: str) -> bool:
    """Whether the table has all of this version: one that it has not is newer, as a candidate or a branch."""
    from megatron_fused_ce.adapter import known_forms

    return version.partition("+")[0] in known_forms.RELEASES.split()


def is_known(form: Form, trusted: frozenset[str]) -> bool:
    """Whether some Megatron had this form, or the user vouches for it."""
    from megatron_fused_ce.adapter import known_forms

    module, _, name = form.key.partition(":")
    return form.digest in known_forms.FORMS.get(module, {}).get(name, {}) or form.digest in trusted


class Watched:
    """What functions were, and what the names that they read stood for, when they were looked at."""

    def __init__(self, read: dict[Any, set[str]], functions: set[FunctionType]) -> None:
        """``read``: modules and classes, each with names of attributes."""
        #: A method of a class's base is made anew by every read: watched is that the class has none itself.
        self._inherited = [
            (owner, name)
            for owner, names in read.items()
            for name in names
            if type(getattr(owner, name)) is MethodType and name not in vars(owner)
        ]
        self._read = []
        for owner, names in read.items():
            own = sorted(name for name in names if (owner, name) not in self._inherited)
            if own:
                # With another name, as attrgetter makes no tuple of one.
                own.append("__name__")
                get = attrgetter(*own)
                self._read.append((owner, own, get, get(owner)))
        self._functions = list(functions)
        self._codes, self._defaults = self._parts()

    def _parts(self) -> tuple[list[Any], list[Any]]:
        functions = self._functions
        return [each.__code__ for each in functions], [each.__defaults__ for each in functions]

    def changed(self) -> str:
        """What was replaced or edited since, empty if nothing was. Asked at every call of a head.

        By identity: a proxy may say that it is equal.
        """
        for owner, names, get, before in self._read:
            now = get(owner)
            if not all(map(is_, now, before)):
                return _name_of(owner, next(compress(names, map(is_not, now, before))))
        for cls, name in self._inherited:
            if name in vars(cls):
                return _name_of(cls, name)
        codes, defaults = self._parts()
        if not (all(map(is_, codes, self._codes)) and all(map(is_, defaults, self._defaults))):
            other = [*map(is_not, codes, self._codes)], [*map(is_not, defaults, self._defaults)]
            function = next(compress(self._functions, map(or_, *other)))
            return _name_of(sys.modules[_module(function)], function.__qualname__)
        return ""


def _name_of(owner: Any, name: str) -> str:
    return (
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        if isinstance(owner, type)
        else f"{owner.__name__}.{name}"
    )


def look_at(
    config: Any, trusted: frozenset[str], stock: Callable[[str], Any] = running
) -> tuple[list[Form], Watched]:
    """The functions without a known form by which this config would compute a head's loss.

    It begins with the loss and the layer's forward and goes on through what they read, so that it sees what
    runs, wherever it is defined.

    Args:
        trusted: digests that the user vouches for.
        stock: finds the function of a key, under what this package has put in its place.

    Returns:
        them, and what would have to change for others to run.
    """
    waiting = [(key, stock(key)) for key in (LOSS, FORWARD, PRODUCT)]
    others = {name for kind, name in _LOSSES.items() if kind != kind_of(config)}
    read: dict[Any, set[str]] = {running(_LAYER): {"forward", "_forward_impl"}}
    seen, unknown, functions = set[int](), list[Form](), set[FunctionType]()
    for key, function in waiting:  # which grows
        if id(function) in seen:
            continue
        seen.add(id(function))
        form = form_of(key, function)
        if form.strange or not is_known(form, trusted):
            unknown.append(form)
        if form.strange:
            continue
        inner = _inner(function)[0]
        functions.add(inner)
        for chain in _chains(inner):
            if chain[-1] not in others:
                waiting += _read_by(inner, chain, read)
    return unknown, Watched(read, functions)


def _chains(function: FunctionType) -> set[tuple[str, ...]]:
    """Names of its module that a function reads, each with the attributes that it reads of it."""
    node = _written(function.__code__)
    assert node is not None
    body = [part for line in (node.args, *node.body) for part in _walk(line)]
    own = {part.arg for part in body if isinstance(part, ast.arg)}
    own |= {part.id for part in body if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    chains = set()
    for part in body:
        attributes: list[str] = []
        while isinstance(part, ast.Attribute):
            attributes.insert(0, part.attr)
            part = part.value
        if isinstance(part, ast.Name) and part.id in function.__globals__ and part.id not in own:
            chains.add((part.id, *attributes))
    return chains


def _read_by(
    function: FunctionType, chain: tuple[str, ...], read: dict[Any, set[str]]
) -> Iterator[tuple[str, Any]]:
    """The functions of Megatron's that a name stands for, with their keys, and what is none of its."""
    reader = _module(function)
    owner: Any = sys.modules[reader]
    for depth, name in enumerate(chain, 1):
        place = f"{reader}:{'.'.join(chain[:depth])}"
        found = getattr(owner, name, None)
        if hasattr(owner, name):
            read.setdefault(owner, set()).add(name)
        if type(found) is not ModuleType:
            break
        if sys.modules.get(found.__name__) is not found:
            yield place, found
        if not found.__name__.startswith(_CORE[:-1]):
            return
        owner = found
    if isinstance(found, type):
        yield from _methods(found, place, read, chain[depth:])
    elif callable(found) or depth < len(chain):
        inner, _ = _inner(found)
        key = f"{_module(inner)}:{getattr(inner, '__qualname__', '')}"
        if type(inner) is FunctionType and key.startswith(_CORE):
            if _module(inner) not in _HELPERS or key in _LOOKED_AT:
                yield key, found
            elif running(key) is not found:
                yield place, found
        elif not _is_library(inner):
            yield place, found


def _methods(
    found: type, place: str, read: dict[Any, set[str]], attributes: Iterable[str]
) -> Iterator[tuple[str, Any]]:
    """The functions of the class at ``place``, with their keys; the class if it is none of Megatron's."""
    if _is_library(found):
        return
    if running(f"{found.__module__}:{found.__qualname__}") is not found:
        yield place, found
    names = read.setdefault(found, set())
    names.update(attributes)
    for cls in found.__mro__:
        for name, value in () if _is_library(cls) else vars(cls).items():
            is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
            key = f"{cls.__module__}:{cls.__qualname__}.{name}"
            if not is_method or isinstance(value, type):
                continue
            names.add(name)
            if cls.__module__ not in _HELPERS or key in _LOOKED_AT:
                yield key if key.startswith(_CORE) else place, value


def _is_library(found: Any) -> bool:
    """Whether something is torch's, Python's, or of the libraries that Megatron's layers call."""
    modules = type(found).__module__, getattr(found, "__module__", None) or "builtins"
    return all(module.partition(".")[0] in _LIBRARIES for module in modules)


def why_not_own(forms: list[Form]) -> str:
    """Why these are not code of Megatron's; empty if they are, or may be."""
    whys = [f"{form.name} is not Megatron's own: {form.strange}" for form in forms if form.strange]
    return "; ".join(whys) + (": remove that to have it fused" if whys else "")


def in_words(forms: list[Form], what: str) -> str:
    """A reason against forms that have a digest."""
    names, digests = ", ".join(form.name for form in forms), " ".join(form.digest for form in forms)
    return f"{names} {what}: --fused-ce-trust {digests} lets the fused head stand in for this code"


def pool_of(key: str) -> str:
    """Whose names a function may read: those of all functions of a loss, or of log-probabilities."""
    return "log_softmax" if key == LOG_SOFTMAX else "loss"


def new_names(form: Form) -> set[str]:
    """Names that a function of a loss reads and no known form of one does."""
    from megatron_fused_ce.adapter import known_forms

    if is_of_layer(form.key):
        return set()
    pools = {pool_of(form.key), "loss"}  # a loss has no log_softmax
    names = [names for pool in pools for names in known_forms.NAMES[pool].values()]
    return set(form.names).difference(*map(str.split, names))
