"""One rule for Megatron's code: the head stands in for functions that this package knows, and for no others.

:data:`LOOKED_AT` lists the functions by which Megatron computes a head's loss, each by the name that its
caller reads. A name must hold the function that Megatron's own module defines, in a form that
``known_forms.tsv`` has. Anything else is another loss, which must not be replaced in silence.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import is_
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

_CORE = "megatron.core."
LANGUAGE_MODULE = f"{_CORE}models.common.language_module.language_module"
RL = "megatron.rl.rl_utils"
_PARALLEL = f"{_CORE}tensor_parallel"
_CROSS_ENTROPY = f"{_PARALLEL}.cross_entropy"
_LAYERS = f"{_PARALLEL}.layers"
_MAPPINGS = f"{_PARALLEL}.mappings"
_PARTS = f"{_PARALLEL}.utils"
_NATIVE = f"{_CORE}fusions.fused_cross_entropy"
_TE = f"{_CORE}extensions.transformer_engine"
LINEAR = f"{_CORE}transformer.linear_cross_entropy"
_OF_LINEAR = f"{_CORE}fusions.fused_linear_cross_entropy"
_STATE = f"{_CORE}parallel_state"
_UTILS = f"{_CORE}utils"
_TE_LOSS = "transformer_engine.pytorch.cross_entropy"
_APEX = "fused_weight_gradient_mlp_cuda"

#: What a call of an autograd function runs.
_STEPS = "apply forward backward"
_VOCAB_PARALLEL = (
    "calculate_logits_max calculate_predicted_logits calculate_cross_entropy_loss "
    "prepare_gradient_calculation_operands calculate_gradients"
)


class Row(NamedTuple):
    """Names that one module reads and another defines."""

    #: in which loss they are: that of :func:`kind_of`, "log_softmax", or "any"
    of: str
    read_in: str
    defined_in: str
    #: of which they are attributes; empty for the module's own
    cls: str
    names: str


LOOKED_AT = (
    Row("any", LANGUAGE_MODULE, LANGUAGE_MODULE, "LanguageModule", "compute_language_model_loss"),
    Row("any", LANGUAGE_MODULE, "torch", "", "torch"),
    Row("any", _LAYERS, _LAYERS, "ColumnParallelLinear", "forward _forward_impl"),
    Row("any", _LAYERS, _LAYERS, "LinearWithFrozenWeight", _STEPS),
    Row("any", _LAYERS, _LAYERS, "LinearWithGradAccumulationAndAsyncCommunication", _STEPS),
    Row(
        "any", _LAYERS, _LAYERS, "",
        "linear_with_grad_accumulation_and_async_allreduce linear_with_frozen_weight _linear_forward "
        "_wgrad_gemm "
        # in miles' Megatron
        "_linear_forward_with_optional_batch_invariant_matmul _linear_dgrad_matmul "
        "_should_allreduce_dgrad_in_fp32 _should_compute_dgrad_in_fp32",
    ),
    Row(
        "any", _LAYERS, _MAPPINGS, "",
        "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region",
    ),
    Row("any", _LAYERS, _UTILS, "", "prepare_input_tensors_for_wgrad_compute"),
    Row("any", _LAYERS, _UTILS, "", "get_tensor_model_parallel_group_if_none"),
    Row("any", _LAYERS, _STATE, "", "get_global_memory_buffer"),
    Row("any", _LAYERS, "torch", "", "torch dist_all_gather_func dist_reduce_scatter_func"),
    Row("any", _LAYERS, _APEX, "", _APEX),
    Row(
        "any", LINEAR, LINEAR, "LinearCrossEntropyModule",
        "forward _compute_linear_and_cross_entropy_loss",
    ),
    Row("any", LINEAR, _OF_LINEAR, "", "linear_cross_entropy"),
    Row("any", _OF_LINEAR, _OF_LINEAR, "LinearCrossEntropy", _STEPS),
    Row("any", _TE, _TE, "", "te_general_gemm"),
    Row("any", _MAPPINGS, _MAPPINGS, "_CopyToModelParallelRegion", _STEPS),
    Row("any", _MAPPINGS, _MAPPINGS, "_GatherFromModelParallelRegion", _STEPS),
    Row("any", _MAPPINGS, _MAPPINGS, "_GatherFromSequenceParallelRegion", _STEPS),
    Row(
        "any", _MAPPINGS, _MAPPINGS, "",
        "_reduce _split_along_first_dim _split_along_last_dim _gather_along_first_dim "
        "_gather_along_last_dim _reduce_scatter_along_first_dim",
    ),
    Row("any", _MAPPINGS, _PARTS, "", "split_tensor_along_last_dim"),
    Row("any", _MAPPINGS, _UTILS, "", "get_tensor_model_parallel_group_if_none"),
    Row("any", _MAPPINGS, _STATE, "", "get_global_memory_buffer"),
    Row("any", _MAPPINGS, "torch", "", "torch dist_all_gather_func dist_reduce_scatter_func"),
    Row("any", _PARTS, _UTILS, "", "divide"),
    Row("", LANGUAGE_MODULE, _PARALLEL, "", "tensor_parallel"),
    Row("", _PARALLEL, _CROSS_ENTROPY, "", "vocab_parallel_cross_entropy"),
    Row("", _CROSS_ENTROPY, _CROSS_ENTROPY, "_VocabParallelCrossEntropy", _STEPS),
    Row("", _CROSS_ENTROPY, _CROSS_ENTROPY, "VocabParallelCrossEntropy", _VOCAB_PARALLEL),
    Row("", _CROSS_ENTROPY, _PARTS, "VocabUtility", "vocab_range_from_per_partition_vocab_size"),
    Row("", _CROSS_ENTROPY, _UTILS, "", "get_pg_rank get_pg_size"),
    Row("", _CROSS_ENTROPY, _STATE, "", "get_tensor_model_parallel_group get_tensor_model_parallel_rank"),
    Row("", _CROSS_ENTROPY, _STATE, "", "get_tensor_model_parallel_world_size"),
    Row("", _CROSS_ENTROPY, "torch", "", "torch"),
    Row("native", LANGUAGE_MODULE, _NATIVE, "", "fused_vocab_parallel_cross_entropy"),
    Row("native", _NATIVE, _NATIVE, "_VocabParallelCrossEntropy", _STEPS),
    Row(
        "native", _NATIVE, _NATIVE, "",
        "calculate_logits_max calculate_predicted_logits calculate_cross_entropy_loss calculate_gradients",
    ),
    Row("native", _NATIVE, _CROSS_ENTROPY, "VocabParallelCrossEntropy", _VOCAB_PARALLEL),
    Row("native", _NATIVE, _PARTS, "VocabUtility", "vocab_range_from_per_partition_vocab_size"),
    Row("native", _CROSS_ENTROPY, "torch", "", "torch"),
    Row("native", _NATIVE, "torch", "", "torch"),
    Row("te", LANGUAGE_MODULE, _TE, "", "te_parallel_cross_entropy"),
    Row("te", _TE, _TE_LOSS, "", "parallel_cross_entropy"),
    Row("log_softmax", RL, RL, "", "selective_log_softmax"),
    Row("log_softmax", RL, "torch", "", "torch"),
)  # fmt: skip


#: Written by scripts/dev/known_forms.py from Megatron's history.
FILE = Path(__file__).with_name("known_forms.tsv")
#: Module and a function that it defines -> digests of its forms.
FORMS = {
    (module, name): made.split()
    for module, name, made in (line.split("\t") for line in FILE.read_text().splitlines()[1:])
}


def kind_of(config: Any) -> str:
    """Megatron's loss for this config: native, te, or empty for the one that is not fused."""
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    return str(getattr(config, "cross_entropy_fusion_impl", "native")) if fused else ""


