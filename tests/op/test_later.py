"""``grad_weight`` made after the backward, by :class:`.wgrad.Later`: the same as made in it."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.call import NOTHING_ELSE, Call
from megatron_fused_ce.distillation import Distillation
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.lib.reference import make_inputs, make_teacher
from megatron_fused_ce.several_labels import SeveralLabels
from megatron_fused_ce.wgrad import InPlaceGradWeight, Later
from tests.support.op import EXP_DTYPE, HAS_EXP

CASES = {
    "store": {"strategy": "store"},
    "recompute": {"strategy": "recompute"},
    "auto, smoothing, z-loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "masked tokens": {"strategy": "store", "skip_masked": True},
}
OTHERS = ("nothing", "labels", "top-k", "teacher")


def adds_to(main_grad):
    def open_grad_weight(weight, num_gemms, scaled):
        return InPlaceGradWeight(main_grad, scaled, lambda: None)

    open_grad_weight.kind = "main_grad" if main_grad.dtype == torch.float32 else "low_main_grad"
    return open_grad_weight


def gradients(inputs, config, others, later, main_grad, uses_later=2):
    """Of two calls, the second without room where ``later`` has a limit of 1; ``grad_hidden`` of both."""
    made = []
    for shift in (0, 1):
        hidden = inputs.hidden.roll(shift, 0).requires_grad_()
        labels, other_targets, outputs, weights = inputs.labels, NOTHING_ELSE, (), None
        if others in ("labels", "top-k"):
            other_targets = SeveralLabels(*make_teacher(inputs, 3)[: 1 + (others == "top-k")])
            labels = torch.full_like(labels, -1)
        elif others == "teacher":
            of_teacher = inputs.hidden.detach() * 0.5, inputs.weight.detach().flip(0)
            other_targets = Distillation(*of_teacher, 0.5, "reverse_kl", 0.5, 1.0, None, False, True)
            outputs = ("divergence", "log_prob", "teacher_log_prob")
        upstream = inputs.grad_loss.masked_fill(inputs.grad_loss < 0, 0.0)
        if config.skip_masked:
            weights = upstream.ne(0).float()
        call = Call(
            hidden,
            inputs.weight.requires_grad_(),
            labels,
            config=config,
            outputs=outputs,
            other_targets=other_targets,
            token_weights=weights,
            open_grad_weight=adds_to(main_grad),
            later=later,
            uses_later=uses_later,
        )
        head = linear_cross_entropy(call)
        head.loss.backward(upstream)
        upstream.fill_(1e3)  # whose buffer the caller fills again
        made.append(hidden.grad)
    return made, head.plan


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_later_is_the_same(case, others, dtype, device):
    config = FusedCEConfig(**CASES[case], num_chunks=3, memory_mb=512)
    if (others != "nothing" and config.loss_terms) or (others == "labels" and config.skip_masked):
        pytest.skip("refused, or has no such label")
    inputs = make_inputs("plain", s=24, b=2, hidden_size=32, vocab=96, dtype=dtype, device=device)
    once, later = (torch.zeros(96, 32, device=device) for _ in range(2))
    expected, _ = gradients(inputs, config, others, None, once)
    for uses_later in (2, 1 << 30):  # whose logits are kept, and are not
        waits = Later(0)
        found, plan = gradients(inputs, config, others, waits, later.zero_(), uses_later)
        assert len(waits) == 2 and not later.any()
        assert plan.keeps_logits == (plan.stored_chunks > 0 and uses_later == 2)
        waits.drain()
        assert not len(waits) and later.any()
        bound = 1e-6 if dtype == torch.float32 else 3e-3
        assert float((later - once).norm() / once.norm()) < bound
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.skipif(not HAS_EXP, reason="needs Hopper or newer")
@pytest.mark.parametrize("chunks", [1, 3])
def test_with_the_exponentiating_product(chunks, device):
    inputs = make_inputs("plain", s=40, b=1, hidden_size=32, vocab=64, dtype=EXP_DTYPE, device=device)
    config = FusedCEConfig("store", num_chunks=chunks, memory_mb=512, logits_backend="scaled_exp")
    once, later = (torch.zeros(64, 32, device=device) for _ in range(2))
    gradients(inputs, config, "nothing", None, once)
    for uses_later in (2, 1 << 30):
        waits = Later(0)
        _, plan = gradients(inputs, config, "nothing", waits, later.zero_(), uses_later)
        assert plan.keeps_logits == (uses_later == 2)
        waits.drain()
        assert float((later - once).norm() / once.norm()) < (2e-6 if torch.float32 == EXP_DTYPE else 5e-3)


def test_a_limit_a_step_that_ends_and_a_failure(device):
    inputs = make_inputs("plain", s=8, b=1, hidden_size=16, vocab=32, dtype=torch.float32, device=device)
    config, once, later = FusedCEConfig("store"), *(torch.zeros(32, 16, device=device) for _ in range(2))
    gradients(inputs, config, "nothing", None, once)
    waits = Later(1)
    gradients(inputs, config, "nothing", waits, later)
    assert len(waits) == 1 and later.any()  # the second's was made at once
    waits.drain()
    torch.testing.assert_close(later, once)
    gradients(inputs, config, "nothing", waits, later)
    waits.clear()
    waits.drain()
    assert not len(waits)


def test_a_failure_leaves_no_partial_sum(device, monkeypatch):
    inputs = make_inputs("plain", s=8, b=1, hidden_size=16, vocab=32, dtype=torch.float32, device=device)
    later, waits, calls = torch.zeros(32, 16, device=device), Later(0), []
    gradients(inputs, FusedCEConfig("recompute", num_chunks=2), "nothing", waits, later)
    stock = InPlaceGradWeight.add

    def add(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        stock(self, *args)

    monkeypatch.setattr(InPlaceGradWeight, "add", add)
    with pytest.raises(RuntimeError, match="no memory"):
        waits.drain()
    assert later.isnan().all()
