"""A loss that the package does not know: as without the flag, or on Megatron's own path and said so."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import megatron, rl_utils
from tests.support.megatron import INSTALLED, NEWEST, VOCAB, Model, build, flag, have_groups, of_core
from tests.support.ranks import Rank, on_ranks
from tests.support.seams import GPT, LATER, UNKNOWN, Row, Step, off_against_on, step_of

CORES = [of_core(2, NEWEST), of_core(2, INSTALLED)]
#: A model whose head stays, for what the log says.
unknown = functools.partial(Row, fused=0, adopted=False, families=GPT, bound=0.0)


# --- a loss in the model's place --------------------------------------------------------------------


def z_loss(stock: Any) -> Any:
    def own_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        z = logits.clone().float().logsumexp(-1).t()
        return stock(self, labels, logits) + 1e-2 * z * z

    return own_loss


def edited(stack: contextlib.ExitStack, line: str, more: str, stock: Any) -> Any:
    """A function of Megatron's, from a copy of its file with more behind a line."""
    module = sys.modules[stock.__module__]
    source = Path(module.__file__).read_text()
    assert source.count(f"        {line}\n") == 1
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    file = Path(folder, f"edited{torch.distributed.get_rank()}.py")
    file.write_text(source.replace(f"        {line}\n", f"        {line}\n        {more}\n"))
    found: Any = megatron.imported(file, f"{module.__package__}.{file.stem}")
    for part in stock.__qualname__.split("."):
        found = getattr(found, part)
    return types.FunctionType(found.__code__, vars(module), None, found.__defaults__)


def before_enable(stack: contextlib.ExitStack, loss: Any = lambda stock: stock, early: bool = True) -> None:
    """Megatron's class as imported, with ``loss(stock)`` in it: patched when the flag is turned on next, or,
    not ``early``, after that."""
    from megatron_fused_ce.adapter import forms, import_hook

    with flag():
        module = sys.modules[forms.LANGUAGE_MODULE]
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for name in ("setup_embeddings_and_output_layer", "compute_language_model_loss"):
        found = vars(module.LanguageModule)[name]
        patch.setattr(module.LanguageModule, name, getattr(found, "__wrapped__", found))
    patch.delattr(module, import_hook._MARK)
    stock = module.LanguageModule.compute_language_model_loss
    with contextlib.nullcontext() if early else flag():
        patch.setattr(module.LanguageModule, "compute_language_model_loss", loss(stock))


def a_forks_source(stack: contextlib.ExitStack) -> None:
    line, more = "loss = loss.transpose(0, 1).contiguous()", "loss = loss * 1.01"
    before_enable(stack, functools.partial(edited, stack, line, more))


def newer_megatron(stack: contextlib.ExitStack) -> None:
    from megatron_fused_ce.adapter import forms

    stack.enter_context(pytest.MonkeyPatch.context()).delitem(forms.FORMS, (LAYERS, FORWARD))


#: What the log says of a loss of the user's own.
OWN = ("has a loss of its own", "own_loss", "remove it to have", "has no effect on this head")
LAYERS, FORWARD = "megatron.core.tensor_parallel.layers", "ColumnParallelLinear.forward"
MODELS = {
    "a user's loss before enable()": unknown(OWN, before=lambda stack: before_enable(stack, z_loss)),
    "a user's loss after enable()": unknown(OWN, before=lambda stack: before_enable(stack, z_loss, False)),
    # The ranks compare what they have when a model is built.
    "a user's loss on one rank": unknown(
        ("not the same code on all ranks",),
        before=lambda stack: before_enable(
            stack, lambda stock: (lambda *given: stock(*given)) if torch.distributed.get_rank() else stock
        ),
    ),
    "a fork's source": unknown(
        ("edited0.py), digest ", f"{UNKNOWN}. --fused-ce-trust"), before=a_forks_source
    ),
    "a newer Megatron": unknown((f"{LAYERS}.{FORWARD} (", "layers.py), digest "), before=newer_megatron),
}


