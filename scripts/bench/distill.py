"""What a divergence between a teacher and a student costs over the GEMMs that it cannot do without.

The four GEMMs are both sides' logits, ``grad_hidden`` and ``grad_weight``, by cuBLAS, on a true gradient of
the student's logits. Beside ours: plain PyTorch on whole logits, compiled; Liger's fused linear JSD, which
takes one upstream gradient for all.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.distillation.loss import fused_linear_distillation
from megatron_fused_ce.kernels.records import DIVERGENCES
from megatron_fused_ce.scripts.bench import problem as bench
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy
from megatron_fused_ce.scripts.bench.loss import compiled, config_of, library, needs_gpu, wide

GEMMS = "four GEMMs"
BETAS = {"forward_kl": 0.0, "jsd": 0.5}  # of Liger's JSD
TEACHER_HIDDEN = {"llama-3.2-1b": 8192}  # H of a teacher that is not the student's: a 70B model's
NOISE = 0.5  # of the teacher's logits beside the student's: 0.13 nats of divergence


def divergence_of(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """``[t]`` of logits ``[t, V]``, in fp32 or wider."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    student, teacher = wide(student).log_softmax(-1), wide(teacher).log_softmax(-1)
    if kind == "jsd":
        middle = torch.logaddexp(student, teacher) - math.log(2.0)
        return (kl(teacher, middle) + kl(student, middle)) / 2
    return kl(teacher, student) if kind == "forward_kl" else kl(student, teacher)


class Distillation(bench.Problem):
    """With a frozen teacher, whose logits are the student's and some noise; random upstream gradients."""

    wgrad_accumulator = "returned"

    def __init__(self, cell: Cell, *world_dtype: Any) -> None:
        super().__init__(cell, *world_dtype)
        (T, H), dtype = self.hidden.shape, self.dtype
        size = TEACHER_HIDDEN.get(cell.shape, H)
        shared = min(H, size)
        self.teacher_hidden = self.normal(T, size, dtype=dtype)
        self.teacher_hidden[:, :shared] = self.hidden.detach()[:, :shared]
        self.teacher_weight = self.normal(self.num_rows, size, dtype=dtype).mul_(NOISE / math.sqrt(size))
        self.teacher_weight[:, :shared] += self.weight.detach()[:, :shared]
        self.promised = self.normal(T)  # token weights
        self.upstream = bench.UPSTREAM_SCALAR * self.promised
        self.one_upstream = torch.ones_like(self.promised[0])

    def definition(self, kind: str, hidden: Tensor, weight: Tensor, part: slice) -> bench.Outputs:
        teacher = self.teacher_hidden[part].to(hidden.dtype) @ self.teacher_weight.t().to(hidden.dtype)
        return {"loss": divergence_of(kind, hidden @ weight.t(), teacher)}

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.teacher_hidden, self.teacher_weight), *super().sides()]

    def grad_logits(self, part: slice) -> Tensor:
        """Of the forward KL divergence."""
        teacher, student = (wide(hidden[part] @ weight.t()).softmax(-1) for hidden, weight in self.sides())
        return student.sub_(teacher) * self.upstream[part, None]


def _ours(strategy: str, divergence: str, logit_precision: str, problem: Distillation) -> bench.Outputs:
    known = parse_strategy(strategy)["strategy"] in ("auto", "grad_in_forward")
    made = fused_linear_distillation(
        *(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight),
        divergence=divergence,
        token_weights=problem.promised if known else None,
        config=config_of(strategy, logit_precision=logit_precision),
    )
    return {"loss": made.loss}


def _compiled(divergence: str, problem: Distillation) -> bench.Outputs:
    with torch.no_grad():
        teacher = F.linear(problem.teacher_hidden, problem.teacher_weight)
    student = F.linear(problem.hidden, problem.weight)
    return {"loss": compiled(divergence_of)(divergence, student, teacher)}


def _liger(divergence: str, problem: Distillation) -> bench.Outputs:
    """Its mean over the tokens, times their number: the sum."""
    sides = (problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)
    function = library("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
    return {"loss": function.apply(*sides, None, BETAS[divergence]).float() * problem.num_tokens}


def cases_of(given: argparse.Namespace, cell: Cell, world: bench.World) -> list[bench.Case]:
    found, of_peer = list[bench.Case](), {"family": bench.PEER, "why_not": needs_gpu(world)}

    def row(divergence: str, name: str, run: Any, upstream: str = "upstream", **more: Any) -> None:
        more |= {"kind": divergence, "grads": (("loss", upstream),), "base": GEMMS, "products": 4}
        found.append(bench.Case(f"{divergence}, {name}", run=run, **more))

    for kind in DIVERGENCES:
        for name in given.strategies:
            row(kind, name, partial(_ours, name, kind, "auto"))
        row(kind, "store:4096, fp32 logits", partial(_ours, "store:4096", kind, "fp32"))
        if "torch-compile" in given.peers:
            row(kind, "torch-compile", partial(_compiled, kind), "upstream", **of_peer)
        if "liger" in given.peers and kind in BETAS:
            row(kind, "liger", partial(_liger, kind), "one_upstream", **of_peer)
    return found


OP = bench.Op(Distillation, cases_of, (bench.bare(GEMMS, 4),))
