"""Every way to reach or touch a head that we know: as without the flag, or one error before a step.

Each row of :data:`ROWS` trains one step of the same small model twice, flag off and flag on. It says what the
counters must show and, where a call stays with Megatron, which reason the log must give. FSDP2 and
Megatron-FSDP are in test_fsdp.py, combined 1F1B as a whole in tests/megatron/test_pretrain_gpt.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pkgutil
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.megatron import (
    BATCH,
    GRADIENT_BOUND,
    LOSS_BOUND,
    NEWEST,
    SEQUENCE,
    VOCAB,
    Model,
    build,
    have_groups,
    needs_core,
    of_core,
    positions_and_mask,
    takes_mask,
)
from tests.support.ranks import Rank, on_ranks

RANKS = [of_core(2, NEWEST), pytest.param(*of_core(1, NEWEST).values, marks=pytest.mark.rest)]


@dataclass
class Step:
    """A model and a micro-batch, which a row makes a loss of."""

    rank: Rank
    model: Any
    ids: Tensor
    labels: Tensor
    mask: Tensor

    def __call__(self, model: Any = None, labels: bool = True, **given: Any) -> Any:
        """The model's output for the micro-batch."""
        if labels:
            given["labels"] = self.labels
            if takes_mask(Model(family=family_of(self.model))):
                given["loss_mask"] = self.mask
        return (model or self.model)(self.ids, *positions_and_mask(self.rank), **given)

    def masked(self, losses: Tensor) -> Tensor:
        return (losses.float() * self.mask).sum() / self.mask.sum()

    def of_logits(self, logits: Tensor) -> Tensor:
        """Megatron's own cross entropy, an autograd function, of ``[s, b, V]``; and another term in torch."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        losses = vocab_parallel_cross_entropy(logits.float().clone(), self.labels.t().contiguous())
        return self.masked(losses.t()) + z_loss_of(logits, self.rank)

    def by_native_fusion(self, logits: Tensor) -> Tensor:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        group = self.model.output_layer.tp_group
        losses = fused_vocab_parallel_cross_entropy(logits.clone(), self.labels.t().contiguous(), group)
        return self.masked(losses.t()) + z_loss_of(logits, self.rank)


def family_of(model: Any) -> str:
    return "gpt" if any(cls.__name__ == "GPTModel" for cls in type(model).__mro__) else "hybrid"


def z_loss_of(logits: Tensor, rank: Rank) -> Tensor:
    """Of this rank's columns, by torch's own operators: its gradient survives where another's is lost."""
    return 1e-3 * logits.float().logsumexp(-1).square().mean()


# --- rows ------------------------------------------------------------------------------------------

Use = Callable[[Step], Tensor]


@dataclass(frozen=True)
class Row:
    #: makes the loss
    use: Use
    #: heads of one forward that are fused, and that stay with Megatron; none is ever materialised
    fused: int = 1
    stock: int = 0
    #: of the log, where a head stays
    words: str = ""
    #: of the error that the flag raises before anything is trained
    raises: str = ""
    #: changes of the model: :class:`.Model`'s fields
    model: dict[str, Any] = field(default_factory=dict)
    #: of the flag's config
    options: dict[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] = ("gpt", "hybrid")
    since: tuple[int, int] = (0, 16)
    #: norm-relative, of losses and gradients
    bound: float = GRADIENT_BOUND
    #: whether there is a gradient to compare
    trains: bool = True


GPT = ("gpt",)


def labels(step: Step) -> Tensor:
    return step.masked(step())


def no_labels(step: Step) -> Tensor:
    return step(labels=False).transpose(0, 1).contiguous()  # [s, b, V]


def processor(use: Callable[..., Tensor]) -> Use:
    """A loss through ``output_processor``: ``use(step, hidden, head, given)``."""

    def through(step: Step) -> Tensor:
        def process(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **given: Any) -> Tensor:
            def head() -> Tensor:
                logits, _ = output_layer(hidden_states, weight=output_weight)
                return logits

            return use(step, head, given)

        return step(output_processor=process)

    return through