@on_ranks(*CORES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model(rank: Rank, name):
    """Megatron's own path, which says what to do; done, it is fused, and an edit is gone."""
    row = MODELS[name]
    stock, said = off_against_on(row, rank)
    if name not in ("a fork's source", "a newer Megatron"):
        return
    digest = [said.split("--fused-ce-trust ")[1].split()[0] if not rank.rank else None]
    torch.distributed.broadcast_object_list(digest, src=0)
    for trust, fused in ((["0" * 16], 0), (digest, 1)):
        made, seen = step_of(replace(row, trust=lambda trust=trust: trust), rank, True)
        assert seen.counts == (fused, 0, 0), seen.said
    if name == "a fork's source":
        assert (made["loss"] - stock["loss"]).abs() > 1e-3
    else:
        megatron.assert_same(made, step_of(Row(), rank, True)[0], 0.0)


# --- stand-ins, wherever the loss reads them --------------------------------------------------------


def doubled(stock: Any) -> Any:
    def twice(*given: Any, **named: Any) -> Any:
        made = stock(*given, **named)
        return tuple(2 * part for part in made) if isinstance(made, tuple) else 2 * made

    return twice


class Equal(types.ModuleType):
    """Equal to the module that it stands in for, as those of wrapt."""

    def __eq__(self, other: object) -> bool:
        return other is torch

    def __hash__(self) -> int:
        return hash(torch)


def of_torch(stock: Any) -> Any:
    """The module with one function replaced."""
    made: Any = Equal("torch")
    vars(made).update(vars(stock) | {"log": doubled(stock.log)})
    return made


def of_a_fork(stock: Any) -> Any:
    """A function of a module that has a name of Megatron's."""
    module: Any = types.ModuleType(f"{PARALLEL}.own_cross_entropy")
    sys.modules[module.__name__], module.stock = module, stock
    exec("def loss(*given, **named): return 2 * stock(*given, **named)", vars(module))  # noqa: S102
    return module.loss


def at_its_place(stock: Any) -> Any:
    """A step with the file, the line and the names of Megatron's, and another body."""
    code, made = stock.__code__, {}
    lines = [
        "def calculate_cross_entropy_loss(exp_logits, predicted_logits, sum_exp_logits):",
        "    loss = 2 * (sum_exp_logits.log() - predicted_logits)",
        "    return exp_logits.div_(sum_exp_logits.unsqueeze(dim=-1)), loss",
    ]
    text = "\n" * (code.co_firstlineno - 1) + "\n".join(lines)
    exec(compile(text, code.co_filename, "exec"), stock.__globals__, made)  # noqa: S102
    return made["calculate_cross_entropy_loss"]


class Summed(torch.autograd.Function):
    """A loss without labels."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *others: Any) -> torch.Tensor:
        ctx.shape, ctx.others = logits.shape, len(others)
        return logits.float().logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (0.25 * grad[..., None].expand(ctx.shape), *[None] * ctx.others)


def of_torchs(stock: Any) -> Any:
    """torch's wrapper of a user's function, which says that it wraps Megatron's."""
    made = torch.amp.custom_fwd(doubled(stock.__wrapped__), device_type="cuda")
    made.__wrapped__ = stock.__wrapped__
    return made


def doubled_heads(call: Any) -> Any:
    def __call__(self: Any, *given: Any, **named: Any) -> Any:
        made = call(self, *given, **named)
        return (2 * made[0], *made[1:]) if type(self).__name__ == "ColumnParallelLinear" else made

    return __call__


LANGUAGE = "megatron.core.models.common.language_module.language_module"
PARALLEL, NATIVE = "megatron.core.tensor_parallel", "megatron.core.fusions.fused_cross_entropy"
LOSS, PARTS = f"{PARALLEL}:vocab_parallel_cross_entropy", f"{PARALLEL}.cross_entropy"
FUNCTION, STEP = f"{PARTS}:_VocabParallelCrossEntropy", f"{PARTS}:VocabParallelCrossEntropy"
PRODUCT = f"{LAYERS}:linear_with_grad_accumulation_and_async_allreduce"
NATIVES = f"{LANGUAGE}:fused_vocab_parallel_cross_entropy"
#: Where users put something, what they make of Megatron's, and when it is called: with which loss, number
#: of ranks (both for 0).
STAND_INS: dict[str, Any] = {
    "a partial": (LOSS, lambda stock: functools.partial(stock, label_smoothing=0.1)),
    "copy: a partial": (
        f"{LAYERS}:copy_to_tensor_model_parallel_region", lambda stock: functools.partial(doubled(stock)),
        {"ranks": 1},
    ),
    "native": (NATIVES, doubled, {"kind": "native"}),
    "native: a step": (f"{NATIVE}:calculate_logits_max", doubled, {"kind": "native"}),
    "a decorator": (LOSS, lambda stock: functools.wraps(stock)(doubled(stock))),
    "torch's decorator": (LOSS, lambda stock: torch.enable_grad()(doubled(stock))),
    "a builtin of a group": (f"{PARTS}:get_pg_rank", lambda _: id),
    "a class": (LOSS, lambda stock: type("Loss", (), {"__new__": lambda _, *x, **y: 2 * stock(*x, **y)})),
    "torch": (f"{PARTS}:torch", of_torch),
    "a fork's file": (LOSS, of_a_fork),
    "code at its place": (f"{STEP}.calculate_cross_entropy_loss", at_its_place),
    "apply of Megatron's": (f"{FUNCTION}.apply", doubled),
    "another's apply": (f"{FUNCTION}.apply", lambda _: Summed.apply),
    "a backward": (f"{FUNCTION}.backward", lambda stock: lambda ctx, grad: stock(ctx, 2 * grad)),
    "defaults": (f"{PARTS}:vocab_parallel_cross_entropy.__defaults__", lambda stock: (0.3, *stock[1:])),
    "an edited step": (
        f"{STEP}.calculate_cross_entropy_loss",
        ("loss = torch.log(sum_exp_logits) - predicted_logits", "loss *= 1.5"),
    ),
    "the ranges": (
        f"{PARALLEL}.utils:VocabUtility.vocab_range_from_per_partition_vocab_size",
        lambda _: lambda size, rank, ranks: (3 + rank * size, 3 + (rank + 1) * size),
        {"ranks": 1},
    ),
    "torch's call": ("torch.nn:Module.__call__", doubled_heads),
    "another product": (PRODUCT, lambda stock: sys.modules[LAYERS].linear_with_frozen_weight),
    "the product's forward": (
        f"{LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.forward", of_torchs
    ),
    "below the layer": (f"{PARALLEL}.mappings:_reduce", doubled, {"ranks": 1}),
    "below the product": (f"{LAYERS}:prepare_input_tensors_for_wgrad_compute", doubled),
    "a collective": (
        f"{LAYERS}:dist_all_gather_func", lambda stock: lambda made, x, **named: stock(made, 2 * x, **named),
        {"ranks": 2},
    ),
}  # fmt: skip


def put(place: str, make: Any, stack: contextlib.ExitStack) -> None:
    """What ``make`` makes of Megatron's, or a line and what is written behind it."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, attribute = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    stock = getattr(owner, attribute, None)
    if stock is None:
        pytest.skip("not in this version")
    made = edited(stack, *make, stock) if isinstance(make, tuple) else make(stock)
    if isinstance(owner, type) and not issubclass(owner, torch.nn.Module):
        made = staticmethod(made)
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(owner, attribute, made, raising=False)


@on_ranks(of_core(1, NEWEST), of_core(2, INSTALLED))
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in(rank: Rank, name):
    """Put in place before the model is built, after it is built, and after a step."""
    place, make, when = (*STAND_INS[name], {})[:3]
    if when.get("ranks", rank.size) != rank.size:
        pytest.skip("not called so")
    before, kind = functools.partial(put, place, make), when.get("kind", "")
    fusion = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": kind}
    model = {"sequence_parallel": name == "a collective", "extra": fusion if kind else {}}

    def later(step: Step) -> torch.Tensor:
        for there in (True, False, True):
            with contextlib.ExitStack() as stack:
                if there:
                    before(stack)
                loss = step.masked(step())
                if there:
                    loss.backward()
        return loss.detach().requires_grad_()

    of_call = name == "torch's call"  # which a model is not asked about when it is built
    words = "calls the output layer in torch's place" if of_call else ""
    row = unknown((words or UNKNOWN,), before=before, model=model, stock=int(of_call), adopted=of_call)
    made, _ = off_against_on(row, rank)
    plain, _ = step_of(Row(model=model), rank, False)
    assert plain.keys() != made.keys() or any((plain[key] - made[key]).any() for key in made)
    row = Row((words or LATER,), use=later, stock=2, model=model, families=GPT, bound=0.0)
    off_against_on(row, rank)


# --- forms that the table has not -------------------------------------------------------------------


#: As Transformer Engine defines it.
TE_LOSS = """
import torch

class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, smoothing, reduces, group, ignored=-100, capturable=False):
        ctx.save_for_backward(logits, labels)
        return logits.float().logsumexp(-1) - logits.float().gather(-1, labels[..., None])[..., 0]

    @staticmethod
    def backward(ctx, grad):
        logits, labels = ctx.saved_tensors
        made = logits.float().softmax(-1) - torch.nn.functional.one_hot(labels, logits.shape[-1])
        return (made * grad[..., None], *[None] * 6)

