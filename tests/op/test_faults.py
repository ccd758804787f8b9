"""What goes wrong in a step: afterwards no wrong number is left, and the next step is right to the bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce.head import loop, tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.ranks.collectives import VocabParallel
from tests.support.losses import LOSS_OPTIONS, Loss
from tests.support.op import STRATEGIES, rows_by, strategy_in_place
from tests.support.steps import AtOperator, Step, out_of_memory_at, tensors_alive


@pytest.fixture
def mixed():
    """``auto`` stores the first of two chunks."""
    with strategy_in_place("mixed"):
        yield


CASES = {
    **{
        f"{strategy}, fp32 main_grad": (torch.bfloat16, strategy, "fp32")
        for strategy in (*STRATEGIES, "auto")
    },
    "grad_in_forward, bf16 main_grad": (torch.bfloat16, "grad_in_forward", "low"),
    "store, bf16 main_grad": (torch.bfloat16, "store", "low"),
    "store, fp16": (torch.float16, "store", "fp32"),
    "recompute, returned": (torch.float32, "recompute", "returned"),
    "store, options": (torch.float32, "store", "fp32", {"label_smoothing": 0.1, "z_loss": 1e-3}),
}


#: Of `make test`: a strategy each.
CORE = [f"{strategy}, fp32 main_grad" for strategy in STRATEGIES]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CORE else pytest.mark.rest) for case in CASES]
)
def test_out_of_memory_anywhere(case, request):
    """In every operator of a step, one after the other, with an earlier micro-batch's gradients there."""
    dtype, strategy, end, *options = CASES[case]
    if strategy == "auto":
        request.getfixturevalue("mixed")
    step = Step(strategy, end, dtype, **dict(*options))
    step.run()
    earlier = step.gradients()
    with AtOperator() as counted:
        step.run()
    right = step.gradients()
    alive = tensors_alive()

    outcomes = [out_of_memory_at(step, at, earlier, right) for at in range(1, counted.count + 1)]
    with AtOperator() as of_forward:
        step.forward()
    assert set(outcomes[: of_forward.count]) == {"untouched"}, "a forward has added something"
    assert ("nan" in outcomes) == (step.main_grad is not None), outcomes
    # Where a sum is whole, only what follows the op's own backward is left to fail.
    order = ["untouched", "nan", "whole"]
    assert outcomes == sorted(outcomes, key=order.index)
    assert tensors_alive() <= alive + 4, "tensors of failed steps are still alive"


def test_sums_are_abandoned_then_collectives_waited_for(monkeypatch):
    """In every backward, whatever it was that failed."""
    order = []

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "backward", interrupted)
    monkeypatch.setattr(VocabParallel, "join", lambda _, device: order.append(f"waited for {device}"))
    accumulator = SimpleNamespace(abandon=lambda: order.append("abandoned"))
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    labels = torch.zeros(2, dtype=torch.int64)
    made = linear_cross_entropy(Call(hidden, weight, labels, open_grad_weight=lambda *_: accumulator))
    with pytest.raises(KeyboardInterrupt):
        made.loss.sum().backward()
    assert order == ["abandoned", "waited for cpu"]


# --- other memory; steps in other orders: tests/parallel/test_faults.py -------------------------


class Filled(TorchDispatchMode):
    """Every ``torch.empty`` and its like come full of one number; ``count``: how many did."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.count += 1
            value: float = self.value
            if not made.is_floating_point() and made.dtype != torch.bool:
                value = torch.iinfo(made.dtype).max if value else 0
            made.fill_(value)
        return made


#: What a head may be asked for, and every option of that.
ASKED = {
    **{name: Loss(options) for name, options in LOSS_OPTIONS.items()},
    **dict.fromkeys(("plain", "row kernels"), Loss()),
    "scaled": Loss({"logit_scale": 0.25}),
    "rounded": Loss({"logit_precision": "activations"}),
    "skipped": Loss({"skip_masked": True}),
    "all-reduced": Loss({"merge": "all_reduce"}),
    "scaled-exp GEMM": Loss({"logits_backend": "scaled_exp"}),
    "outputs": Loss(beside=tuple(OUTPUTS)),
    "distillation": Loss(entries=4),
    "masked padding": Loss({"true_vocab_size": 33}),  # within these 40
    "all": Loss({**LOSS_OPTIONS["all"], "true_vocab_size": 37}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("asked", ASKED)
def test_nothing_is_read_before_it_is_written(asked, strategy, monkeypatch):
    """Fresh memory of zeros, of NaN, of large numbers: the same bits of results and gradients."""
    if asked.endswith(("row kernels", "scaled-exp GEMM")) and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setattr(tokens, "ROUND_TO", 2)
    loss = replace(ASKED[asked], differentiable=strategy != "grad_in_forward")
    expected: list[torch.Tensor] = []
    for value in (0.0, torch.nan, -3e38):
        head = Step(strategy, kind="plain", num_chunks=3, **loss.options)
        if asked == "skipped":
            head.grad_loss[:, 2:5] = 0.0
            head.options["token_weights"] = head.grad_loss * 2
        with Filled(value) as empties, rows_by("triton" if asked == "row kernels" else "auto"):
            results = list(loss.ask(head.hidden, head.weight, head.inputs, **head.options).values())
            asked_for = [result for result in results if result.requires_grad]
            torch.autograd.backward(asked_for, [head.grad_loss] * len(asked_for))
        assert empties.count > 5
        made = [*results, *head.gradients()]
        expected = expected or made
        assert all(torch.isfinite(result).all() for result in made), value
        assert all(map(torch.equal, made, expected)), value


def test_what_is_read_before_it_is_written_is_seen():
    """The check itself."""
    seen = []
    for value in (0.0, torch.nan):
        with Filled(value):
            seen.append((torch.empty(3) + torch.ones(3).new_empty(3) * 0, torch.empty(2).long()))
    assert seen[0][0].eq(0).all() and seen[1][0].isnan().all()
    assert not torch.equal(seen[0][1], seen[1][1])
