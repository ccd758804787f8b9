"""The functions of Megatron's that the head stands in for, and whether their code is known.

A user's function in the place of one of them, or an edit in a fork's own source, is another loss, which must
not be replaced in silence. :mod:`.known_forms` has a digest of every form that each had since 0.15.0.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_CORE = "megatron.core."
LANGUAGE_MODULE = f"{_CORE}models.common.language_module.language_module"
RL = "megatron.rl.rl_utils"
_CROSS_ENTROPY = f"{_CORE}tensor_parallel.cross_entropy"
_NATIVE = f"{_CORE}fusions.fused_cross_entropy"
_LAYERS = f"{_CORE}tensor_parallel.layers"
_MAPPINGS = f"{_CORE}tensor_parallel.mappings"

LOSS = f"{LANGUAGE_MODULE}:LanguageModule.compute_language_model_loss"
LOG_SOFTMAX = f"{RL}:selective_log_softmax"
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
        "copy_to_tensor_model_parallel_region",
        *(f"_CopyToModelParallelRegion.{step}" for step in ("forward", "backward")),
    ),
}


def is_of_layer(key: str) -> bool:
    """Whether a looked-at function makes logits, not a loss of them."""
    return key.startswith((_LAYERS, _MAPPINGS))


def keys_for(config: Any) -> Iterator[str]:
    """The looked-at functions, ``module:qualname``, by which this config would compute a head's loss."""
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    kind = getattr(config, "cross_entropy_fusion_impl", "native") if fused else ""
    for module, names in LOOKED_AT.items():
        if module == RL or (module == _NATIVE and kind != "native"):
            continue
        for name in names:
            shared = name.startswith("VocabParallelCrossEntropy.") and kind == "native"
            if module != _CROSS_ENTROPY or shared or not kind:
                yield f"{module}:{name}"


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


_forms: dict[tuple[str, CodeType], Form] = {}


def form_of(key: str, function: Any, module: str = "") -> Form:
    """Of the function that runs in the place of ``key``, by its source; of another ``module`` in tests."""
    function = getattr(function, "__func__", function)
    wrappers = 0
    while _module(function).startswith("torch.") and hasattr(function, "__wrapped__"):
        function, wrappers = function.__wrapped__, wrappers + 1  # custom_fwd, torch.compile
    module = module or key.partition(":")[0]
    plain = isinstance(function, FunctionType) and set(function.__code__.co_freevars) <= {"__class__"}
    if not plain or _module(function) != module or hasattr(function, "__wrapped__"):
        return Form(key, f"{where(function)} stands in its place")
    known = _forms.get((key, function.__code__))
    if known is None or known.strange:
        known = _forms[key, function.__code__] = _read(key, function)
    if known.strange:
        return known
    node = _tree(function)
    if not _has_defaults(function, node.args):
        return Form(key, "its defaults were changed")
    if wrappers > sum(getattr(d, "id", "") != "staticmethod" for d in node.decorator_list):
        return Form(key, "it is wrapped by torch's functions")
    return known


def _read(key: str, function: FunctionType) -> Form:
    try:
        node = _tree(function)
    except (OSError, TypeError, SyntaxError, IndexError):
        return Form(key, f"its source cannot be read ({function.__code__.co_filename})")
    return Form(key, "", digest(node), frozenset(read_names(node)))


_trees: dict[CodeType, ast.FunctionDef] = {}


def _tree(function: FunctionType) -> ast.FunctionDef:
    code = function.__code__
    if code not in _trees:
        if code.co_filename.startswith("<"):  # for which inspect shows the module's lines
            raise OSError("not from a file")
        source = inspect.getsource(function)
        node = ast.parse(f"if 1:\n{source}" if source[0].isspace() else source).body[0]
        node = node.body[0] if isinstance(node, ast.If) else node
        if not isinstance(node, ast.FunctionDef):
            raise SyntaxError("no function")
        _trees[code] = node
    return _trees[code]


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
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


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


def unknown(
    keys: Iterable[str], trusted: frozenset[str], stock: Callable[[str], Any] = running
) -> list[Form]:
    """The functions that run without a known form.

    Args:
        trusted: digests that the user vouches for.
        stock: finds the function of a key, under what this package has put in its place.
    """
    found = [form_of(key, function) for key in keys if (function := stock(key)) is not None]
    return [form for form in found if form.strange or not is_known(form, trusted)]


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