def of_layer(name: str) -> Any:
    """What a name of ``ColumnParallelLinear`` holds."""
    return getattr(sys.modules[_LAYERS].ColumnParallelLinear, name)


def is_defined_in(module: ModuleType, found: Any) -> bool:
    """Whether it is a function of a module's own, edited perhaps, with nothing around it."""
    return type(found) is FunctionType and found.__globals__.get("__name__") == module.__name__


def is_megatrons(found: Any) -> bool:
    """Whether a function, or a method's, is written in Megatron's core, with nothing around it."""
    function = function_of(found)
    return function is not None and str(function.__globals__.get("__name__", "")).startswith(_CORE)


def function_of(found: Any) -> FunctionType | None:
    """The function of a method; None of anything else, as a proxy that passes on another's attributes."""
    found = found.__func__ if type(found) is MethodType else found
    return found if type(found) is FunctionType else None


def name_of(function: Any) -> str:
    """The name of a function for the log, with what is wrapped around it."""
    function = getattr(function, "func", function)
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):
        own = f"{function.__globals__.get('__name__')}.{function.__code__.co_name}"
        return f"{own} around {name_of(function.__wrapped__)}"
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


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


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods of a module, within ``if`` and ``try`` too, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from definitions(child, prefix)


# --- what a name holds -----------------------------------------------------------------------------

