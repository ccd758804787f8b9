"""Every loss against fp64; sums of terms, a user's own among them; losses.check, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_loss,
    fused_linear_topk_distillation,
    losses,
)
from megatron_fused_ce.losses.terms import Pull, Term
from megatron_fused_ce.scripts.lib.reference import KINDS, make_inputs, relative_error
from tests.support import pairs
from tests.support.losses import TABLE, Focal, Loss, Unlikelihood, compare, problem
from tests.support.op import EXP_DTYPE, STRATEGIES, rows_by

SIZES = {"s": 12, "b": 3, "hidden_size": 16, "vocab": 97}

#: What runs the GEMM and the row passes, and the dtype.
BACKENDS = {
    "fp32": (torch.float32, {"logits_backend": "gemm_rows"}),
    "bf16": (torch.bfloat16, {"logits_backend": "gemm_rows"}),
    "fp16": (torch.float16, {}),
    "triton": (EXP_DTYPE, {"logits_backend": "gemm_rows"}),
    "scaled_exp": (EXP_DTYPE, {"logits_backend": "scaled_exp"}),
}
#: One chunk, ragged last ones, more than there are tokens, and their number of 8 to 12 positions of 3.
CHUNKINGS = {
    "4 chunks": ({"num_chunks": 4}, 4),
    "1 chunk": ({"chunk_tokens": 4096}, 1),
    "5 chunks": ({"num_chunks": 5}, 5),
    "7 tokens": ({"chunk_tokens": 7}, 5),
    "1000 chunks": ({"num_chunks": 1000}, 8),
}
AXES = {
    "name": tuple(TABLE),
    "strategy": (*STRATEGIES, "mixed"),
    "backend": tuple(BACKENDS),
    "kind": KINDS,
    "chunking": tuple(CHUNKINGS),
}


def refusal(loss: Loss, strategy: str) -> str:
    """Why the scaled-exp GEMM does not serve, in its words; or empty."""
    options, beyond = loss.options, loss.entries or loss.num_labels or "label_smoothing" in loss.options
    if beyond or any("delta" in term.gives for term in (loss.terms or {}).values()):
        return "epilogue cannot make"
    saves = strategy in ("store", "mixed", "grad_in_forward") and len(loss.with_gradient) > 1
    return "beside a softcap" if saves and "logit_softcap" in options and loss.beside != ("log_prob",) else ""


#: Every two values of two axes meet; and every loss whose ``E`` is saved, with whatever is made of that.
ROWS = [
    *(tuple(row.values()) for row in pairs.cases(AXES).values()),
    *(
        (name, strategy, "scaled_exp", "plain", "4 chunks")
        for name, loss in TABLE.items()
        for strategy in ("store", "grad_in_forward")
        if not refusal(loss, strategy)
    ),
]
CASES = [pytest.param(*row, id="-".join(map(str, row))) for row in dict.fromkeys(ROWS)]


@pytest.mark.parametrize(tuple(AXES), CASES)
@pytest.mark.filterwarnings("ignore:.*(promise|upstream gradient)")
def test_against_fp64(name, strategy, backend, kind, chunking, device):
    dtype, options = BACKENDS[backend]
    tokens = 8 if backend in ("triton", "scaled_exp") and device.type == "cpu" else 12  # interpreted
    loss, sizes = TABLE[name], {"s": tokens, "b": 3, "hidden_size": 32, "vocab": 136}
    if kind in ("high", "low", "wide") and backend == "scaled_exp" and device.type == "cpu":
        kind = "plain"  # fp32, which this GEMM is not offered for: exponents of logits of 300 are off by 2e-5
    if loss.temperatures and kind in ("high", "low"):
        kind = "plain"  # beyond its softcap, where the entropy's gradient is below any rounding of a tanh
    if strategy == "grad_in_forward" and loss.temperatures:
        strategy = "store"  # the other upstream gradients must be known
    chunks, gemms = CHUNKINGS[chunking]
    inputs = replace(problem(kind, dtype, device, loss.options, **sizes), gemms=gemms)
    if loss.temperatures:
        inputs = replace(inputs, temperature=inputs.grad_loss.abs() + 0.5)
    if backend == "scaled_exp" and (words := refusal(loss, strategy)):
        with pytest.raises(ValueError, match=words):
            compare(loss, inputs, strategy, **options)
    else:
        with rows_by("triton" if backend == "triton" else "auto"):
            compare(loss, inputs, strategy, **{"chunk_tokens": None, **chunks, **options})


@dataclass(frozen=True)
class Itself(Term):
    """A statistic, given away as it is: 1 - p_y."""

    gives = ("at",)

    def value(self, rows):
        return rows.one_minus_p

    def pull(self, rows, upstream):
        return Pull(at=(1 - rows.one_minus_p) * upstream)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.filterwarnings("ignore:.*promise")
def test_outputs_are_the_callers_own(strategy, device):
    """Also where a term gives a statistic away: one chunk, of which no copy is made elsewhere."""
    hidden, weight = torch.randn(6, 8, device=device), torch.randn(9, 8, device=device).requires_grad_()
    labels, w = torch.arange(6, device=device), torch.rand(6, device=device)
    terms = {"loss": Itself(), "ce": losses.CrossEntropy(), "metric": losses.CrossEntropy(), "mae": Itself()}
    more = {"token_weights": w, "config": FusedCEConfig(strategy=strategy)}
    made = fused_linear_loss(hidden, weight, labels, terms, **more)
    with torch.no_grad():
        made["mae"].mul_(100), made["metric"].mul_(7)
    (made["loss"].mul_(w).sum() + made["ce"].sum()).backward()
    plain = weight.detach().double().requires_grad_()
    log_p = (hidden.double() @ plain.t()).log_softmax(-1)[range(6), labels]
    (w * (1 - log_p.exp()) - log_p).sum().backward()
    assert relative_error(weight.grad, plain.grad) < 2e-6


def test_an_output_alone_meets_no_slope_of_the_loss(device):
    """A sure token: the loss has a slope of inf there, and no upstream gradient."""
    hidden = torch.tensor([[200.0, 0.0], [0.0, 1.0]], device=device, requires_grad=True)
    labels = torch.tensor([[1, 0], [1, 0]], device=device)
    terms = {"loss": Unlikelihood(), "lp": losses.LogProbs()}
    made = fused_linear_loss(hidden, torch.eye(2, device=device), labels, terms)
    made["lp"].sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad.any()


class InPlace(Focal):
    """Whose pull changes its upstream."""

    def pull(self, rows, upstream):
        pull = super().pull(rows, upstream)
        if isinstance(upstream, torch.Tensor):
            upstream.zero_()
        return pull


@pytest.mark.parametrize("several", [False, True], ids=["one label", "several"])
def test_a_users_term_has_its_own_upstream(several, device):
    """In a sum, beside others with the same upstream gradient, and in the caller's buffer."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    labels = inputs.labels.unsqueeze(-1) if several else inputs.labels
    upstream, grads = torch.ones_like(inputs.grad_loss), []
    for odd in (InPlace(2.0), Focal(2.0)):
        hidden = inputs.hidden.clone().requires_grad_()
        terms = {"loss": odd + losses.CrossEntropy(), "odd": odd, "entropy": losses.Entropy()}
        made = fused_linear_loss(hidden, inputs.weight, labels, terms)
        torch.autograd.backward(list(made.values()), [upstream] * 3)
        grads.append(hidden.grad)
    assert torch.equal(*grads) and (upstream == 1).all()


