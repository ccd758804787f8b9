"""A loss that the package does not know: as without the flag, or on Megatron's own path and said so."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import megatron, rl_utils
from tests.support.known_forms import table_until
from tests.support.megatron import INSTALLED, NEWEST, Model, build, core_version, flag, have_groups, of_core
from tests.support.ranks import Rank, on_ranks

CORES = [of_core(2, NEWEST), of_core(2, INSTALLED)]
#: What losses of users do before Megatron's loss ``[b, s]``, and after it.
LOSSES = {
    "z-loss": ("z = logits.clone().float().logsumexp(-1).t()", "loss = loss + 1e-2 * z * z"),
    "only logs": ("", "self.__dict__.setdefault('logged', []).append(loss.detach())"),
    "an autograd function": (
        """class Halved(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 0.5

            @staticmethod
            def backward(ctx, grad):
                return grad * 0.25

        logits = Halved.apply(logits)""",
        "",
    ),
}
OWN = """
import torch

def holder(stock):
    def compute_language_model_loss(self, labels, logits):
        {before}
        loss = stock(self, labels, logits)
        {after}
        return loss
    return compute_language_model_loss
"""


def own_folder(rank: Rank, shared: Path) -> Path:
    folder = shared / str(rank.rank)
    folder.mkdir()
    return folder


def own_loss(name: str, stock: Any, folder: Path) -> Any:
    """A function of a user's own file."""
    before, after = LOSSES[name]
    file = folder / "own_loss.py"
    file.write_text(OWN.format(before=before, after=after))
    return imported(file).holder(stock)


def imported(file: Path, package: str = "") -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"{package}{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def edited(before: str, after: str, folder: Path) -> Any:
    """Megatron's, with an edit in a copy of its own file."""
    from megatron_fused_ce.adapter import forms

    lines = {
        "labels = labels.transpose(0, 1).contiguous()": before,
        "loss = loss.transpose(0, 1).contiguous()": after,
    }
    return edited_in(forms.LANGUAGE_MODULE, "LanguageModule.compute_language_model_loss", lines, folder)


def edited_in(name: str, function: str, lines: dict[str, str], folder: Path) -> Any:
    """A method of a module of Megatron's, from a copy of its file with more behind some lines."""
    module = sys.modules[name]
    source = Path(module.__file__).read_text()
    for line, more in lines.items():
        assert source.count(f"        {line}\n") == 1
        source = source.replace(f"        {line}\n", f"        {line}\n        {more or 'pass'}\n")
    file = folder / "edited.py"
    file.write_text(source)
    found: Any = imported(file, f"{module.__package__}.")
    for part in function.split("."):
        found = getattr(found, part)
    return types.FunctionType(found.__code__, vars(module), None, found.__defaults__)


@contextlib.contextmanager
def before_enable(loss: Any = None) -> Iterator[Any]:
    """Megatron's class as imported, with ``loss(stock)`` in it; patched when the flag is turned on next."""
    import megatron_fused_ce
    from megatron_fused_ce.adapter import forms, import_hook

    megatron_fused_ce.enable()
    megatron_fused_ce.disable()
    module = sys.modules[forms.LANGUAGE_MODULE]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("setup_embeddings_and_output_layer", "compute_language_model_loss"):
            found = vars(module.LanguageModule)[name]
            patch.setattr(module.LanguageModule, name, getattr(found, "__wrapped__", found))
        patch.delattr(module, import_hook._MARK)
        stock = module.LanguageModule.compute_language_model_loss
        if loss is not None:
            patch.setattr(module.LanguageModule, "compute_language_model_loss", loss(stock))
        yield stock


def step(rank: Rank, built: Any) -> dict[str, torch.Tensor]:
    """The loss of one micro-batch, and every gradient."""
    batch = megatron.draw(rank)
    losses = megatron.losses_of(built, batch, rank)
    loss = (losses * batch.mask).sum() / batch.mask.sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def run(
    rank: Rank, on: bool, change: Any = None, model: Model | None = None, trust: Any = ()
) -> tuple[Any, Any, str]:
    """What a step leaves of a model that ``change`` is done to, the counters, and what was said."""
    with flag(strategy="store", num_chunks=3, trust=trust) if on else contextlib.nullcontext() as seen:
        built = build(model or Model(), rank)
        if change is not None:
            change(built)
        made = step(rank, built)
    return made, seen and seen.counts[:2], seen and seen.said


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 0.0) -> None:
    assert got.keys() == expected.keys() and len(got) > 5
    for name, value in expected.items():
        error = (got[name] - value).double().norm()
        assert error <= bound * value.double().norm(), f"{name}: {error}"


