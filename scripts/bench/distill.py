"""What a divergence between a teacher and a student costs over the GEMMs that it cannot do without.

`python -m scripts.bench --preset distill`; checks and times: rows.py. The four GEMMs are both sides' logits,
``grad_hidden`` and ``grad_weight``, by cuBLAS, on a true gradient of the student's logits. Beside ours: the
formula of ModelOpt's ``LogitsKLLoss`` on whole logits, eager and compiled (ModelOpt's own class where it
imports), TRL's chunked divergence, Liger's fused linear JSD, which takes one upstream gradient for all.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.kernels.records import DIVERGENCES
from megatron_fused_ce.op import fused_linear_distillation
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy
from megatron_fused_ce.scripts.bench.peers import one_line
from megatron_fused_ce.scripts.bench.problem import MIB, Problem
from megatron_fused_ce.scripts.bench.rows import Case, Mark, Outputs, Subject
from megatron_fused_ce.scripts.bench.variants import config_of

GEMMS = "four GEMMs"
#: TRL's and Liger's one number: 0 and 1 are the KL divergences.
BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
#: The teacher's H where it is not the student's: a 70B model teaches a 1B model.
TEACHER_HIDDEN = {"llama-3.2-1b": 8192}
#: Noise of the teacher's logits beside the student's: 0.13 nats of divergence.
NOISE = 0.5
#: ModelOpt's formula without compilation, at its peak (measured at T = 8192, V = 128256, bf16).
EAGER_LOGIT_BYTES = 28


class Inputs:
    """The teacher, frozen, whose logits are the student's and some noise; random upstream gradients."""

    def __init__(self, problem: Problem, teacher_hidden: int) -> None:
        hidden, weight = problem.hidden.detach(), problem.weight.detach()
        generator = torch.Generator(device=hidden.device).manual_seed(5)

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*size, generator=generator, device=hidden.device, dtype=dtype)

        T, H = hidden.shape
        shared = min(H, teacher_hidden)
        self.hidden = normal(T, teacher_hidden, dtype=problem.dtype)
        self.hidden[:, :shared] = hidden[:, :shared]
        self.weight = normal(len(weight), teacher_hidden, dtype=problem.dtype)
        self.weight *= NOISE / math.sqrt(teacher_hidden)
        self.weight[:, :shared] += weight[:, :shared]
        self.token_weights = normal(T)
        self.upstream = problem.scalar * self.token_weights
        self.one = torch.ones((), device=hidden.device)
        self._gemms: list[Tensor] = []

    def for_gemms(self, problem: Problem) -> list[Tensor]:
        """Logits (of either side) and their true gradient ``[T, V]``; ``grad_hidden``, ``grad_weight``."""
        if not self._gemms:
            hidden, weight = problem.hidden.detach(), problem.weight.detach()
            grad = torch.empty(
                problem.num_tokens, problem.num_rows, device=hidden.device, dtype=problem.dtype
            )
            for part in torch.arange(problem.num_tokens, device=hidden.device).split(1024):
                p = [
                    (h[part] @ w.t()).float().softmax(-1)
                    for h, w in ((hidden, weight), (self.hidden, self.weight))
                ]
                grad[part] = ((p[0] - p[1]) * self.upstream[part, None]).to(grad.dtype)
            self._gemms = [torch.empty_like(grad), grad, torch.empty_like(hidden), torch.empty_like(weight)]
        return self._gemms


class Kind(NamedTuple):
    divergence: str
    mean: bool = False  # over the tokens, not per token


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each token from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


def plain(
    kind: Kind, hidden: Tensor, weight: Tensor, problem: Problem, inputs: Inputs, tokens: Tensor
) -> Outputs:
    def log_p(hidden: Tensor, weight: Tensor) -> Tensor:
        z = hidden @ weight.t()
        return z.to(torch.promote_types(z.dtype, torch.float32)).log_softmax(-1)

    student = log_p(hidden, weight)
    teacher = log_p(inputs.hidden[tokens].to(hidden.dtype), inputs.weight.to(weight.dtype))
    if kind.divergence == "jsd":
        middle = torch.logaddexp(student, teacher) - math.log(2.0)
        loss = (_kl(teacher, middle) + _kl(student, middle)) / 2
    else:
        loss = _kl(teacher, student) if kind.divergence == "forward_kl" else _kl(student, teacher)
    return {"loss": loss.mean() if kind.mean else loss}


def _gemms(problem: Problem, inputs: Inputs, mark: Mark) -> None:
    logits, grad, grad_hidden, grad_weight = inputs.for_gemms(problem)
    torch.mm(inputs.hidden, inputs.weight.t(), out=logits)
    torch.mm(problem.hidden, problem.weight.t(), out=logits)
    mark()
    torch.mm(grad, problem.weight, out=grad_hidden)
    torch.mm(grad.t(), problem.hidden, out=grad_weight)