#: Functions that Megatron's decorators put around others: their module, name and decorator.
_AROUND = (
    ("torch.amp.autocast_mode", "decorate_fwd", "custom_fwd"),
    ("torch.amp.autocast_mode", "decorate_bwd", "custom_bwd"),
    ("torch._dynamo.eval_frame", "", "jit_fuser"),
    (f"{__package__}.", "", ""),  # this package's patch
)


def _seen_through(found: Any) -> tuple[Any, list[str]]:
    """The function under this package's patch and Megatron's decorators, and those decorators."""
    decorators: list[str] = []
    while type(found) is FunctionType:
        module, inner = str(found.__globals__.get("__name__")), getattr(found, "__wrapped__", None)
        around = [
            decorator
            for of, name, decorator in _AROUND
            if module.startswith(of) and found.__code__.co_name.startswith(name)
        ]
        if not around or not any(cell.cell_contents is inner for cell in found.__closure__ or ()):
            break
        found, decorators = inner, decorators + around
    return found, [decorator for decorator in decorators if decorator]


@lru_cache(maxsize=64)
def _file(name: str) -> tuple[list[tuple[str, ast.FunctionDef]], list[CodeType]]:
    """Definitions in a file, and every code that is compiled of it."""
    with tokenize.open(name) as file:
        text = file.read()
    compiled = [compile(text, name, "exec", dont_inherit=True)]
    for each in compiled:  # which grows
        compiled += [part for part in each.co_consts if isinstance(part, CodeType)]
    return list(definitions(ast.parse(text))), compiled


@lru_cache(maxsize=1024)
def _written(file: str, code: CodeType) -> tuple[str, ast.FunctionDef] | None:
    """Qualified name and definition of a code; None where its file cannot be read, or says something else."""
    try:
        of_file, compiled = _file(file)
    except (OSError, SyntaxError, ValueError):
        return None
    for name, node in of_file if code in compiled else ():
        first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            return name, node
    return None


def _has_defaults(function: FunctionType, written: ast.arguments) -> bool:
    positional = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    pairs = list(zip(written.defaults, positional, strict=False))
    for arg, node in zip(written.kwonlyargs, written.kw_defaults, strict=True):
        if node is not None:
            pairs.append((node, named.get(arg.arg)))
    return len(written.defaults) == len(positional) and all(
        not isinstance(node, ast.Constant) or (type(value) is type(node.value) and value == node.value)
        for node, value in pairs
    )


def _source_of(found: Any, defined_in: str, name: str) -> tuple[str, bool]:
    """A function's digest, empty where its source says not all; whether the module defines it so named."""
    function, decorators = _seen_through(found)
    written = None
    if type(function) is FunctionType and set(function.__code__.co_freevars) <= {"__class__"}:
        written = _written(function.__code__.co_filename, function.__code__)
    if written is None or not _has_defaults(function, written[1].args):
        return "", False
    rest = iter([getattr(decorator, "id", "") for decorator in written[1].decorator_list])
    if not all(decorator in rest for decorator in decorators):
        return "", False
    module = sys.modules.get(defined_in, sys)
    own = function.__globals__ is vars(module) and function.__code__.co_filename == module.__file__
    return digest(written[1]), own and written[0] == name


def is_own(found: Any, defined_in: str, name: str, known: bool = False) -> bool:
    """Whether a function is that of this name in this module, perhaps edited; ``known``: in a known form."""
    made, own = _source_of(found, defined_in, name)
    return own and (not known or made in FORMS.get((defined_in, name), ()))


def _is_torchs_apply(found: Any, cls: Any) -> bool:
    """Whether it is how torch calls ``cls``, a class of autograd functions."""
    torchs = sys.modules["torch"].autograd.Function.apply
    return type(found) is MethodType and found.__func__ is torchs.__func__ and found.__self__ is cls


