"""What a divergence between a teacher and a student costs over the GEMMs that it cannot do without.

The four GEMMs are both sides' logits, ``grad_hidden`` and ``grad_weight``, by cuBLAS, on a true gradient of
the student's logits. Beside ours: ModelOpt's ``LogitsKLLoss`` on whole logits, eager and compiled, TRL's
chunked divergence, Liger's fused linear JSD, which takes one upstream gradient for all.
"""

from __future__ import annotations

import argparse
import math
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.distillation.loss import fused_linear_distillation
from megatron_fused_ce.kernels.records import DIVERGENCES
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy
from megatron_fused_ce.scripts.bench.loss import config_of, wide
from megatron_fused_ce.scripts.bench.op import PEER, Case, Op, bare, why_not
from megatron_fused_ce.scripts.bench.peers import dynamo_for_many_shapes
from megatron_fused_ce.scripts.bench.problem import UPSTREAM_SCALAR, Outputs, Problem, World

GEMMS = "four GEMMs"
#: TRL's and Liger's one number: 0 and 1 are the KL divergences.
BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
#: The teacher's H where it is not the student's: a 70B model teaches a 1B model.
TEACHER_HIDDEN = {"llama-3.2-1b": 8192}
#: Noise of the teacher's logits beside the student's: 0.13 nats of divergence.
NOISE = 0.5


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each token from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


class Distillation(Problem):
    """With a frozen teacher, whose logits are the student's and some noise; random upstream gradients."""

    def __init__(self, cell: Cell, world: World, **options: Any) -> None:
        super().__init__(cell, world, **options)
        (T, H), dtype = self.hidden.shape, self.dtype
        teacher_size = TEACHER_HIDDEN.get(cell.shape, H)
        shared = min(H, teacher_size)
        self.teacher_hidden = self.normal(T, teacher_size, dtype=dtype)
        self.teacher_hidden[:, :shared] = self.hidden.detach()[:, :shared]
        self.teacher_weight = self.normal(self.num_rows, teacher_size, dtype=dtype)
        self.teacher_weight *= NOISE / math.sqrt(teacher_size)
        self.teacher_weight[:, :shared] += self.weight.detach()[:, :shared]
        self.promised = self.normal(T)  # token weights
        self.upstream = UPSTREAM_SCALAR * self.promised
        self.one_upstream = torch.ones((), device=world.device)

    def definition(self, kind: str, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        student = wide(hidden @ weight.t()).log_softmax(-1)
        of_teacher = self.teacher_hidden[part].to(hidden.dtype) @ self.teacher_weight.t().to(hidden.dtype)
        teacher = wide(of_teacher).log_softmax(-1)
        if kind == "jsd":
            middle = torch.logaddexp(student, teacher) - math.log(2.0)
            return {"loss": (_kl(teacher, middle) + _kl(student, middle)) / 2}
        return {"loss": _kl(teacher, student) if kind == "forward_kl" else _kl(student, teacher)}

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.teacher_hidden, self.teacher_weight), *super().sides()]

    def grad_logits(self, part: slice) -> Tensor:
        """Of the forward KL divergence."""
        teacher, student = (wide(hidden[part] @ weight.t()).softmax(-1) for hidden, weight in self.sides())
        return student.sub_(teacher) * self.upstream[part, None]


def _ours(strategy: str, divergence: str, logit_precision: str, problem: Distillation) -> Outputs:
    known = parse_strategy(strategy)["strategy"] in ("auto", "grad_in_forward")
    made = fused_linear_distillation(
        problem.hidden,
        problem.weight,
        problem.teacher_hidden,
        problem.teacher_weight,
        divergence=divergence,
        token_weights=problem.promised if known else None,
        config=config_of(strategy, logit_precision=logit_precision),
    )
    return {"loss": made.loss}


# --- others ----------------------------------------------------------------------------------


@cache
def _modelopt(reverse: bool, compiled: bool) -> Any:
    """ModelOpt's ``LogitsKLLoss`` of one rank."""
    module: Any = import_module("modelopt.torch.distill.plugins.megatron")
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    criterion = module.LogitsKLLoss(config, 1.0, reverse)
    if not compiled:
        return criterion
    dynamo_for_many_shapes()
    return torch.compile(criterion, dynamic=False)


def _whole_logits(divergence: str, compiled: bool, problem: Distillation) -> Outputs:
    with torch.no_grad():
        teacher = F.linear(problem.teacher_hidden, problem.teacher_weight).unsqueeze(1)
    student = F.linear(problem.hidden, problem.weight).unsqueeze(1)
    loss = _modelopt(divergence == "reverse_kl", compiled)(student, teacher)
    return {"loss": (loss if isinstance(loss, Tensor) else loss[0]).flatten()}


TRL, LIGER = "trl.kernels.chunked_divergence", "liger_kernel.ops.fused_linear_jsd"


def _trl(divergence: str, problem: Distillation) -> Outputs:
    student = (problem.hidden, problem.weight, None)
    teacher = (problem.teacher_hidden, problem.teacher_weight, None)
    function: Any = import_module(TRL).ChunkedDivergenceFunction
    return {"loss": function.apply(*student, *teacher, BETAS[divergence])[0]}


def _liger(divergence: str, problem: Distillation) -> Outputs:
    """Its mean over the tokens, times their number: the sum."""
    sides = (problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)
    module: Any = import_module(LIGER)
    loss = module.LigerFusedLinearJSDFunction.apply(*sides, None, BETAS[divergence])
    return {"loss": loss.float() * problem.num_tokens}


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    found = []

    def row(divergence: str, name: str, run: Any, upstream: str = "upstream", **more: Any) -> None:
        grads = (("loss", upstream),)
        name = f"{divergence}, {name}"
        found.append(Case(name, run=run, kind=divergence, grads=grads, base=GEMMS, products=4, **more))

    no_trl, no_liger = (why_not(partial(import_module, name)) for name in (TRL, LIGER))
    no_modelopt = why_not(partial(_modelopt, False, False))
    for divergence in DIVERGENCES:
        for name in given.strategies:
            row(divergence, name, partial(_ours, name, divergence, "auto"))
        row(divergence, "store:4096, fp32 logits", partial(_ours, "store:4096", divergence, "fp32"))
        for compiled in (False, True) if divergence != "jsd" else ():
            run, name = partial(_whole_logits, divergence, compiled), "compiled" if compiled else "eager"
            row(divergence, f"ModelOpt {name}", run, family=PEER, why_not=no_modelopt)
        row(divergence, "TRL", partial(_trl, divergence), family=PEER, why_not=no_trl)
    for divergence in ("forward_kl", "jsd"):
        run = partial(_liger, divergence)
        row(divergence, "Liger", run, "one_upstream", family=PEER, why_not=no_liger)
    return found


OP = Op(Distillation, cases_of, (bare(GEMMS, 4),), wgrad_accumulator="returned")