@contextlib.contextmanager
def having(owner: Any, name: str, value: Any):
    """An attribute of an object itself; afterwards as it was."""
    before = vars(owner).get(name)
    own = type if isinstance(owner, type) else object
    own.__setattr__(owner, name, value)
    try:
        yield
    finally:
        own.__delattr__(owner, name)
        if before is not None:
            own.__setattr__(owner, name, before)


def method(
    name: str, function: Callable[..., Any], of_class: bool = False, wraps: bool = False
) -> Callable[[Use], Use]:
    """The model, or its class, has another method of this name: ``function(stock, *args)``.

    ``wraps``: by ``functools.wraps``, which copies attributes.
    """

    def around(use: Use) -> Use:
        def used(step: Step) -> Tensor:
            stock = getattr(step.model, name).__func__

            def own(self: Any, *args: Any, **kwargs: Any) -> Any:
                return function(functools.partial(stock, self), *args, **kwargs)

            own = functools.wraps(stock)(own) if wraps else own
            owner = type(step.model) if of_class else step.model
            with having(owner, name, own if of_class else types.MethodType(own, step.model)):
                return use(step)

        return used

    return around


def in_class(make: Callable[[type], type], of_layer: bool = False) -> Callable[[Use], Use]:
    """The class of the model, or of its output layer, is replaced by a subclass, as if built of that."""

    def around(use: Use) -> Use:
        def used(step: Step) -> Tensor:
            owner = step.model.output_layer if of_layer else step.model
            stock = type(owner)
            owner.__class__ = make(stock)
            try:
                return use(step)
            finally:
                owner.__class__ = stock

        return used

    return around