def _ours(
    strategy: str, divergence: str, problem: Problem, inputs: Inputs, logit_precision: str = "auto"
) -> Outputs:
    known = parse_strategy(strategy).name in ("auto", "grad_in_forward")
    made = fused_linear_distillation(
        problem.hidden,
        problem.weight,
        inputs.hidden,
        inputs.weight,
        divergence=divergence,
        token_weights=inputs.token_weights if known else None,
        config=config_of(strategy, logit_precision=logit_precision),
    )
    return {"loss": made.loss}


# --- others ----------------------------------------------------------------------------------


class Formula(torch.nn.Module):
    """What ModelOpt's ``LogitsKLLoss`` computes on one rank."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        p, q = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
        p, q = (q, p) if self.reverse else (p, q)
        return F.kl_div(p, q, reduction="none", log_target=True).sum(-1).t()


@cache
def _modelopt() -> Callable[[bool], torch.nn.Module] | None:
    """ModelOpt's class, None where it does not import."""
    try:
        module = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    except Exception:  # Megatron and more
        return None
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    return partial(module.LogitsKLLoss, config, 1.0)


@cache
def _criterion(reverse: bool, compiled: bool) -> Any:
    criterion = (_modelopt() or Formula)(reverse)
    if not compiled:
        return criterion
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.recompile_limit = max(64, dynamo.config.recompile_limit)  # a shape each
    return torch.compile(criterion, dynamic=False)


def _whole_logits(divergence: str, compiled: bool, problem: Problem, inputs: Inputs) -> Outputs:
    with torch.no_grad():
        teacher = F.linear(inputs.hidden, inputs.weight).unsqueeze(1)
    student = F.linear(problem.hidden, problem.weight).unsqueeze(1)
    loss = _criterion(divergence == "reverse_kl", compiled)(student, teacher)
    return {"loss": (loss if isinstance(loss, Tensor) else loss[0]).flatten()}


def _too_large(problem: Problem) -> str | None:
    need = EAGER_LOGIT_BYTES * problem.num_tokens * problem.num_rows / MIB / 1024
    free = problem.world.free_bytes() / MIB / 1024
    return None if need < free / 2 else f"not run: {need:.0f} GiB of logits, {free:.0f} GiB are free"


def _trl(divergence: str, problem: Problem, inputs: Inputs) -> Outputs:
    function: Any = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    student, teacher = (problem.hidden, problem.weight, None), (inputs.hidden, inputs.weight, None)
    loss, _ = function.apply(*student, *teacher, BETAS[divergence])
    return {"loss": loss}


def _liger(divergence: str, problem: Problem, inputs: Inputs) -> Outputs:
    function: Any = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
    sides = (problem.hidden, problem.weight, inputs.hidden, inputs.weight)
    return {"loss": function.apply(*sides, None, BETAS[divergence]).float()}


def _absent(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a foreign library raises at import
        return one_line(error)
    return None


def cases_of(given: argparse.Namespace, cell: Cell) -> list[Case]:
    found = [Case(GEMMS, is_ours=False, products=_gemms)]
    modelopt = "ModelOpt" if _modelopt() is not None else "ModelOpt's formula"
    no_trl, no_liger = _absent("trl.kernels.chunked_divergence"), _absent("liger_kernel.ops.fused_linear_jsd")
    on_cpu = None if torch.cuda.is_available() else "needs a CUDA device"
    grads = (("loss", "upstream"),)
    peer: dict[str, Any] = {"grads": grads, "is_ours": False}
    for divergence in DIVERGENCES:
        kind = Kind(divergence)
        found += [
            Case(f"{divergence}, {name}", partial(_ours, name, divergence), kind, grads)
            for name in given.strategies
        ]
        in_fp32 = partial(_ours, "store:4096", divergence, logit_precision="fp32")
        found.append(Case(f"{divergence}, store:4096, fp32 logits", in_fp32, kind, grads))
        if divergence != "jsd":
            made = partial(_whole_logits, divergence)
            eager = partial(made, False)
            found += [
                Case(f"{divergence}, {modelopt} eager", eager, kind, too_large=_too_large, **peer),
                Case(f"{divergence}, {modelopt} compiled", partial(made, True), kind, why_not=on_cpu, **peer),
            ]
        found.append(Case(f"{divergence}, TRL", partial(_trl, divergence), kind, why_not=no_trl, **peer))
    for divergence in ("forward_kl", "jsd"):
        kind, one = Kind(divergence, mean=True), {**peer, "grads": (("loss", "one"),)}
        found.append(Case(f"{divergence}, Liger", partial(_liger, divergence), kind, why_not=no_liger, **one))
    return found


def inputs_of(problem: Problem, cell: Cell) -> Inputs:
    return Inputs(problem, TEACHER_HIDDEN.get(cell.shape, cell.hidden_size))


SUBJECT = Subject("Distillation over the whole vocabulary", GEMMS, cases_of, inputs_of, plain)
