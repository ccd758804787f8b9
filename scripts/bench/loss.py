"""The per-token loss: this package's strategies and options, Megatron's own paths; the peers are in peers.py.

Every case ends in the same wgrad accumulator: ours add there themselves, Megatron's layer too where apex's
kernel is installed (gradient accumulation fusion), the others return a gradient in the weight's dtype that is
then added, as Megatron's DDP does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.outputs import differentiable_of
from megatron_fused_ce.ops.labels import SeveralLabels
from megatron_fused_ce.scripts.bench.cases import UNWEIGHTED, Cell, parse_strategy
from megatron_fused_ce.scripts.bench.op import MEGATRON, Case, Op, bare, why_not
from megatron_fused_ce.scripts.bench.peers import dynamo_for_many_shapes, peers, te_cross_entropy
from megatron_fused_ce.scripts.bench.problem import MIB, UPSTREAM_SCALAR, Outputs, Problem, World

#: What a user without this package would take: Megatron's layer, Transformer Engine's loss.
STANDARD = "megatron-te"


def wide(logits: Tensor) -> Tensor:
    """In fp32 or wider, as losses are computed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Loss(Problem):
    def definition(self, kind: Any, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        logits = wide(hidden @ weight.t())
        return {"loss": F.cross_entropy(logits, self.labels[part], reduction="none")}

    def __init__(self, cell: Cell, world: World, **options: Any) -> None:
        super().__init__(cell, world, **options)
        with torch.no_grad():
            logits = (self.all_hidden[part] @ self.all_weight.t() for part in self.blocks())
            self._lse = torch.cat([wide(z).logsumexp(-1) for z in logits])  # over all ranks' rows

    def grad_logits(self, part: slice) -> Tensor:
        p = wide(self.all_hidden[part] @ self.weight.t()).sub_(self._lse[part, None]).exp_()
        column = self.labels[part, None] - self.rows.start
        here = (column >= 0) & (column < self.num_rows)
        p.scatter_add_(1, column.where(here, 0), -here.to(p.dtype))
        return p * self.grad_loss[part, None]


# --- this package ----------------------------------------------------------------------------------


def config_of(text: str, **options: Any) -> FusedCEConfig:
    """Of ``NAME[:C][/PASS][/MERGE]``; ``options`` come first."""
    return FusedCEConfig(**(parse_strategy(text) | options))


def ours(world: World, text: str, memory_mb: int | None = None) -> Case:
    """This package with a strategy ``NAME[:C][/PASS][/MERGE]``, ``auto`` within ``memory_mb``."""
    budget = memory_mb if parse_strategy(text)["strategy"] == "auto" else None
    more = {"token_weights": None} if text.endswith(UNWEIGHTED) else {}
    return of_config(world, text, config_of(text, memory_mb=budget), **more)


def of_config(world: World, name: str, config: FusedCEConfig, **more: Any) -> Case:
    """A training step of this package with these options; ``more`` is `Call`'s."""
    told: dict[str, Any] = {}
    four = config.strategy == "recompute"
    return Case(
        name,
        run=partial(loss_of, world, config, told, **more),
        base="roof-4" if four else "roof",
        products=4 if four else 3,
        over={"over_te": STANDARD, "over_roof": "roof"} if four else {"over_te": STANDARD},
        is_exact=True,
        told=told,
    )


def loss_of(
    world: World, config: FusedCEConfig, told: dict[str, Any], problem: Problem, **more: Any
) -> Outputs:
    """The head's outputs for ``problem``, and in ``told`` what the package chose for it."""
    weights = problem.token_weights if config.strategy in ("auto", "grad_in_forward") else None
    call: dict[str, Any] = {
        "labels": problem.labels,
        "tp_group": world.group if world.size > 1 else None,
        "sequence_parallel": world.sequence_parallel,
        "token_weights": weights,
        "vocab_start": problem.rows.start,
        "config": config,
        "open_grad_weight": problem.open_grad_weight,
    }
    made = linear_cross_entropy(Call(problem.hidden, problem.weight, **(call | more)))
    if "plan" not in told:
        plan, peak = made.plan, round(made.plan.predicted_peak_bytes / MIB, 1)
        told |= {"chunk_tokens": plan.capacity, "logits_backend": made.logits_backend}
        told |= {"plan": plan.strategy, "predicted_peak_mib": peak}
    return made.outputs


# --- Megatron --------------------------------------------------------------------------------------


def megatron(world: World) -> list[Case]:
    """Megatron's output layer with each of its cross entropies, and with Transformer Engine's."""
    names = ("unfused", "native", "te", "te-overwrite")
    if not (world.has_megatron and world.on_gpu):
        absent = "Megatron-LM is not installed" if world.on_gpu else "needs a GPU"
        return [Case(f"megatron-{name}", MEGATRON, why_not=absent) for name in names]
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    group, has_apex = world.group, find_spec("fused_weight_gradient_mlp_cuda") is not None
    dynamo_for_many_shapes().automatic_dynamic_shapes = False  # as in training, where shapes are static

    # Each makes (logits [T, 1, V], labels [T, 1]) -> loss [T, 1].
    losses: dict[str, Callable[[], Any]] = {
        "unfused": lambda: vocab_parallel_cross_entropy,
        "native": lambda: lambda *given: fused_vocab_parallel_cross_entropy(*given, group),
        "te": partial(te_cross_entropy, False, group),
        "te-overwrite": partial(te_cross_entropy, True, group),
    }
    cases = []
    for name, make in losses.items():
        reason = why_not(make)
        run = partial(_megatron_loss, world, has_apex, None if reason else make())
        cases.append(Case(f"megatron-{name}", MEGATRON, run, why_not=reason))
    return cases


def _megatron_loss(world: World, has_apex: bool, loss_of: Any, problem: Problem) -> Outputs:
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    weight: Any = problem.weight
    # Without grad_added_to_main_grad Megatron returns None for the weight, as ours does here: the dummy
    # that DDP waits for would cost both the same.
    fused = has_apex and problem.main_grad is not None
    if fused:
        weight.main_grad = problem.main_grad
    logits = linear_with_grad_accumulation_and_async_allreduce(
        problem.hidden.unsqueeze(1),
        weight,
        None,
        gradient_accumulation_fusion=fused,
        allreduce_dgrad=world.size > 1 and not world.sequence_parallel,
        sequence_parallel=world.sequence_parallel,
        tp_group=world.group,
    )
    return {"loss": loss_of(logits, problem.labels.unsqueeze(1)).view(-1)}


# --- the options of the loss -----------------------------------------------------------------------

PLAIN = "plain"
TEACHER_CLASSES = 64
MASKED_SHARES = (0.25, 0.5, 0.75)
#: Columns of a padded vocabulary.
PADDING = 200


class Option(NamedTuple):
    """What is asked for beside the plain loss."""

    config: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    teacher: bool = False
    masked: float = 0.0  # share of the tokens


def options_of(vocab: int) -> dict[str, Option]:
    """Every option by its name."""
    skip, softcap = (("skip_masked", True),), ("logit_softcap", 30.0)
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
        "log-probability with gradient": Option((), ("log_prob",), True),
        "entropy with gradient": Option((), ("entropy",), True),
        f"teacher's top {TEACHER_CLASSES}": Option(teacher=True),
        **{f"{share:.0%} masked": Option(skip, masked=share) for share in MASKED_SHARES},
        "nothing masked, skipping on": Option(skip),
    }


