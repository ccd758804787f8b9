"""Every way to reach or touch a head that we know: as without the flag, or one error before a step.

Each row of :data:`ROWS` trains one step of the same small model twice, flag off and flag on. It says what the
counters must show and, where a call stays with Megatron, which reason the log must give. FSDP2 and
Megatron-FSDP are in test_fsdp.py, combined 1F1B as a whole in tests/megatron/test_pretrain_gpt.py.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce.head import tokens
from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, Model, of_core
from tests.support.ranks import Rank, on_ranks
from tests.support.seams import GPT, LATER, Change, Row, Step, off_against_on, stays

RANKS = [of_core(2, NEWEST), pytest.param(*of_core(1, NEWEST).values, marks=pytest.mark.rest)]


# --- rows: uses of a model -------------------------------------------------------------------------


def no_labels(step: Step) -> Tensor:
    return step.of_logits(step(labels=None).transpose(0, 1).contiguous())  # [s, b, V]


def through_processor(step: Step) -> Tensor:
    """A loss of logits, through ``output_processor``."""

    def process(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **given: Any) -> Tensor:
        return step.of_logits(output_layer(hidden_states, weight=output_weight)[0])

    return step(output_processor=process)


def postprocess_alone(step: Step) -> Tensor:
    """As combined 1F1B's schedule calls it: not through ``forward``."""
    seen: dict[str, Any] = {}
    with patch.object(
        step.model, "_postprocess", lambda **given: seen.update(given) or given["hidden_states"]
    ):
        step()
    return step.masked(step.model._postprocess(**seen))


def functional(step: Step) -> Tensor:
    """All parameters given from outside; their gradients arrive at the model's own."""
    model = step.model
    given = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
    return step.masked(step(lambda *args, **kwargs: torch.func.functional_call(model, given, args, kwargs)))


def checkpointed(step: Step) -> Tensor:
    scale = torch.ones((), device=step.ids.device, requires_grad=True)
    return step.masked(checkpoint(lambda scale: step() * scale, scale, use_reentrant=True))


def compiled(step: Step) -> Tensor:
    """As torch.compile traces it."""
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        return step.masked(step())


def in_place(step: Step) -> Tensor:
    losses = step()
    losses.mul_(step.mask)
    losses.div_(step.mask.sum())
    return losses.sum()


def directly(step: Step) -> Tensor:
    """The layer is called from outside of any model's code, on hidden states of its decoder."""
    layer = step.model.output_layer
    hidden = torch.randn(SEQUENCE, BATCH, layer.input_size, generator=torch.Generator().manual_seed(3))
    logits, _ = layer(hidden.to(step.ids.device).requires_grad_())
    return step.of_logits(logits) + 0.0 * step.masked(step())


def gathered(step: Step) -> Tensor:
    logits = step(labels=None, runtime_gather_output=True)
    log_probs = logits.float().log_softmax(-1).gather(-1, step.labels.unsqueeze(-1)).squeeze(-1)
    return step.masked(-log_probs)


def trained_by_a_pre_hook(step: Step) -> Tensor:
    """All else is frozen while the model is called; another term has gradients, so that nothing raises. The
    weight is made by each call, and is without a gradient what an evaluation made of it."""
    parameters = list(step.model.parameters())
    other = sum(1e-3 * parameter.square().sum() for parameter in parameters)
    torch.manual_seed(5)
    prune.random_unstructured(step.model.output_layer, "weight", 0.3)
    for parameter in parameters:
        parameter.requires_grad_(parameter is step.model.output_layer.weight_orig)
    with torch.no_grad():
        step()
    loss = step.masked(step())
    for parameter in parameters:
        parameter.requires_grad_()
    return loss + other


def mask_changed(step: Step) -> Tensor:
    """Tokens that were masked when the model was called count when its loss is computed."""

    def unmask(*_: Any) -> None:
        assert step.mask.min() == 0
        step.mask.fill_(1.0)

    step.model.output_layer.register_forward_pre_hook(unmask)
    with patch.object(tokens, "ROUND_TO", 1):  # so few tokens would all be kept
        loss = step.masked(step())
    assert step.mask.min() == 1
    return loss