def _is_of_library(found: Any, owner: Any, name: str, defined_in: str) -> bool:
    """The same of what no module of Megatron's defines."""
    if type(found) is ModuleType:
        return found is sys.modules.get(defined_in)
    if name.endswith(".apply"):
        return _is_torchs_apply(found, owner)
    if defined_in == _TE_LOSS:
        if type(found) is not MethodType:
            return _source_of(found, _TE_LOSS, name)[1]
        cls, steps = found.__self__, ("forward", "backward")
        return _is_torchs_apply(found, cls) and all(
            _source_of(getattr(cls, step), _TE_LOSS, f"CrossEntropyFunction.{step}")[1] for step in steps
        )
    # A collective. torch may have a decorator of another library around one that it renames.
    module = found.__globals__.get("__name__") if type(found) is FunctionType else ""
    collectives = vars(sys.modules["torch.distributed"]).values()
    return str(module).startswith("torch.distributed.") or any(found is each for each in collectives)


def where(found: Any) -> str:
    """The name of a function and its file; of anything else the class."""
    function = found.__func__ if type(found) in (MethodType, staticmethod, classmethod) else found
    if type(function) is FunctionType:
        module, code = function.__globals__.get("__name__"), function.__code__
        return f"{module}.{function.__qualname__} ({code.co_filename})"
    kind = function if isinstance(function, type) else type(function)
    return f"{'' if kind is function else 'an object of '}{kind.__module__}.{kind.__qualname__}"


class Held:
    """What the looked-at names hold: whether all of it is known, and later whether they hold it still."""

    def __init__(self, of: str, trusted: frozenset[str]) -> None:
        """``of``: as :class:`Row` has it. ``trusted``: digests that the user vouches for."""
        self.of, self._trusted = of, trusted
        self.digests: list[str] = []
        self._unknown: dict[str, str] = {}  # in words -> digest
        self._places: dict[str, tuple[Callable[[str], Any], str]] = {}
        self._functions: list[FunctionType] = []
        for row in LOOKED_AT:
            if row.of == of or (row.of == "any" and of != "log_softmax"):
                for name in row.names.split():
                    self._look(row, name)
        self._before = self._now()

    def __deepcopy__(self, memo: Any) -> Held:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (self.of, self._trusted)  # of the process that unpickles a model

    def _look(self, row: Row, name: str) -> None:
        found: Any = sys.modules.get(row.read_in)
        owner, place = found, row.read_in
        for part in filter(None, (row.cls, name)):
            owner = found
            if not issubclass(type(owner), (type, ModuleType)):
                break
            place = f"{place}.{part}"
            self._places[place] = vars(owner).get, part
            found = getattr(owner, part, None)
        if found is None:  # this version has none
            return
        name = f"{row.cls}.{name}" if row.cls else name
        is_library = not row.defined_in.startswith("megatron.") or name.endswith(".apply")
        if is_library or type(found) is ModuleType:
            made, is_known = "", _is_of_library(found, owner, name, row.defined_in)
        else:
            made, own = _source_of(found, row.defined_in, name)
            is_known = own and made in FORMS.get((row.defined_in, name), ())
        self.digests.append(made)
        function = _seen_through(found)[0]
        if not is_known and made not in self._trusted:
            self._unknown[f"{place} is {where(function)}" + (f", digest {made}" if made else "")] = made
        if type(function) is FunctionType:
            self._functions.append(function)

    @property
    def why_unknown(self) -> str:
        """Why the head must not stand in for what the names hold; empty if it may."""
        if not self._unknown:
            return ""
        words = "; ".join(self._unknown) + ": this package does not know it as Megatron's own"
        digests = dict.fromkeys(self._unknown.values())
        if all(digests):
            return f"{words}. --fused-ce-trust {' '.join(digests)} lets the fused head stand in for it"
        return f"{words}. Remove it to have the head fused"

    def _now(self) -> list[Any]:
        functions = self._functions
        of_functions: list[Any] = [function.__code__ for function in functions]
        of_functions += [function.__defaults__ for function in functions]
        return [get(name) for get, name in self._places.values()] + of_functions

    def changed(self) -> str:
        """What was replaced or edited since, empty if nothing was.

        Asked at every call of a head. By identity: an object may say that it is equal.
        """
        now = self._now()
        if all(map(is_, now, self._before)):
            return ""
        index = next(i for i, found in enumerate(now) if found is not self._before[i])
        names = [*self._places, *map(where, self._functions), *map(where, self._functions)]
        found = f" (now {where(now[index])})" if index < len(self._places) else ""
        return f"{names[index]} was replaced or edited after the model was built{found}"
