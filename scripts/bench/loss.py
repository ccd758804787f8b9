"""The per-token loss: this package's strategies, Megatron's own paths, and the peers of ``--peers``.

Every case ends in the same wgrad accumulator: ours add there themselves, Megatron's layer too where apex's
kernel is installed (gradient accumulation fusion), the others return a gradient in the weight's dtype that is
then added, as Megatron's DDP does. Where a library is absent its row says so. Peers were read in the sources
of torch 2.13, Transformer Engine 2.20.2, Liger 0.8.5, verl 0.9.1, Cut Cross Entropy 25.6.4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter.main_grad import open_grad_weight_for
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.outputs import differentiable_of
from megatron_fused_ce.ops.labels import SeveralLabels
from megatron_fused_ce.scripts.bench.cases import OVER_RANKS, Cell, parse_strategy
from megatron_fused_ce.scripts.bench.problem import MEGATRON, PEER, Case, Op, Outputs, Problem, World, bare

HAS_APEX = find_spec("fused_weight_gradient_mlp_cuda") is not None
STANDARD = "megatron-te"  # what a user without this package would take
CHUNK_TOKENS = 4096  # at least, of Liger's large chunks: the fastest on an H200 in its issue 1472
#: Of a case that computes the logits twice.
FOUR: dict[str, Any] = {"base": "roof-4", "products": 4, "over": {"over_roof": "roof"}}


def wide(logits: Tensor) -> Tensor:
    """In fp32 or wider, as losses are computed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Loss(Problem):
    def definition(self, kind: Any, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        logits = wide(hidden @ weight.t())
        return {"loss": F.cross_entropy(logits, self.labels[part], reduction="none")}

    def __init__(self, cell: Cell, *world_dtype: Any) -> None:
        super().__init__(cell, *world_dtype)
        with torch.no_grad():
            logits = (self.all_hidden[part] @ self.all_weight.t() for part in self.blocks())
            self._lse = torch.cat([wide(z).logsumexp(-1) for z in logits])  # over all ranks' rows

    def grad_logits(self, part: slice) -> Tensor:
        p = wide(self.all_hidden[part] @ self.weight.t()).sub_(self._lse[part, None]).exp_()
        column = self.labels[part, None] - self.rows.start
        here = (column >= 0) & (column < self.num_rows)
        p.scatter_add_(1, column.where(here, 0), -here.to(p.dtype))
        return p * self.grad_loss[part, None]


def config_of(text: str, **options: Any) -> FusedCEConfig:
    """Of ``NAME[:C][/BACKEND][/MERGE]``; ``options`` come first."""
    return FusedCEConfig(**(parse_strategy(text) | options))


def of_config(world: World, name: str, config: FusedCEConfig) -> Case:
    """A training step of this package with these options."""
    more, told = FOUR if config.strategy == "recompute" else {}, dict[str, Any]()
    more = {**more, "over": {"over_te": STANDARD, **more.get("over", {})}}
    return Case(name, run=partial(loss_of, world, config, told), is_exact=True, told=told, **more)


def loss_of(
    world: World, config: FusedCEConfig, told: dict[str, Any], problem: Problem, **more: Any
) -> Outputs:
    """The head's outputs for ``problem``, and in ``told`` what the package chose; ``more`` is `Call`'s."""
    weights = problem.token_weights if config.strategy in ("auto", "grad_in_forward") else None
    call: dict[str, Any] = {"labels": problem.labels, "token_weights": weights, "config": config}
    call |= {"tp_group": world.group if world.size > 1 else None, "vocab_start": problem.rows.start}
    call |= {"sequence_parallel": world.sequence_parallel}
    call |= {"open_grad_weight": open_grad_weight_for(problem.weight, True)}
    made = linear_cross_entropy(Call(problem.hidden, problem.weight, **(call | more)))
    if not told:
        plan, peak = made.plan, round(made.plan.predicted_peak_bytes / 2**20, 1)
        told |= {"plan": plan.strategy, "chunk_tokens": plan.capacity, "predicted_peak_mib": peak}
        told["logits_backend"] = made.logits_backend
    return made.outputs


# --- Megatron's output layer, with its cross entropies and Transformer Engine's ---------------------


@cache
def library(name: str) -> Any:
    """A module that may be absent; a look-up after the first time, for the host's time is measured."""
    return import_module(name)


def _megatron(loss: Callable[..., Any], problem: Problem) -> Any:
    # Without grad_added_to_main_grad Megatron returns None for the weight, as ours does here: the dummy
    # that DDP waits for would cost both the same.
    layers, world = library("megatron.core.tensor_parallel.layers"), problem.world
    logits = layers.linear_with_grad_accumulation_and_async_allreduce(
        *(problem.hidden.unsqueeze(1), problem.weight, None),
        gradient_accumulation_fusion=HAS_APEX and problem.main_grad is not None,
        allreduce_dgrad=world.size > 1 and not world.sequence_parallel,
        sequence_parallel=world.sequence_parallel,
        tp_group=world.group,
    )
    return loss(logits, problem.labels.unsqueeze(1)).view(-1)


def megatron(world: World) -> list[Case]:
    """Its layer with each loss, ``(logits [T, 1, V], labels [T, 1]) -> loss [T, 1]``."""

    def loss(module: str, function: str, *more: Any) -> Callable[..., Any]:
        return lambda *of_logits: getattr(library(module), function)(*of_logits, *more)

    core, group = "megatron.core", world.group
    te = "transformer_engine.pytorch.cross_entropy"
    losses = {
        "unfused": loss(f"{core}.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
        "native": loss(f"{core}.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", group),
        "te": loss(te, "parallel_cross_entropy", 0.0, False, group),
    }
    how: dict[str, Any] = {"why_not": needs_gpu(world), "family": MEGATRON}
    return [foreign(f"megatron-{name}", partial(_megatron, of), **how) for name, of in losses.items()]


# --- peers -----------------------------------------------------------------------------------------


def needs_gpu(world: World) -> str | None:
    """Why a case with kernels of another library does not run."""
    return None if world.on_gpu else "needs a GPU"


def foreign(name: str, loss: Callable[[Problem], Any], why_not: str | None, **more: Any) -> Case:
    """A case of a loss ``[T]``, or of the sum of losses."""
    return Case(name, run=lambda problem: {"loss": loss(problem).float()}, why_not=why_not, **more)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For static shapes; past dynamo's limit ``fullgraph`` raises and runs no eager."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def _linear_then_ce(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def liger_chunk_budget(T: int, H: int, V: int) -> int:
    """The smallest power of two for Liger's ``chunk_mem_const`` that makes chunks of `CHUNK_TOKENS` or more;
    its chunk is ``next_pow2(ceil(T / ceil(V / (budget * H))))`` tokens."""
    tokens = ((1 << n, -(-T // -(-V // (H << n)))) for n in count())
    return next(n for n, t in tokens if 1 << (t - 1).bit_length() >= min(T, CHUNK_TOKENS))


def _liger(large: bool, problem: Problem) -> Any:
    """Liger's Triton chunks: its default, or `CHUNK_TOKENS` or more; ``grad_weight`` is summed in its dtype.
    `liger_kernel.ops` itself may be swapped by LIGER_KERNEL_IMPL."""
    module = library("liger_kernel.ops.fused_linear_cross_entropy")
    sizes = problem.num_tokens, problem.cell.hidden_size, problem.num_rows
    budget = liger_chunk_budget(*sizes) if large else 1
    return module.LigerFusedLinearCrossEntropyFunction.apply(
        *(problem.hidden, problem.weight, problem.labels, None, None, -100, 0.0, 0.0, "sum", None),
        *(False, None, False, False, False),  # z-loss, fp32 sums, token scaling, metrics
        *(None, None, budget),  # `apply` takes no names
    )[0]


def _cce(impl: str, problem: Problem) -> Any:
    """Cut Cross Entropy: ``cce``, its default, leaves out tiles whose gradients are all below 2^-12,
    ``cce_exact`` none."""
    operands = problem.hidden, problem.weight, problem.labels
    return library("cut_cross_entropy").linear_cross_entropy(*operands, reduction="none", impl=impl)


def verl(hidden: Tensor, problem: Problem, temperature: float = 1.0, group: Any = None) -> Any:
    """verl's log-probabilities and entropy: a Triton forward, a backward in slices of the vocabulary."""
    module = library("verl.utils.kernel.linear_cross_entropy")
    return module.linear_cross_entropy(hidden, problem.weight, problem.labels, temperature, "none", group)


def _verl_tp(problem: Problem) -> Any:
    """verl knows no sequence parallelism, and leaves each rank its share of ``grad_hidden``: gather and
    reduction are Megatron's and count as verl's.

    Collectives: with sequence parallelism an all-gather here and a reduce-scatter in the backward, without
    it an all-reduce in the backward.
    """
    mappings, group = library("megatron.core.tensor_parallel.mappings"), problem.world.group
    if problem.world.parts > 1:
        whole = mappings.gather_from_sequence_parallel_region(problem.hidden, True, group)
    else:
        whole = mappings.copy_to_tensor_model_parallel_region(problem.hidden, group)
    return -verl(whole, problem, group=group)[0]


#: By their names; a loss whose gradients are made in the forward takes one upstream gradient for all tokens.
SUM: dict[str, Any] = {"grads": (("loss", "one_upstream"),)}
KNOWN: dict[str, tuple[Callable[[Problem], Any], dict[str, Any]]] = {
    "torch-compile": (lambda p: compiled(_linear_then_ce)(p.hidden, p.weight, p.labels), {}),
    "liger": (partial(_liger, False), SUM),
    "liger-large-chunks": (partial(_liger, True), SUM),
    "cce": (partial(_cce, "cce"), FOUR),
    "cce-exact": (partial(_cce, "cce_exact"), FOUR),
    "verl-tp": (_verl_tp, FOUR),
}


def peers(world: World, names: list[str]) -> list[Case]:
    """Those that are named, with the reason where one cannot run on so many ranks."""
    unfit, found = "needs several ranks" if world.size == 1 else "knows no tensor parallelism", list[Case]()
    for name in names:
        why_not = needs_gpu(world) or (unfit if (name in OVER_RANKS) == (world.size == 1) else None)
        found.append(foreign(name, KNOWN[name][0], why_not, family=PEER, **KNOWN[name][1]))
    return found


# --- what each option costs beside the plain loss --------------------------------------------------

PLAIN, TEACHER_CLASSES, PADDING = "plain", 64, 200  # the last: columns of a padded vocabulary


class Option(NamedTuple):
    config: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    teacher: bool = False


def options_of(vocab: int) -> dict[str, Option]:
    """Every option by its name."""
    softcap = ("logit_softcap", 30.0)
    return {
        PLAIN: Option(),
        "logit scale": Option((("logit_scale", 0.5),)),
        "ignore_index": Option((("ignore_index", -100),)),
        "z-loss": Option((("z_loss", 1e-4),)),
        "masked padding": Option((("true_vocab_size", vocab - PADDING),)),
        "softcap": Option((softcap,)),
        "softcap, rows": Option((softcap, ("logits_backend", "gemm_rows"))),
        "label smoothing": Option((("label_smoothing", 0.1),)),
        "logits rounded": Option((("logit_precision", "activations"),)),
        "accuracy": Option(outputs=("correct",)),
        "lse, log-probability": Option(outputs=("lse", "log_prob")),
        "predicted ids": Option(outputs=("predicted",)),
        "entropy": Option(outputs=("entropy",)),
        "log-probability with gradient": Option(outputs=("log_prob",), differentiable=True),
        "entropy with gradient": Option(outputs=("entropy",), differentiable=True),
        f"teacher's top {TEACHER_CLASSES}": Option(teacher=True),
    }


class WithOptions(Loss):
    def __init__(self, cell: Cell, *world_dtype: Any) -> None:
        super().__init__(cell, *world_dtype)
        T = self.num_tokens
        self.labels %= cell.vocab - PADDING
        # Not the loss's: that and the log-probability's would cancel, and zeros make products fast.
        self.other = self.uniform(T)
        self.teacher = self.ids(T, TEACHER_CLASSES), self.normal(T, TEACHER_CLASSES).log_softmax(-1)

    def definition(self, kind: Option, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        config = FusedCEConfig(**dict(kind.config))
        z, cap = wide(hidden @ weight.t()) * config.logit_scale, config.logit_softcap
        z = (z if cap is None else cap * torch.tanh(z / cap))[:, : config.true_vocab_size]
        smoothing = config.label_smoothing * z.shape[1] / (z.shape[1] - 1)
        loss = F.cross_entropy(z, self.labels[part], reduction="none", label_smoothing=smoothing)
        lse, log_p = z.logsumexp(-1), z.log_softmax(-1)
        if kind.teacher:
            ids, log_probs = (of[part] for of in self.teacher)
            loss = -(log_probs.to(z.dtype).exp() * log_p.gather(1, ids)).sum(-1)
        loss = loss + (config.z_loss or 0.0) * lse**2
        found = {"loss": loss, "lse": lse, "log_prob": log_p.gather(1, self.labels[part, None])[:, 0]}
        return found | ({"entropy": -(log_p.exp() * log_p).sum(-1)} if "entropy" in kind.outputs else {})


def _with_option(world: World, name: str, option: Option, strategy: str) -> Case:
    config, told = config_of(strategy, **dict(option.config)), dict[str, Any]()

    def run(problem: WithOptions) -> Outputs:
        more: dict[str, Any] = {"outputs": option.outputs}
        if option.differentiable:
            more["differentiable"] = differentiable_of(option.outputs)
        if option.teacher:
            labels = torch.full_like(problem.labels, -1)
            more |= {"other_targets": SeveralLabels(*problem.teacher), "labels": labels}
        return loss_of(world, config, told, problem, **more)

    grads = [("loss", "grad_loss"), *((name, "other") for name in option.outputs * option.differentiable)]
    own, base = f"{name}, {strategy}", f"{PLAIN}, {strategy}"
    return Case(own, run=run, kind=option, grads=tuple(grads), base=base)


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    """The strategies, Megatron's paths, the peers that are asked for."""
    own = [of_config(world, text, config_of(text)) for text in given.strategies]
    return [*own, *megatron(world), *peers(world, given.peers)]


def option_cases(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    """Each option with every strategy that knows it."""
    return [
        _with_option(world, name, option, strategy)
        for strategy, (name, option) in product(given.strategies, options_of(cell.vocab).items())
        if not (strategy.startswith("grad_in_forward") and option.differentiable)
    ]


OP = Op(Loss, cases_of, (bare("roof", 3), bare("roof-4", 4)))
OPTIONS = Op(WithOptions, option_cases)