def within_its_own_evaluation(step: Step) -> Tensor:
    """A pre-hook of the head calls the model once more, for a metric."""
    metrics: list[Tensor] = []

    def call_again(layer: Any, given: Any) -> None:
        handle.remove()
        with torch.no_grad():
            metrics.append(step().mean())

    handle = step.model.output_layer.register_forward_pre_hook(call_again)
    loss = step.masked(step())
    return loss + metrics[0]


# --- changes of a model --------------------------------------------------------------------------


def scaled_otherwise(model: Any) -> Any:
    """A decorator, which copies attributes, around the class's method."""
    stock = type(model)._scale_logits
    return patch.object(type(model), "_scale_logits", wraps(stock)(lambda self, z: stock(self, z.mul_(0.3))))


def parametrized(layer: Any) -> None:
    """By what depends on how often it was read."""
    torch.manual_seed(5)  # of the vectors that it starts from
    nn.utils.parametrizations.spectral_norm(layer)


def in_class(make: Callable[[type], type]) -> Change:
    """The class is replaced by a subclass, as if built of that."""
    return lambda model, _: setattr(model, "__class__", make(type(model)))


def of_layer(change: Callable[[Any], Any]) -> Change:
    return lambda model, _: change(model.output_layer)


def subclass(layer: Any, *mixins: type, name: str = "") -> None:
    kind = type(layer)
    layer.__class__ = type(name or kind.__name__, (*mixins, kind), {})