def own_postprocess(stock: functools.partial, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
    """Put in the place of Megatron's, as NeMo-RL does."""
    model = stock.args[0]
    logits, _ = model.output_layer(hidden_states)
    return vocab_parallel(model, named["labels"], logits)


def own_head(
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    head: Callable[[Any, Tensor], Any] = lambda self, hidden: self.output_layer(hidden),
) -> Callable[[type], type]:
    """A ``_postprocess`` of one's own: it calls the head, and ``loss(self, labels, logits)``."""

    def make(base: type) -> type:
        class Own(base):  # type: ignore[misc, valid-type]
            def _postprocess(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
                logits, _ = head(self, hidden_states)
                return loss(self, named["labels"], logits)

        return Own

    return make


def megatrons(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    return self.compute_language_model_loss(labels, logits)


def detached_head(self: Any, hidden: Tensor) -> Any:
    """As miles detaches the weight of multi-token prediction."""
    detached = {"weight": self.output_layer.weight.detach()}
    return torch.func.functional_call(self.output_layer, detached, (hidden,))


def vocab_parallel(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    z_loss = logits.float().logsumexp(-1).square().t() * 1e-3
    return vocab_parallel_cross_entropy(logits.float().clone(), labels.t().contiguous()).t() + z_loss


def outer_forward(base: type) -> type:
    class Outer(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2.0 * super().forward(*args, **kwargs)

    return Outer


def outer_postprocess(base: type) -> type:
    class Outer(base):  # type: ignore[misc, valid-type]
        def _postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2.0 * super()._postprocess(*args, **kwargs)

    return Outer


class Mixin(nn.Module):
    """As Megatron-Bridge extends a head after the build: ``forward`` softcaps what the layer returns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return 3.0 * torch.tanh(logits / 3.0), bias


class KnownMixin(nn.Module):
    """One that the package knows by its name, with the cap in its config."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        cap = self.config.final_logit_softcapping
        return (logits if not cap else cap * torch.tanh(logits / cap)), bias


class OtherMixin(KnownMixin):
    """Of a known name, but of a version that does more."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return 0.5 * logits, bias


class Identity(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def extended(mixin: type, cap: float | None = None) -> Callable[[Use], Use]:
    def around(use: Use) -> Use:
        def used(step: Step) -> Tensor:
            step.model.output_layer.config.final_logit_softcapping = cap
            with known_mixins():
                return use(step)

        return in_class(lambda stock: type(stock.__name__, (mixin, stock), {}), of_layer=True)(used)

    return around


@contextlib.contextmanager
def known_mixins():
    from megatron_fused_ce.adapter import output_layer

    with pytest.MonkeyPatch.context() as patch:
        for mixin in (KnownMixin, OtherMixin):
            name = (mixin.__module__, mixin.forward.__qualname__)
            patch.setitem(output_layer.SOFTCAPS, name, "final_logit_softcapping")
        yield


class LoRA(nn.Module):
    """As PEFT wraps a layer after the build."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.to_wrap = layer
        self.down = nn.Parameter(torch.full((4, layer.input_size), 0.01))
        self.up = nn.Parameter(torch.full((layer.output_size_per_partition, 4), 0.01))

    @property
    def weight(self) -> Tensor:
        return self.to_wrap.weight

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits, bias = self.to_wrap(hidden, *args, **kwargs)
        if isinstance(logits, Tensor) and logits.shape[0] == hidden.shape[0]:
            logits = logits + hidden @ self.down.t() @ self.up.t()
        return logits, bias


def wrapped(step: Step) -> Tensor:
    layer = step.model.output_layer
    step.model.output_layer = LoRA(layer)
    try:
        return labels(step)
    finally:
        step.model.output_layer = layer


def twice_set_up(step: Step) -> Tensor:
    step.model.setup_embeddings_and_output_layer()
    return labels(step)


def postprocess_alone(step: Step) -> Tensor:
    """As combined 1F1B's schedule calls it: not through ``forward``."""
    seen: dict[str, Any] = {}
    with having(step.model, "_postprocess", lambda **given: seen.update(given) or given["hidden_states"]):
        step()
    return step.masked(step.model._postprocess(**seen))


def functional(step: Step) -> Tensor:
    """All parameters given from outside; their gradients arrive at the model's own."""
    model = step.model
    given = {name: parameter * 1.0 for name, parameter in model.named_parameters()}

    def call(*args: Any, **kwargs: Any) -> Tensor:
        return torch.func.functional_call(model, given, args, kwargs)

    return step.masked(step(call))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def parametrized(step: Step) -> Tensor:
    nn.utils.parametrize.register_parametrization(step.model.output_layer, "weight", Doubled())
    try:
        return labels(step)
    finally:
        step.model.output_layer.parametrizations.weight[0].forward = Doubled().forward


def frozen(step: Step) -> Tensor:
    step.model.output_layer.weight.requires_grad_(False)
    return labels(step)


def checkpointed(reentrant: bool) -> Use:
    def use(step: Step) -> Tensor:
        def run(scale: Tensor) -> Tensor:
            return step() * scale

        scale = torch.ones((), device=step.ids.device, requires_grad=True)
        return step.masked(checkpoint(run, scale, use_reentrant=reentrant))

    return use


def hooked(register: str, hook: Callable[..., Any], **options: bool) -> Use:
    def use(step: Step) -> Tensor:
        handle = getattr(step.model.output_layer, register)(hook, **options)
        try:
            return labels(step)
        finally:
            handle.remove()

    return use


def of_copy(step: Step) -> Tensor:
    """A deepcopy made after the build; its gradients are handed to the model that is compared."""
    groups = [vars(module).values() for module in step.model.modules()]
    groups = [v for values in groups for v in values if isinstance(v, torch.distributed.ProcessGroup)]
    collections = [getattr(module, "pg_collection", None) for module in step.model.modules()]
    twin = copy.deepcopy(step.model, {id(kept): kept for kept in [*groups, *collections] if kept is not None})
    return backward_now(step, step.masked(step(twin)), twin)


def in_float16_module(step: Step) -> Tensor:
    from megatron.core.transformer.module import Float16Module

    return step.masked(step(Float16Module(step.model.config, step.model)))


def between_evaluations(step: Step) -> Tensor:
    step.model.eval()
    with torch.no_grad():
        step()
    step.model.train()
    loss = labels(step)
    step.model.eval()
    with torch.inference_mode():
        step()
    step.model.train()
    return loss


def logits_under_no_grad(step: Step) -> Tensor:
    """The loss of logits without a gradient has none, with the flag too."""
    with torch.no_grad():
        logits = no_labels(step)
    loss = step.of_logits(logits)
    assert not loss.requires_grad
    return loss


def loss_under_no_grad(step: Step) -> Tensor:
    with torch.no_grad():
        losses = step()
    assert not losses.requires_grad
    return step.masked(losses)


def in_place(step: Step) -> Tensor:
    losses = step()
    losses.mul_(step.mask)
    losses.div_(step.mask.sum())
    return losses.sum()


def default_dtype(step: Step) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        losses = step()
    finally:
        torch.set_default_dtype(before)
    return step.masked(losses)


def autocast(step: Step) -> Tensor:
    with torch.autocast(step.ids.device.type, torch.bfloat16):
        losses = step()
    return step.masked(losses)


def another_dtype_of_the_mask(step: Step) -> Tensor:
    return labels(replace(step, mask=step.mask.bool().double()))


def directly(step: Step) -> Tensor:
    """The layer is called from outside of any model's code, on hidden states of its decoder."""
    layer = step.model.output_layer
    hidden = torch.randn(SEQUENCE, BATCH, layer.input_size, generator=torch.Generator().manual_seed(3))
    hidden = hidden.to(step.ids.device).requires_grad_()
    logits, _ = layer(hidden)
    return step.of_logits(logits) + 0.0 * labels(step)


def a_layer_hooked_by_name(step: Step) -> Tensor:
    """An instance's own ``forward``, as accelerate and CUDA graphs put it there."""
    layer = step.model.output_layer
    with having(layer, "forward", functools.partial(layer.forward)):
        return labels(step)


def loss_used_twice(step: Step) -> Tensor:
    losses = step()
    return step.masked(losses) + losses.square().mean()


def gathered(step: Step) -> Tensor:
    logits = step(labels=False, runtime_gather_output=True)
    log_probs = logits.float().log_softmax(-1).gather(-1, step.labels.unsqueeze(-1)).squeeze(-1)
    return step.masked(-log_probs)


def spectrally_normed(step: Step) -> Tensor:
    """Whose weight depends on how often it was read."""
    layer = step.model.output_layer
    torch.manual_seed(5)  # of the vectors that it starts from
    nn.utils.parametrizations.spectral_norm(layer)
    loss = labels(step)
    loss = loss + layer.parametrizations.weight[0]._u.abs().sum()
    nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    return loss


def hooked_everywhere(kind: str, hook: Callable[..., Any]) -> Use:
    """A hook on all modules, which does something at the head alone."""

    def use(step: Step) -> Tensor:
        layer = step.model.output_layer
        register = getattr(nn.modules.module, f"register_module_{kind}_hook")
        handle = register(lambda module, *given: hook(module, *given) if module is layer else None)
        try:
            loss = labels(step)
            return loss if kind == "forward" else backward_now(step, loss)
        finally:
            handle.remove()

    return use


def backward_now(step: Step, loss: Tensor, twin: Any = None) -> Tensor:
    """A loss with the gradients that this one, of the model or of a twin, gave."""
    gradients = torch.autograd.grad(loss, [p for p in (twin or step.model).parameters() if p.requires_grad])
    pairs = zip([p for p in step.model.parameters() if p.requires_grad], gradients, strict=True)
    return loss.detach() + sum(((p - p.detach()).float() * g.float()).sum() for p, g in pairs)


TENSOR_PARALLEL = "megatron.core.tensor_parallel"


def replaced(where: str, name: str, function: Callable[..., Any]) -> Use:
    """A function of Megatron's, or the output layer's, gives way to ``function(stock, *args)``."""

    def use(step: Step) -> Tensor:
        owner = pkgutil.resolve_name(where) if where else step.model.output_layer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, functools.partial(function, getattr(owner, name)))
            if isinstance(owner, type):
                stock = vars(owner)[name].args[0]
                patch.setattr(
                    owner, name, lambda self, *a, **k: function(functools.partial(stock, self), *a, **k)
                )
            return labels(step)

    return use


def with_a_bias(step: Step) -> Tensor:
    layer = step.model.output_layer
    layer.bias = nn.Parameter(torch.linspace(-1, 1, len(layer.weight), device=step.ids.device))
    layer.skip_bias_add = False
    return labels(step)


def with_attributes(**attributes: Any) -> Use:
    """The layer has other ones than when it was built."""

    def use(step: Step) -> Tensor:
        vars(step.model.output_layer).update(attributes)
        return labels(step)

    return use


def with_fewer_rows(step: Step) -> Tensor:
    layer = step.model.output_layer
    layer.weight = nn.Parameter(layer.weight.detach()[:-3].clone())
    return labels(step)


def in_float64(step: Step) -> Tensor:
    step.model.double()
    return labels(step)


def part_of_cross_entropy_replaced(step: Step) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    name = "calculate_cross_entropy_loss"
    stock = getattr(VocabParallelCrossEntropy, name)

    def doubled(*args: Any) -> Any:
        *others, loss = stock(*args)
        return *others, 2 * loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VocabParallelCrossEntropy, name, staticmethod(doubled))
        return labels(step)


def mask_changed(module: Callable[[Any], Any]) -> Use:
    """Tokens that were masked when the model was called count when its loss is computed."""

    def changed(step: Step) -> Tensor:
        from megatron_fused_ce import masked_tokens

        def unmask(*_: Any) -> None:
            assert step.mask.min() == 0
            step.mask.fill_(1.0)

        handle = module(step.model).register_forward_pre_hook(unmask)
        with having(masked_tokens, "ROUND_TO", 1):  # so few tokens would all be kept
            loss = labels(step)
        handle.remove()
        assert step.mask.min() == 1
        return loss

    return changed


def compiled(step: Step) -> Tensor:
    """As torch.compile traces it."""
    with having(torch.compiler, "is_compiling", lambda: True):
        return labels(step)


def built_before_the_flag(step: Step) -> Tensor:
    from megatron.core.tensor_parallel import layers

    from megatron_fused_ce.adapter.language_module import ADOPTED

    delattr(step.model, ADOPTED)
    step.model.output_layer.__class__ = layers.ColumnParallelLinear
    return labels(step)


def within_its_own_evaluation(step: Step) -> Tensor:
    """A pre-hook of the head calls the model once more, for a metric."""
    metrics: list[Tensor] = []

    def call_again(layer: Any, given: Any) -> None:
        handle.remove()
        with torch.no_grad():
            metrics.append(step().mean())

    handle = step.model.output_layer.register_forward_pre_hook(call_again)
    loss = labels(step)
    return loss + metrics[0]


def in_eval_mode(use: Use) -> Use:
    def evaluated(step: Step) -> Tensor:
        step.model.eval()
        return use(step)

    return evaluated


def halved(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = stock(*args, **kwargs)
    return (made[0] * 0.5, *made[1:]) if isinstance(made, tuple) else made * 0.5


def clamped(layer: Any, gradients: tuple[Tensor, Any]) -> tuple[Tensor, None]:
    return gradients[0].clamp(-1e-3, 1e-3), None


def shrunk_by_the_logits(layer: Any, given: tuple[Tensor], made: tuple[Tensor, Any]) -> tuple[Tensor]:
    return (given[0] * made[0].float().norm(),)


BF16 = {"dtype": torch.bfloat16}
of_head = processor(lambda step, head, given: step.of_logits(head()))
CALLED_HERE = f"is called by {__name__}"

ROWS = {
    # Megatron's own path through the model.
    "labels": Row(labels),
    "labels, loss used twice": Row(loss_used_twice),
    "labels, changed in place": Row(in_place),
    "labels, another mask's dtype": Row(another_dtype_of_the_mask),
    "a schedule's _postprocess": Row(postprocess_alone, families=GPT),
    "bf16 wrapped": Row(in_float16_module, model={"dtype": torch.bfloat16}, bound=3e-2),
    "checkpoint, reentrant": Row(checkpointed(True), fused=2),
    "checkpoint": Row(checkpointed(False), fused=2),
    "evaluations between steps": Row(between_evaluations, fused=3),
    "no_grad around all": Row(loss_under_no_grad, trains=False),
    "a frozen head": Row(frozen),
    "a copy of the model": Row(of_copy),
    "another default dtype": Row(default_dtype),
    "autocast": Row(autocast, model={"dtype": torch.bfloat16}, bound=3e-2),
    "grad_in_forward": Row(loss_used_twice, options={"strategy": "grad_in_forward"}),
    "functional_call of the model": Row(functional),
    "a parametrized weight": Row(parametrized, 0, 1, "parametrization of its output layer"),
    "a sharding's class": Row(  # as FSDP2 puts around a layer's
        in_class(lambda stock: type(f"Sharded{stock.__name__}", (stock,), {}), of_layer=True)(labels)
    ),
    "set up twice": Row(twice_set_up),
    # Models of other people around Megatron's.
    "a forward around Megatron's": Row(in_class(outer_forward)(labels)),
    "a _postprocess around Megatron's": Row(in_class(outer_postprocess)(labels), families=GPT),
    "a _postprocess of one's own": Row(
        in_class(own_head(vocab_parallel))(labels), 0, 1, CALLED_HERE, families=GPT
    ),
    "a _postprocess of one's own, Megatron's loss": Row(
        in_class(own_head(megatrons))(labels),
        0, 1, CALLED_HERE, families=GPT,
    ),
    "a wrapper around Megatron's _postprocess": Row(
        method("_postprocess", lambda stock, *a, **k: stock(*a, **k), of_class=True)(labels), families=GPT
    ),
    "a _postprocess in the place of Megatron's": Row(
        method("_postprocess", own_postprocess, of_class=True)(labels),
        0, 1, CALLED_HERE, families=GPT,
    ),
    "a loss in the place of Megatron's": Row(
        method("compute_language_model_loss", lambda stock, y, z: 2 * stock(y, z))(labels),
        0, 1, "the loss of this call is",
    ),
    "a class's loss in the place of Megatron's": Row(
        method("compute_language_model_loss", lambda stock, y, z: 2 * stock(y, z), of_class=True)(labels),
        0, 1, "the loss of this call is",
    ),
    "a scale of one's own": Row(
        method("_scale_logits", lambda stock, z: 5.0 * torch.tanh(stock(z) / 5.0))(labels),
        0, 1, "the logits are scaled by", since=(0, 19),
    ),
    # Logits in other hands.
    "an output processor, Megatron's autograd function": Row(
        of_head, 0, 1, CALLED_HERE, families=GPT, since=(0, 18),
    ),
    "an output processor, the native fusion": Row(
        processor(lambda step, head, given: step.by_native_fusion(head())),
        0, 1, CALLED_HERE, families=GPT, since=(0, 18),
    ),
    "an output processor, torch alone": Row(
        processor(lambda step, head, given: z_loss_of(head(), step.rank)),
        0, 1, CALLED_HERE, families=GPT, since=(0, 18),
    ),
    "an output processor, Megatron's loss": Row(
        processor(
            lambda step, head, given: step.masked(given["compute_language_model_loss"](step.labels, head()))
        ),
        0, 1, CALLED_HERE, families=GPT, since=(0, 18),
    ),
    "an output processor behind mtp": Row(
        of_head, 2, 1, CALLED_HERE,
        model={"mtp": 2}, families=GPT, since=(0, 18),
    ),
    "no labels, Megatron's autograd function": Row(
        lambda step: step.of_logits(no_labels(step)), 0, 1, "called without labels"
    ),
    "no labels, the native fusion": Row(
        lambda step: step.by_native_fusion(no_labels(step)), 0, 1, "called without labels"
    ),
    "no labels, torch alone": Row(
        lambda step: z_loss_of(no_labels(step), step.rank), 0, 1, "called without labels"
    ),
    "logits under no_grad": Row(logits_under_no_grad, 0, 1, "called without labels", trains=False),
    "gathered logits": Row(gathered, 0, 1, "runtime_gather_output"),
    "the layer called directly": Row(directly, 1, 1, CALLED_HERE),
    # Layers that somebody has changed.
    "extended by a softcap": Row(extended(Mixin)(labels), 0, 1, f"its forward is {__name__}.Mixin"),
    "extended by nothing": Row(extended(Identity)(labels), 0, 1, "its forward is"),
    "extended by a known softcap": Row(extended(KnownMixin, 2.0)(labels)),
    "extended by a known softcap, no cap": Row(extended(KnownMixin)(labels)),
    "extended by a known softcap, changed": Row(extended(OtherMixin, 2.0)(labels), 0, 1, "its forward is"),
    "an instance's own forward": Row(a_layer_hooked_by_name, 0, 1, "its forward is"),
    "wrapped by LoRA": Row(wrapped, 0, 1, f"is called by {__name__}.forward"),
    "functional_call of the head, detached": Row(
        in_class(own_head(megatrons, detached_head))(labels), 0, 1, "is called by torch", families=GPT
    ),
    "a forward hook": Row(
        hooked("register_forward_hook", lambda layer, given, made: (made[0] * 0.5, made[1])),
        0, 1, "a forward hook",
    ),
    "a forward pre-hook": Row(
        hooked("register_forward_pre_hook", lambda layer, given: (given[0] * 0.5, *given[1:]))
    ),
    "a parametrization": Row(
        spectrally_normed, 0, 1, "a parametrization of its output layer",
    ),
    "a forward hook on all modules": Row(
        hooked_everywhere("forward", lambda layer, given, made: (made[0] * 0.5, made[1])),
        0, 1, "a forward hook",
    ),
    "a backward pre-hook": Row(
        hooked("register_full_backward_pre_hook", clamped),
        0, 1, "a backward hook", model=BF16, bound=3e-2,
    ),
    "a backward hook": Row(
        hooked("register_full_backward_hook", shrunk_by_the_logits),
        0, 1, "a backward hook", model=BF16, bound=3e-2,
    ),
    "a backward hook on all modules": Row(
        hooked_everywhere("full_backward_pre", clamped),
        0, 1, "a backward hook", model=BF16, bound=3e-2,
    ),
    "a decorated loss": Row(
        method("compute_language_model_loss", lambda stock, y, z: stock(y, z.div_(3.0)), wraps=True)(labels),
        0, 1, "the loss of this call is",
    ),
    "a decorated scale": Row(
        method("_scale_logits", lambda stock, z: stock(z.mul_(0.3)), wraps=True)(labels),
        0, 1, "are scaled by", since=(0, 19),
    ),
    "Megatron's forward replaced": Row(
        replaced(f"{TENSOR_PARALLEL}.ColumnParallelLinear", "forward", halved), 0, 1, "stands in the place of"
    ),
    "Megatron's product replaced": Row(
        replaced("", "_forward_impl", halved),
        0, 1, "stands in the place of",
    ),
    "Megatron's cross entropy replaced": Row(
        replaced(TENSOR_PARALLEL, "vocab_parallel_cross_entropy", halved), 0, 1, "was replaced"
    ),
    "a part of Megatron's cross entropy replaced": Row(
        part_of_cross_entropy_replaced, 0, 1, "was replaced"
    ),
    "a function beneath Megatron's product replaced": Row(
        replaced(
            f"{TENSOR_PARALLEL}.layers", "copy_to_tensor_model_parallel_region",
            lambda stock, *a, **k: 2 * stock(*a, **k),
        ),
        0, 1, "was replaced",
    ),
    "a bias given later": Row(with_a_bias, 0, 1, "a bias"),
    "grad_hidden not reduced any more": Row(
        with_attributes(disable_grad_reduce=True, allreduce_dgrad=False), 0, 1, "does not reduce grad_hidden"
    ),
    "an expert layer later": Row(with_attributes(explicit_expert_comm=True), 0, 1, "an expert layer"),
    "fewer rows than the layer was built for": Row(with_fewer_rows, 0, 1, "its layer was built for"),
    "compiled": Row(compiled, 0, 1, "within torch.compile"),
    "float64": Row(in_float64, 0, 1, "are float64"),
    "a mask changed meanwhile": Row(
        mask_changed(lambda model: model.decoder.layers[0]), options={"skip_masked": True}, families=GPT
    ),
    "a mask changed before the head": Row(
        mask_changed(lambda model: model.output_layer), options={"skip_masked": True}, families=GPT
    ),
    "a known softcap and mup": Row(extended(KnownMixin, 0.5)(labels), model={"mup": True}, since=(0, 19)),
    "a known softcap, called within itself": Row(
        extended(KnownMixin, 0.05)(within_its_own_evaluation), fused=2
    ),
    # Options of the loss that nobody would apply.
    "eval() and an option": Row(
        in_eval_mode(lambda step: step.of_logits(no_labels(step))), 0, 1,
        raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3},
    ),
    "a hook that drops arguments": Row(
        hooked("register_forward_pre_hook", lambda layer, given, named: (given, {}), with_kwargs=True), 0, 0,
        raises="did not reach its forward",
    ),
    "LoRA and an option": Row(
        wrapped, 0, 1, raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3}
    ),
    "an output processor and an option": Row(
        of_head, 0, 1,
        raises="ignore_index: Megatron's own loss", options={"ignore_index": -100},
        families=GPT, since=(0, 18),
    ),
    "no labels and an option": Row(
        lambda step: step.of_logits(no_labels(step)), 0, 1,
        raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3},
    ),
    "extended by a softcap, and an option": Row(
        extended(Mixin)(labels), 0, 1,
        raises="logit_softcap: Megatron's own loss", options={"logit_softcap": 3.0},
    ),
    "built before the flag, and an option": Row(
        built_before_the_flag, 0, 0, raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3}
    ),
    "a hook and an option": Row(
        hooked("register_forward_hook", lambda layer, given, made: None), 0, 1,
        raises="label_smoothing: Megatron's own loss", options={"label_smoothing": 0.1},
    ),
}  # fmt: skip