def parallel_cross_entropy(*given):
    return CrossEntropyFunction.apply(*given)
"""


def transformer_engines(name: str, stack: contextlib.ExitStack) -> None:
    from megatron.core.extensions import transformer_engine as extension

    file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "cross_entropy.py")
    file.write_text(TE_LOSS)
    te = megatron.imported(file, "transformer_engine.pytorch.cross_entropy")
    text = Path(extension.__file__).read_text()
    wrapper = next(
        part for part in compile(text, extension.__file__, "exec", dont_inherit=True).co_consts
        if getattr(part, "co_name", "") == "te_parallel_cross_entropy"
    )  # fmt: skip
    loss = {"another's apply": Summed.apply, "a function": te.parallel_cross_entropy}
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setitem(sys.modules, te.__name__, te)
    patch.setattr(extension, "_TE_SUPPORTS_CG_CAPTURABLE", True, raising=False)
    given = loss.get(name, te.CrossEntropyFunction.apply)
    patch.setattr(extension, "parallel_cross_entropy", given, raising=False)
    made = types.FunctionType(wrapper, vars(extension), argdefs=(False,))
    patch.setattr(sys.modules[LANGUAGE], "te_parallel_cross_entropy", made)
    if name == "an edited step":
        backward = lambda ctx, grad: (grad[..., None].expand(*grad.shape, VOCAB), *[None] * 6)  # noqa: E731
        patch.setattr(te.CrossEntropyFunction, "backward", staticmethod(backward))


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize("name", ["a function", "another's apply", "an edited step"])
def test_the_loss_of_transformer_engine(rank: Rank, name):
    """Megatron's wrapper calls what transformer_engine.pytorch.cross_entropy defines, or the head stays."""
    fusion = {"extra": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}}
    given = {"before": functools.partial(transformer_engines, name), "model": fusion, "families": GPT}
    row = Row(**given) if name == "a function" else unknown(
        ("transformer_engine.parallel_cross_entropy is",), **given
    )  # fmt: skip
    off_against_on(row, rank)