@on_ranks(*CORES)
@pytest.mark.parametrize("place", ["before enable()", "after enable()", "an instance", "a fork's source"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_users_own(rank: Rank, name, place, tmp_path):
    have_groups(rank.size)
    folder = own_folder(rank, tmp_path)
    make = functools.partial(own_loss, name, folder=folder)
    words = ["has a loss of its own", "own_loss.py", "remove it to have", "has no effect on this head"]
    change: Any = None
    if place == "a fork's source":
        make = lambda stock: edited(*LOSSES[name], folder)  # noqa: E731
        newer = core_version() == (0, 19)
        words = ["is newer than this package knows, and not taken" if newer else "was edited"]
    elif place == "an instance":
        words = ["the loss of this call is"]
    early = place in ("before enable()", "a fork's source")
    with before_enable(make if early else None) as stock, pytest.MonkeyPatch.context() as patch:
        if place == "an instance":
            change = lambda built: vars(built).update(  # noqa: E731
                compute_language_model_loss=types.MethodType(make(stock), built)
            )
        if place == "after enable()":
            from megatron_fused_ce.adapter import forms

            with flag():
                cls = sys.modules[forms.LANGUAGE_MODULE].LanguageModule
                patch.setattr(cls, "compute_language_model_loss", make(stock))
        off, _, _ = run(rank, False, change)
        on, seen, said = run(rank, True, change)
        assert_same(on, off)
        assert seen == (0, 0)
        assert rank.rank or all(part in said for part in (*words, "Megatron's own path")), said
        if place == "a fork's source" and name == "z-loss":
            trust_it(rank, said, off)


def trust_it(rank: Rank, said: str, off: Any) -> None:
    """By its digest, and by no other, the head stands in for an edited function."""
    digest = [said.split("--fused-ce-trust ")[1].split()[0] if not rank.rank else None]
    torch.distributed.broadcast_object_list(digest, src=0)
    _, seen, _ = run(rank, True, trust=["0" * 16])
    assert seen == (0, 0)
    fused, seen, _ = run(rank, True, trust=digest)
    assert seen == (1, 0)
    assert (fused["loss"] - off["loss"]).abs() > 1e-3, "the z-loss is gone, as the user said"


# --- what the loss reads, wherever it was put ------------------------------------------------------


class Around:
    """A callable that passes on the attributes of what it calls and is equal to it, as those of wrapt."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __eq__(self, other: object) -> bool:
        return self.inner == other

    def __hash__(self) -> int:
        return hash(self.inner)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return 2 * self.inner(*given, **named)


class Space:
    """A module with one name replaced."""

    def __init__(self, inner: Any, **names: Any) -> None:
        self.inner = inner
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class DoubledStep:
    @staticmethod
    def calculate_cross_entropy_loss(exp_logits, predicted_logits, sum_exp_logits):
        loss = 2 * (sum_exp_logits.log() - predicted_logits)
        return exp_logits.div_(sum_exp_logits.unsqueeze(dim=-1)), loss


def at_its_place(modules: Any) -> Any:
    """A step with the file, the line and the names of Megatron's, and another body."""
    code = modules.in_parts.VocabParallelCrossEntropy.calculate_cross_entropy_loss.__code__
    text = textwrap.dedent(inspect.getsource(DoubledStep).partition("\n")[2])
    compiled = compile("\n" * (code.co_firstlineno - 1) + text, code.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(compiled, vars(modules.in_parts), made)  # noqa: S102
    return made["calculate_cross_entropy_loss"]


def in_another_file(modules: Any) -> Any:
    """What a fork's package imports in the place of Megatron's loss, from a file of the core's own."""
    module = types.ModuleType(f"{modules.parallel.__name__}.own_cross_entropy")
    sys.modules[module.__name__] = module
    vars(module)["stock"] = modules.in_parts.vocab_parallel_cross_entropy
    exec("def vocab_parallel_cross_entropy(*given, **named): return 2 * stock(*given, **named)", vars(module))  # noqa: S102
    return module.vocab_parallel_cross_entropy  # type: ignore[attr-defined]


def in_te(modules: Any) -> Any:
    """A user's, where there is no Transformer Engine."""
    stock = modules.in_parts.vocab_parallel_cross_entropy
    return lambda logits, labels, *_: 2 * stock(logits.float(), labels)


def doubled(stock: Any) -> Any:
    return lambda *given, **named: 2 * stock(*given, **named)


def doubled_heads(call: Any) -> Any:
    def __call__(self: Any, *given: Any, **named: Any) -> Any:
        made = call(self, *given, **named)
        return (2 * made[0], *made[1:]) if type(self).__name__ == "ColumnParallelLinear" else made

    return __call__


def modules_of_the_loss() -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.gpt import gpt_model

    return types.SimpleNamespace(
        parallel=tensor_parallel, in_parts=tensor_parallel.cross_entropy, layers=tensor_parallel.layers,
        native=fused_cross_entropy, loss=language_module, parts=tensor_parallel.utils,
        gpt=gpt_model,
    )  # fmt: skip


NATIVE = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
TE = {**NATIVE, "cross_entropy_fusion_impl": "te"}
#: What users put where the loss or the layer reads it: config; who owns the name; the name; what comes there.
READ: dict[str, tuple[dict[str, str], Any, str, Any]] = {
    "a proxy": ({}, lambda m: m.parallel, "vocab_parallel_cross_entropy", Around),
    "a fork's file": ({}, lambda m: m.parallel, "vocab_parallel_cross_entropy", in_another_file),
    "the package": (
        {}, lambda m: m.loss, "tensor_parallel",
        lambda m: Space(m, vocab_parallel_cross_entropy=doubled(m.vocab_parallel_cross_entropy)),
    ),
    "torch": ({}, lambda m: m.in_parts, "torch", lambda m: Space(m, log=doubled(m.log))),
    "apply": ({}, lambda m: m.in_parts._VocabParallelCrossEntropy, "apply", doubled),
    "defaults": (
        {}, lambda m: m.in_parts.vocab_parallel_cross_entropy, "__defaults__", lambda d: (0.3, *d[1:])
    ),
    "code": (
        {}, lambda m: m.in_parts.VocabParallelCrossEntropy.calculate_cross_entropy_loss, "__code__",
        lambda _: DoubledStep.calculate_cross_entropy_loss.__code__,
    ),
    "code at its place": (
        {}, lambda m: m.in_parts.VocabParallelCrossEntropy, "calculate_cross_entropy_loss", at_its_place
    ),
    "a subclass": (
        {}, lambda m: m.in_parts, "VocabParallelCrossEntropy",
        lambda cls: type(cls.__name__, (DoubledStep, cls), {"__module__": cls.__module__}),
    ),
    "native": (NATIVE, lambda m: m.loss, "fused_vocab_parallel_cross_entropy", doubled),
    "native's step": (
        NATIVE, lambda m: m.native, "calculate_logits_max",
        lambda stock: lambda logits: [2 * part for part in stock(logits)],
    ),
    "te": (TE, lambda m: m.loss, "te_parallel_cross_entropy", in_te),
    "the ranges": (
        {}, lambda m: m.parts.VocabUtility, "vocab_range_from_per_partition_vocab_size",
        lambda _: lambda size, rank, ranks: (3 + rank * size, 3 + (rank + 1) * size),
    ),
    "torch's call": ({}, lambda _: torch.nn.Module, "__call__", doubled_heads),
    "the product": ({}, lambda m: m.layers, "linear_with_grad_accumulation_and_async_allreduce", Around),
}  # fmt: skip


@on_ranks(of_core(2, INSTALLED), of_core(2, NEWEST))
@pytest.mark.parametrize("when", ["before the model is built", "after"])
@pytest.mark.parametrize("name", READ)
def test_what_the_loss_reads_is_looked_at(rank: Rank, name, when):
    have_groups(rank.size)
    config, owner_of, attribute, make = READ[name]
    modules = modules_of_the_loss()
    owner = owner_of(modules)
    stock = getattr(owner, attribute, None)
    takes_modules = make in (at_its_place, in_another_file, in_te)
    with pytest.MonkeyPatch.context() as patch:
        made = make(modules if takes_modules else stock)

        def change(_: Any = None) -> None:
            is_method = isinstance(owner, type) and owner is not torch.nn.Module
            patch.setattr(owner, attribute, staticmethod(made) if is_method else made, raising=False)

        model = Model(extra=config)
        if name != "te":
            plain, seen, _ = run(rank, True, model=model)
            assert seen == (1, 0)
        if when != "after":
            change()
        off, _, _ = run(rank, False, change, model=model)
        patch.undo()
        if when != "after":
            change()
        on, seen, said = run(rank, True, change, model=model)
    assert seen == (0, 0), said
    assert_same(on, off)
    if name != "te":
        assert (off["loss"] - plain["loss"]).abs() > 1e-3, "it changes nothing"
    words = (
        "was replaced or edited after the model was built" if when == "after" else "stays on Megatron's own"
    )
    words = "calls the output layer in torch's place" if name == "torch's call" else words
    assert rank.rank or words in said, said


# --- what a model has of its own -------------------------------------------------------------------

#: Done before the model is built, and to the built one.
Own = tuple[Any, Any, str]


def forks_layer(name: str) -> Own:
    """A class of a fork's in the core's own package, whose product is another."""

    def before(patch: pytest.MonkeyPatch, modules: Any) -> None:
        module = types.ModuleType(f"{modules.layers.__package__}.own_layers")

        def _forward_impl(self: Any, *given: Any, **named: Any) -> Any:
            return 2 * modules.layers.ColumnParallelLinear._forward_impl(self, *given, **named)

        body = {"_forward_impl": _forward_impl, "__module__": module.__name__}
        layer = type(name, (modules.layers.ColumnParallelLinear,), body)
        setattr(module, name, layer)
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(modules.gpt, "tensor_parallel", Space(modules.parallel, ColumnParallelLinear=layer))

    return before, None, "_forward_impl stands in the place of one of Megatron's functions"


def natives_loss(patch: pytest.MonkeyPatch, modules: Any) -> None:
    name = "fused_vocab_parallel_cross_entropy"
    patch.setattr(modules.loss, name, doubled(getattr(modules.native, name)))


def with_another_config(rank: Rank, patch: pytest.MonkeyPatch, built: Any) -> None:
    built.config = copy.copy(built.config)
    vars(built.config).update(NATIVE)


def before_another_is_built(rank: Rank, patch: pytest.MonkeyPatch, built: Any) -> None:
    _, owner_of, name, make = READ["the ranges"]
    patch.setattr(owner_of(modules_of_the_loss()), name, staticmethod(make(None)))
    build(Model(), rank)


def casts_what_is_returned(rank: Rank, patch: pytest.MonkeyPatch, built: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    fully_shard(built.output_layer, mp_policy=policy)


OF_A_MODEL: dict[str, Own] = {
    "a fork's layer": forks_layer("OwnLinear"),
    "a fork's layer with the core's name": forks_layer("ColumnParallelLinear"),
    "another config later": (natives_loss, with_another_config, "is not Megatron's own"),
    "another model later": (None, before_another_is_built, "was replaced or edited after"),
    "FSDP2 that casts": (None, casts_what_is_returned, "FSDP casts what the output layer returns"),
}


@on_ranks(of_core(1, INSTALLED), of_core(1, NEWEST))
@pytest.mark.parametrize("name", OF_A_MODEL)
def test_what_a_model_has_of_its_own(rank: Rank, name):
    have_groups(rank.size)
    before, after, words = OF_A_MODEL[name]
    made, counted, said = {}, {}, {}
    for on in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if before is not None:
                before(patch, modules_of_the_loss())
            change = functools.partial(after, rank, patch) if after else None
            made[on], counted[on], said[on] = run(rank, on, change)
    assert counted[True] == (0, 0), said[True]
    assert words in said[True], said[True]
    assert_same(made[True], made[False])


# --- a Megatron that is newer than the table -------------------------------------------------------


@on_ranks(*CORES, of_core(1, NEWEST))
@pytest.mark.parametrize("config", [{}, NATIVE], ids=["unfused", "native"])
@pytest.mark.parametrize("known", ["the release before", "nothing"])
def test_a_newer_megatron_is_fused(rank: Rank, known, config):
    have_groups(rank.size)
    until = {(0, 16): "0.15.3", (0, 19): "0.18.2"}[core_version()] if known != "nothing" else ""
    model = Model(sequence_parallel=rank.size > 1, extra=config)
    expected, seen, _ = run(rank, True, model=model)
    assert seen == (1, 0)
    after = torch.get_rng_state()
    with table_until(until):
        made, seen, said = run(rank, True, model=model)
    assert seen == (1, 0), said
    assert rank.rank or "is newer than this package knows, equal on a trial" in said
    assert torch.equal(torch.get_rng_state(), after)
    assert_same(made, expected)


#: Edits that read known names alone, before Megatron's loss and after it, and the log's words.
OF_RANK = "self.pg_collection.tp.rank()"
NEWER = {
    "another value": ("", "loss = loss * 1.001", "values differ"),
    "another gradient": (
        "", "loss = loss + (other := logits.view_as(logits).sum(-1).transpose(0, 1)) - other.clone().data",
        "it reads data",
    ),
    "another value on one rank": ("", f"loss = loss * (1.0 + 0.01 * {OF_RANK})", "failed on another rank"),
    "an error on one rank": (f"if {OF_RANK}: raise RuntimeError('not here')", "", "failed on another rank"),
    "an error later": ("", f"if {OF_RANK} == 0: raise RuntimeError('not here')", "RuntimeError: not here"),
    "more collectives on one rank": (
        f"if {OF_RANK}: torch.distributed.all_reduce(logits.clone(), group=self.pg_collection.tp)", "",
        "failed on another rank",
    ),
    "nothing at -100": ("", "loss.mul_((labels > -100).transpose(0, 1).float())", "values differ"),
    "a new name": ("", "loss = loss * (2.0 if self.training else 2.0)", "it reads training"),
    "another shape": ("", "loss = loss.sum()", "no tensor of the labels' shape"),
}  # fmt: skip


@on_ranks(of_core(2, NEWEST))
@pytest.mark.parametrize("name", NEWER)
def test_a_trial_finds(rank: Rank, name, tmp_path):
    """Both ranks decide alike, and neither waits for the other."""
    have_groups(rank.size)
    before, after, words = NEWER[name]
    with before_enable(lambda stock: edited(before, after, own_folder(rank, tmp_path))):
        from megatron_fused_ce.adapter import output_layer

        with flag() as seen:
            model = build(Model(), rank)
    assert not isinstance(model.output_layer, output_layer.ColumnParallelLinear)
    assert rank.rank or words in seen.said, seen.said


@on_ranks(*CORES)
def test_an_edited_layer_stays(rank: Rank, tmp_path):
    """Its product, of which the loss is computed, is Megatron's to change too."""
    from megatron.core.tensor_parallel import layers

    have_groups(rank.size)
    line = "output = output_parallel\n        output_bias = self.bias if self.skip_bias_add else None"
    method = "ColumnParallelLinear.forward"
    halved = edited_in(layers.__name__, method, {line: "output = output / 2.0"}, own_folder(rank, tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.ColumnParallelLinear, "forward", halved)
        off, _, _ = run(rank, False)
        on, seen, said = run(rank, True)
    words = "product or a gradient of it is another" if core_version() == (0, 19) else f"{method} of megatron"
    assert seen == (0, 0) and (rank.rank or words in said), said
    assert_same(on, off)


@on_ranks(of_core(2, NEWEST))
def test_ranks_with_different_code_stay(rank: Rank):
    """A user's loss on one rank alone: with a Megatron that is newer, the ranks compare what they have."""
    have_groups(rank.size)
    own = (lambda stock: lambda *given: stock(*given)) if rank.rank else None
    with before_enable(own):
        _, seen, said = run(rank, True)
    assert seen == (0, 0)
    assert rank.rank or "not the same code on all ranks" in said


# --- log-probabilities -----------------------------------------------------------------------------


def warmer(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (logits / 2.0).log_softmax(-1).gather(-1, index[..., None])[..., 0]


@on_ranks(*CORES)
@pytest.mark.parametrize("place", ["before enable()", "after enable()", "a form that is not known"])
def test_a_log_softmax_that_is_not_known(rank: Rank, place):
    """``selective_log_softmax`` of train_rl.py: a user's gets real logits, a newer one is tried."""
    have_groups(rank.size)
    tokens, positions, _ = rl_utils.tokens_of(rank)
    own = {} if place == "a form that is not known" else {"selective_log_softmax": warmer}
    is_fused = not own and core_version() == (0, 19)
    before = own if place == "before enable()" else {}

    def made(patch: pytest.MonkeyPatch, own: dict[str, Any]) -> torch.Tensor:
        for name, function in own.items():
            patch.setattr(rl_utils, name, function)
        return rl_utils.get_logprobs(build(Model(), rank), tokens, positions)

    with pytest.MonkeyPatch.context() as patch:
        off = made(patch, own)
    with (
        flag() as seen,
        rl_utils.patched_caller(is_known=False, **before),
        pytest.MonkeyPatch.context() as patch,
    ):
        on = made(patch, {} if before else own)
    assert seen.counts == (is_fused, 0, not is_fused)
    if is_fused:
        rl_utils.assert_same(on, off)
    else:
        assert torch.equal(on, off)
    words = "warmer" if own else "equal on a trial" if is_fused else "was edited: --fused-ce-trust"
    assert rank.rank or words in seen.said, seen.said