# --- off against on --------------------------------------------------------------------------------


def step_of(model: Any, rank: Rank) -> Step:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator).to(rank.device)
    mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < 0.7).float().to(rank.device)
    return Step(rank, model, ids[:, :-1], ids[:, 1:].contiguous(), mask)


def results_of(row: Row, rank: Rank, family: str) -> dict[str, Tensor]:
    """The loss and every gradient that the row leaves."""
    model = build(Model(family=family, **row.model), rank)
    loss = row.use(step_of(model, rank))
    made = {"loss": loss.detach().float()}
    if row.trains:
        loss.backward()
        for name, parameter in model.named_parameters():
            of_ddp = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if of_ddp is None else of_ddp
            if gradient is not None:
                made[name] = gradient.detach().float().clone()
    return made


@on_ranks(*RANKS)
@pytest.mark.parametrize("name", ROWS)
def test_off_against_on(rank: Rank, name):
    import megatron_fused_ce
    from megatron_fused_ce.adapter import report

    row = ROWS[name]
    needs_core(*row.since)
    if rank.size == 1 and row.model.get("sequence_parallel"):
        pytest.skip("one rank has no sequence parallelism")
    have_groups(rank.size)
    counters = megatron_fused_ce.counters()
    for family in row.families:
        megatron_fused_ce.disable()
        off = None if row.raises else results_of(row, rank, family)
        config = megatron_fused_ce.FusedCEConfig(**{"strategy": "store", "num_chunks": 3, **row.options})
        megatron_fused_ce.enable(config)
        counters.reset()
        report._said.clear()
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                if off is None:
                    with pytest.raises((ValueError, RuntimeError), match=row.raises):
                        results_of(row, rank, family)
                else:
                    on = results_of(row, rank, family)
        finally:
            megatron_fused_ce.disable()
        seen = counters.fused, counters.materialised, counters.stock
        assert seen == (row.fused, 0, row.stock), f"{family}: {seen}\n{printed.getvalue()}"
        assert "stays on Megatron's own path" not in printed.getvalue(), "it was adopted when it was built"
        said = [line for line in printed.getvalue().splitlines() if "takes Megatron's own path" in line]
        if rank.rank == 0 and off is not None:
            assert len(said) == row.stock and all(row.words in line for line in said), said
        if off is None:
            continue
        assert on.keys() == off.keys()
        assert len(on) > 5 or not row.trains
        for part, expected in off.items():
            error = float((on[part] - expected).double().norm())
            bound = max(row.bound, LOSS_BOUND if part == "loss" else 0.0)
            assert error <= bound * float(expected.double().norm()) + 1e-9, f"{family}, {part}: {error}"