@on_ranks(*CORES)
@pytest.mark.parametrize("place", ["before enable()", "later", "a form that is not known"])
def test_a_log_softmax_that_is_not_known(rank: Rank, place):
    """``selective_log_softmax`` of train_rl.py: it gets real logits."""
    have_groups(rank.size)
    tokens, positions = megatron.draw(rank).ids, megatron.positions_and_mask(rank)[0]
    stock = rl_utils.selective_log_softmax

    def warmer(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return stock(logits / 2.0, index)

    own = place != "a form that is not known"
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr(rl_utils, "selective_log_softmax", warmer)
        off = rl_utils.get_logprobs(build(Model(), rank), tokens, positions)
    patched = rl_utils.patched_caller(own, warmer if place == "before enable()" else None)
    with flag() as seen, patched, pytest.MonkeyPatch.context() as patch:
        model = build(Model(), rank)
        if place == "later":
            rl_utils.get_logprobs(model, tokens, positions)
            patch.setattr(rl_utils, "selective_log_softmax", warmer)
        on = rl_utils.get_logprobs(model, tokens, positions)
    assert seen.counts == (place == "later", 0, 1)
    assert torch.equal(on, off)
    words = "warmer" if own else "--fused-ce-trust"
    assert rank.rank or words in seen.said, seen.said