class WithOptions(Loss):
    def __init__(self, cell: Cell, world: World, **options: Any) -> None:
        super().__init__(cell, world, **options)
        T, chance = self.num_tokens, self.uniform(cell.num_tokens)
        self.labels %= cell.vocab - PADDING
        # Not the loss's: that and the log-probability's would cancel, and zeros make products fast.
        self.other = self.uniform(T)
        log_probs = self.normal(T, TEACHER_CLASSES).log_softmax(-1)
        self.teacher = self.ids(T, TEACHER_CLASSES), log_probs
        self.weights: dict[float, Tensor] = {}  # by the share that is masked
        for share in (0.0, *MASKED_SHARES):
            self.weights[share] = self.token_weights.clamp(min=0.5).masked_fill(chance < share, 0.0)
            setattr(self, f"grad_loss_{share}", UPSTREAM_SCALAR * self.weights[share])
        # What belongs to a step's input (the mask's count too) is made outside of it.
        self.unmasked = {s: tokens.count(w.reshape(1, -1), None) for s, w in self.weights.items()}

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
        loss = loss.masked_fill(self.weights[kind.masked][part] == 0, 0.0) if config.skip_masked else loss
        log_prob = log_p.gather(1, self.labels[part, None])[:, 0]
        found = {"loss": loss, "lse": lse, "log_prob": log_prob}
        return found | ({"entropy": -(log_p.exp() * log_p).sum(-1)} if "entropy" in kind.outputs else {})


def _with_option(world: World, name: str, option: Option, strategy: str) -> Case:
    config, told = config_of(strategy, **dict(option.config)), dict[str, Any]()

    def run(problem: WithOptions) -> Outputs:
        more: dict[str, Any] = {"outputs": option.outputs}
        if option.differentiable:
            more["differentiable"] = differentiable_of(option.outputs)
        if option.teacher:
            several = SeveralLabels(*problem.teacher)
            more |= {"other_targets": several, "labels": torch.full_like(problem.labels, -1)}
        if config.skip_masked:
            share = option.masked
            more |= {"token_weights": problem.weights[share], "unmasked": problem.unmasked[share]}
        return loss_of(world, config, told, problem, **more)

    grads = [("loss", f"grad_loss_{option.masked}" if config.skip_masked else "grad_loss")]
    grads += [(output, "other") for output in option.outputs] * option.differentiable
    base = f"{PLAIN}, {strategy}"
    return Case(f"{name}, {strategy}", run=run, kind=option, grads=tuple(grads), base=base)


# --- the rows --------------------------------------------------------------------------------------


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    """The strategies, Megatron's paths, and with ``--peers`` all of them or those named."""
    found = [ours(world, text, given.memory_mb) for text in given.strategies]
    if given.megatron:
        found += megatron(world)
    if given.peers is not None:
        found += peers(world, given.peers or None)
    return found


def option_cases(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    return [
        _with_option(world, name, option, strategy)
        for strategy in given.strategies
        for name, option in options_of(cell.vocab).items()
        if not (strategy.startswith("grad_in_forward") and option.differentiable)
    ]


OP = Op(Loss, cases_of, (bare("roof", 3), bare("roof-4", 4, again=True)), over_ranks=True)
OPTIONS = Op(WithOptions, option_cases)