def with_a_detached_head(base: Any) -> type:
    """As miles detaches the weight of multi-token prediction."""

    def _postprocess(self: Any, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        detached = {"weight": self.output_layer.weight.detach()}
        logits, _ = torch.func.functional_call(self.output_layer, detached, (hidden_states,))
        return self.compute_language_model_loss(named["labels"], logits)

    return type("Own", (base,), {"_postprocess": _postprocess})


def outer_postprocess(base: Any) -> type:
    def _postprocess(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 2.0 * base._postprocess(self, *args, **kwargs)

    return type("Outer", (base,), {"_postprocess": _postprocess})


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


def extended(mixin: type, cap: float, model: Any, stack: contextlib.ExitStack, is_known: bool = True) -> None:
    """As Megatron-Bridge extends a head after the build: ``forward`` softcaps what the layer returns."""
    from megatron_fused_ce.adapter import output_layer

    names = [(known.__module__, known.forward.__qualname__) for known in (KnownMixin, OtherMixin)]
    caps = dict.fromkeys(names, "final_logit_softcapping")
    stack.enter_context(patch.dict(output_layer.SOFTCAPS, caps if is_known else {}))
    model.output_layer.config.final_logit_softcapping = cap
    subclass(model.output_layer, mixin)


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
        return logits + hidden @ self.down.t() @ self.up.t(), bias


def wrapped(model: Any, stack: contextlib.ExitStack) -> None:
    model.output_layer = LoRA(model.output_layer).to(model.output_layer.weight.device)


def hooked(register: str, hook: Callable[..., Any], **options: bool) -> Change:
    return of_layer(lambda layer: getattr(layer, register)(hook, **options))


def with_a_bias(layer: Any) -> None:
    layer.bias = nn.Parameter(torch.linspace(-1, 1, len(layer.weight), device=layer.weight.device))
    layer.skip_bias_add = False


def with_attributes(**attributes: Any) -> Change:
    """The layer has other ones than when it was built."""
    return of_layer(lambda layer: vars(layer).update(attributes))


def built_before_the_flag(model: Any, stack: contextlib.ExitStack) -> None:
    from megatron.core.tensor_parallel import layers

    from megatron_fused_ce.adapter.language_module import ADOPTED

    vars(model).pop(ADOPTED, None)
    model.output_layer.__class__ = layers.ColumnParallelLinear


def halved(made: Any) -> Any:
    return (made[0] * 0.5, *made[1:]) if isinstance(made, tuple) else made * 0.5


def half_of(layer: Any, given: Any, made: Any) -> Any:
    return halved(made)


def clamped(layer: Any, gradients: tuple[Tensor, Any]) -> tuple[Tensor, None]:
    return gradients[0].clamp(-1e-3, 1e-3), None


def shrunk_by_the_logits(layer: Any, given: tuple[Tensor], made: tuple[Tensor, Any]) -> tuple[Tensor]:
    return (given[0] * made[0].float().norm(),)


def forks_layer(kind: type) -> type:
    """In the core's own package, whose product is another."""
    body = {"_forward_impl": lambda self, *a, **k: halved(kind._forward_impl(self, *a, **k))}
    return type(kind.__name__, (kind,), body | {"__module__": "megatron.core.tensor_parallel.own_layers"})


def with_another_config(model: Any, stack: contextlib.ExitStack) -> None:
    model.config = copy.copy(model.config)
    vars(model.config).update(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")


def edited_before_another_is_built(model: Any, stack: contextlib.ExitStack) -> None:
    from megatron.core import tensor_parallel

    name = "vocab_parallel_cross_entropy"
    stock = getattr(tensor_parallel, name)
    stack.enter_context(patch.object(tensor_parallel, name, lambda *a, **k: halved(stock(*a, **k))))
    megatron.build(Model(), Rank(None, 0, 1, next(model.parameters()).device))


def casts_what_is_returned(model: Any, stack: contextlib.ExitStack) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    fully_shard(model.output_layer, mp_policy=policy)


def te_head(stack: contextlib.ExitStack) -> None:
    """A stand-in for Transformer Engine's, which GPTModel takes."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # as Transformer Engine's, not Megatron's
        return ColumnParallelLinear.forward(self, *args, **kwargs)

    head = type("TELMHeadColumnParallelLinear", (ColumnParallelLinear,), {"forward": forward})
    active = {"is_mxfp8_output_proj_active": lambda config: config.fp8_output_proj}
    stack.enter_context(patch.multiple(gpt_model, TELMHeadColumnParallelLinear=head, **active))


#: The output layer of Megatron's dev branch, with a loss on request, as a fork has it.
DEV = textwrap.dedent("""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False,
                    labels=None, reduction="none", ignore_index=-100):
            if output_cross_entropy_loss:
                raise NotImplementedError("a Blackwell GPU's kernel")
            weight = self.weight if weight is None else weight
            return super().forward(input_, weight, runtime_gather_output)

    class Other(LinearCrossEntropyModule):
        def forward(self, *given, **named):
            return super().forward(*given, **named)

    class GPTModel(gpt_model.GPTModel):
        def _postprocess(self, hidden_states, labels, **unused):
            asked = {"runtime_gather_output": None, "output_cross_entropy_loss": True, "labels": labels}
            return self.output_layer(input_=hidden_states, weight=None, **asked)
""")


def dev_digest() -> list[str]:
    from megatron_fused_ce.adapter import forms

    return [forms.digest(dict(forms.definitions(ast.parse(DEV)))["LinearCrossEntropyModule.forward"])]


def of_dev(
    model: Any, stack: contextlib.ExitStack, layer: str = "LinearCrossEntropyModule", as_loss: bool = False
) -> None:
    """``as_loss``: with the flag on the model asks its layer for the loss."""
    from megatron_fused_ce.adapter import forms, language_module, switch

    file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "dev.py")
    file.write_text(DEV)
    module = megatron.imported(file, forms.LINEAR)
    stack.enter_context(patch.dict(sys.modules, {forms.LINEAR: module}))
    model.output_layer.__class__ = getattr(module, layer)
    config = switch.active_config()
    if config is not None:
        delattr(model, language_module.ADOPTED)
        model.__class__ = module.GPTModel if as_loss else type(model)
        language_module.adopt_output_layer(model, config)


def as_devs(step: Step) -> Tensor:
    """Masked labels are ignored ones. FSDP knows the layer by its name, others by isinstance."""
    from megatron_fused_ce.adapter import forms

    layer, kind = step.model.output_layer, sys.modules[forms.LINEAR].LinearCrossEntropyModule
    assert isinstance(layer, kind) and type(layer).__name__ == kind.__name__
    assert type(copy.copy(layer)) is type(layer)
    hidden = torch.ones(SEQUENCE, BATCH, layer.input_size, device=step.ids.device)
    with pytest.raises(NotImplementedError, match="a Blackwell GPU's kernel"):  # of an unknown caller
        layer(hidden, output_cross_entropy_loss=True, labels=step.labels)
    step.labels = step.labels.masked_fill(step.mask == 0, -100)
    losses = step()
    assert type(step.model).__module__ != forms.LINEAR or not losses[step.mask == 0].any()
    return step.masked(losses)


BF16: dict[str, Any] = {"model": {"dtype": torch.bfloat16}, "bound": 3e-2}
FP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}
MXFP8: dict[str, Any] = {"model": {"dtype": torch.bfloat16, "extra": FP8}, "bound": 3e-2}
CALLED_HERE = f"is called by {__name__}"

ROWS = {
    # Megatron's own path through the model.
    "labels, changed in place": Row(use=in_place),
    "checkpoint": Row(use=checkpointed, fused=2),
    "a schedule's _postprocess": Row(use=postprocess_alone, families=GPT),
    "a frozen head": Row(change=of_layer(lambda layer: layer.weight.requires_grad_(False))),
    "functional_call of the model": Row(use=functional),
    "a sharding's class": Row(  # as FSDP2 puts around a layer's
        change=of_layer(lambda layer: subclass(layer, name=f"Sharded{type(layer).__name__}"))
    ),
    "set up twice": Row(change=lambda model, _: model.setup_embeddings_and_output_layer()),
    "a mask changed before the head": Row(use=mask_changed, options={"skip_masked": True}, families=GPT),
    # Models of other people around Megatron's; a loss of their own: test_known_forms.py.
    "a _postprocess around Megatron's": Row(change=in_class(outer_postprocess), families=GPT),
    "a decorated scale": stays(
        "are scaled by",
        lambda model, stack: stack.enter_context(scaled_otherwise(model)), since=(0, 19),
    ),
    # Logits in other hands.
    "an output processor behind mtp": stays(
        CALLED_HERE, use=through_processor, fused=2, model={"mtp": 2}, families=GPT, since=(0, 18)
    ),
    "no labels": stays("called without labels", use=no_labels),
    "gathered logits": stays("runtime_gather_output", use=gathered),
    "the layer called directly": stays(CALLED_HERE, use=directly, fused=1),
    # Layers that somebody has changed.
    "extended by a softcap": stays("its forward is", partial(extended, KnownMixin, 2.0, is_known=False)),
    "extended by a known softcap": Row(change=partial(extended, KnownMixin, 2.0)),
    "extended by a known softcap, changed": stays("its forward is", partial(extended, OtherMixin, 2.0)),
    "a known softcap and mup": Row(
        change=partial(extended, KnownMixin, 0.5), model={"extra": megatron.MUP}, since=(0, 19)
    ),
    "a known softcap, called within itself": Row(
        (), partial(extended, KnownMixin, 0.05), within_its_own_evaluation, fused=2
    ),
    "an instance's own forward": stays(  # as accelerate and CUDA graphs put it there
        "its forward is", of_layer(lambda layer: setattr(layer, "forward", partial(layer.forward)))
    ),
    "wrapped by LoRA": stays(f"is called by {__name__}.forward", wrapped),
    "functional_call of the head, detached": stays(
        "is called by torch", in_class(with_a_detached_head), families=GPT
    ),
    "a forward hook": stays("a forward hook", hooked("register_forward_hook", half_of)),
    "a forward pre-hook": Row(
        change=hooked("register_forward_pre_hook", lambda layer, given: (given[0] * 0.5, *given[1:]))
    ),
    "a backward pre-hook": stays(
        "a backward hook", hooked("register_full_backward_pre_hook", clamped), **BF16
    ),
    "a backward hook": stays(
        "a backward hook", hooked("register_full_backward_hook", shrunk_by_the_logits), **BF16
    ),
    "a pre-hook that is all that is trained": stays(
        "nothing but a forward pre-hook", use=trained_by_a_pre_hook, fused=1
    ),
    "a parametrization": stays("a parametrization of its output layer", of_layer(parametrized)),
    "compiled": stays("within torch.compile", use=compiled),
    "a bias given later": stays("a bias", of_layer(with_a_bias)),
    "grad_hidden not reduced any more": stays(
        "does not reduce grad_hidden", with_attributes(disable_grad_reduce=True, allreduce_dgrad=False)
    ),
    "fewer rows than the layer was built for": stays(
        "its layer was built for",
        of_layer(lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach()[:-3].clone()))),
    ),
    "an expert layer later": stays("an expert layer", with_attributes(explicit_expert_comm=True)),
    "float64": stays("are float64", lambda model, _: model.double()),
    # What its loss reads is another's.
    "a fork's layer of the core's name": stays(
        "stands in the place of one of Megatron's functions",
        of_layer(lambda layer: setattr(layer, "__class__", forks_layer(type(layer)))),
    ),
    "another config later": stays("its config names another loss", with_another_config),
    "another model later": stays(
        LATER, edited_before_another_is_built, adopted=False
    ),
    "an output layer in MXFP8": Row(
        ("TELMHeadColumnParallelLinear (--fp8-output-proj)",),
        fused=0, before=te_head, families=GPT, adopted=False, **MXFP8,
    ),
    "MXFP8, whose HybridModel has no such layer": Row(before=te_head, families=("hybrid",), **MXFP8),
    "FSDP2 that casts": stays("FSDP casts what the output layer returns", casts_what_is_returned, **BF16),
    "dev's layer": Row((CALLED_HERE,), of_dev, as_devs, stock=1, trust=dev_digest, families=GPT),
    "dev's layer, asked for the loss": Row(
        (CALLED_HERE,), partial(of_dev, as_loss=True), as_devs, stock=1, trust=dev_digest, families=GPT
    ),
    "dev's layer in a form that is not known": Row(
        ("digest ",), of_dev, fused=0, adopted=False, families=GPT
    ),
    "a class of dev's layer": Row(
        (".Other, whose ",), partial(of_dev, layer="Other"),
        fused=0, adopted=False, trust=dev_digest, families=GPT,
    ),
    # What nobody would apply.
    "a hook that drops arguments": Row(
        fused=0, raises="did not reach its forward", change=hooked(
            "register_forward_pre_hook", lambda layer, given, named: (given, {}), with_kwargs=True
        ),
    ),
    "an output layer in MXFP8 and an option": Row(
        fused=0, before=te_head, raises="TELMHeadColumnParallelLinear", options={"z_loss": 1e-3},
        families=GPT, **MXFP8,
    ),
    "a forward hook and an option": stays(
        "", hooked("register_forward_hook", half_of), raises="own loss knows nothing of it",
        options={"ignore_index": 7},
    ),
    "no labels and an option": stays(
        "", use=no_labels, raises="Megatron's own loss .* was called without labels",
        options={"ignore_index": 7},
    ),
    "LoRA and an option": stays(
        "", wrapped, raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3}
    ),
    "an output processor and an option": stays(
        "", use=through_processor, raises="ignore_index: Megatron's own loss",
        options={"ignore_index": -100}, families=GPT, since=(0, 18),
    ),
    "built before the flag": Row(
        ("it was built before megatron_fused_ce.enable()",), built_before_the_flag, fused=0, adopted=False
    ),
    "built before the flag, and an option": Row(
        fused=0, change=built_before_the_flag, raises="z_loss: Megatron's own loss", options={"z_loss": 1e-3}
    ),
}  # fmt: skip


@on_ranks(*RANKS)
@pytest.mark.parametrize("name", ROWS)
def test_off_against_on(rank: Rank, name):
    off_against_on(ROWS[name], rank)