@pytest.mark.parametrize("k", [1, 2048])
def test_fp16_counts_the_upstreams_of_a_token_once(k, device):
    weight = torch.randn(4000, 16, device=device, dtype=torch.float16, requires_grad=True)
    hidden = torch.randn(3, 16, device=device, dtype=torch.float16, requires_grad=True)
    ids = torch.randint(0, 4000, (3, k), device=device)
    upstream, grads = torch.randn(3, k, device=device), []
    for dtype in (torch.float16, torch.float64):
        operands = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        made = (operands[0] @ operands[1].t()).log_softmax(-1).gather(1, ids)
        if dtype == torch.float16:
            terms = {"loss": losses.CrossEntropy(), "x": losses.LogProbs()}
            made = fused_linear_loss(*operands, ids, terms)["x"]
        grads.append(torch.autograd.grad(made, operands, upstream.to(made.dtype)))
    for ours, true in zip(*grads, strict=True):
        assert relative_error(ours, true) < 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_teachers_shares_of_any_sum_stay_finite_in_fp16(strategy, device):
    weight = torch.randn(40, 16, device=device, dtype=torch.float16, requires_grad=True)
    hidden = torch.randn(6, 16, device=device, dtype=torch.float16, requires_grad=True)
    ids = torch.randint(0, 40, (6, 1), device=device).expand(6, 512)
    given = hidden, weight, ids, torch.zeros(6, 512, device=device)
    weights = torch.ones(6, device=device)
    made = fused_linear_topk_distillation(*given, token_weights=weights, config=FusedCEConfig(strategy))
    (made / 512).sum().backward()
    plain = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    true = torch.autograd.grad(-(plain[0] @ plain[1].t()).log_softmax(-1).gather(1, ids[:, :1]).sum(), plain)
    for ours, right in zip((hidden.grad, weight.grad), true, strict=True):
        assert relative_error(ours, right) < 2e-3


def test_what_is_no_term():
    with pytest.raises(TypeError, match="has no gradient and cannot be part of a sum"):
        losses.CrossEntropy() + losses.Predicted()
    with pytest.raises(TypeError, match="expected a number"):
        torch.ones(3) * losses.CrossEntropy()
    with pytest.raises(TypeError):
        losses.CrossEntropy() + 1.0
    with pytest.raises(TypeError, match=r"got <class .*Perplexity'>: give an instance"):
        losses.check(Perplexity)


@dataclass(frozen=True)
class Perplexity(losses.Term):
    gives = ("at",)

    def value(self, rows):
        return torch.exp(rows.loss)

    def pull(self, rows, upstream):
        return losses.Pull(at=torch.exp(rows.loss) * upstream)


def test_an_output_that_is_only_watched_leaves_fp16_its_digits(device):
    """Its gradient could be e^28 times its upstream gradient, but it has none."""
    inputs = make_inputs("plain", s=64, b=1, hidden_size=16, vocab=40, dtype=torch.float16, device=device)
    made = []
    for terms in ({}, {"watched": Perplexity()}):
        hidden = (12 * inputs.hidden).detach().requires_grad_()
        out = fused_linear_loss(hidden, inputs.weight, inputs.labels, {"loss": losses.CrossEntropy()} | terms)
        out["loss"].mean().backward()
        made.append(hidden.grad)
    assert out["loss"].max() > 15 and torch.equal(*made)
