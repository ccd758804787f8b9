"""``grad_in_forward`` under Megatron's own optimizers: whatever the loss, it trains as ``recompute``.

Real GPT, Mamba and Hybrid models in Megatron's DDP, trained by Megatron's optimizers as its train_step
does. A wrong loss weights one token otherwise than the ``loss_mask`` that the model was called with.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support import megatron
from tests.support.megatron import (
    BATCH,
    DDP,
    GRADIENT_BOUND,
    INSTALLED,
    NEWEST,
    SEQUENCE,
    VOCAB,
    Model,
    build,
    have_groups,
    needs_core,
    of_core,
    positions_and_mask,
)
from tests.support.op import promises
from tests.support.ranks import Rank, on_ranks

#: Both cores, one of them at TP 2.
RANKS = [of_core(2, NEWEST, needs_nccl=DDP), of_core(1, INSTALLED)]
PLAIN = Model()


@dataclass(frozen=True)
class Setup:
    """A model, its precision and its optimizer."""

    model: Model = PLAIN
    fp16: bool = False
    distributed: bool = False
    loss_scale: float = 2.0**4
    chained: bool = False
    strategy: str = "grad_in_forward"


SETUP = Setup()
FP16 = Model(dtype=torch.float16, extra={"fp16": True})
BF16 = Model(dtype=torch.bfloat16)
OPTIMIZERS = {
    "fp32": Setup(),
    "fp32, chained": Setup(chained=True),
    "bf16": Setup(BF16),
    "fp16": Setup(FP16, fp16=True),
    "fp32, distributed": Setup(distributed=True),
    "bf16, distributed": Setup(BF16, distributed=True),
    "fp16, distributed": Setup(FP16, fp16=True, distributed=True),
    "fused wgrad": Setup(Model(fused_wgrad=True)),
    "tied": Setup(Model(tied=True)),
    "hybrid": Setup(Model(family="hybrid")),
}


class Training(megatron.Training):
    """One model under training, step by step."""

    def __init__(self, rank: Rank, setup: Setup) -> None:
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        import megatron_fused_ce

        megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig(strategy=setup.strategy, num_chunks=3))
        model = build(setup.model, rank)
        megatron_fused_ce.disable()
        scale = {"fp16": setup.fp16, "initial_loss_scale": setup.loss_scale, "min_loss_scale": 1.0}
        super().__init__(rank, model, distributed=setup.distributed, **scale)
        if setup.chained and not isinstance(self.optimizer, ChainedOptimizer):
            self.optimizer = ChainedOptimizer([self.optimizer])
        self.generator = torch.Generator().manual_seed(5)

    def mask(self) -> torch.Tensor:
        random = torch.rand(BATCH, SEQUENCE, generator=self.generator)
        return (random < 0.7).float().to(self.rank.device)

    def losses(self, **given: Any) -> torch.Tensor:
        """Per-token losses ``[b, s]`` of a random micro-batch; ``given``: what the model is told."""
        shape = (BATCH, SEQUENCE + 1)
        ids = torch.randint(0, VOCAB, shape, generator=self.generator).to(self.rank.device)
        positions, causal = positions_and_mask(self.rank)
        losses: torch.Tensor = self.ddp(ids[:, :-1], positions, causal, labels=ids[:, 1:], **given)
        return losses

    def backward(self, right: bool = True, scale: float = 1.0) -> torch.Tensor:
        """One micro-batch through Megatron's loss arithmetic; gives its loss."""
        mask = self.mask()
        losses = self.losses(loss_mask=mask)
        used = mask if right else one_token_changed(mask)
        return self.backward_of(losses, used, scale)

    def backward_of(self, losses: torch.Tensor, used: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        loss_scale = self.optimizer.get_loss_scale()
        MTPLossAutoScaler.set_loss_scale(torch.ones_like(loss_scale) * loss_scale)
        loss = torch.sum(losses.view(-1).float() * used.view(-1).float())
        loss = loss / torch.clamp(used.sum().int(), min=1) / 2
        self.optimizer.scale_loss(loss * scale).backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        return [p.main_grad.clone() for p in self.model.parameters()]

    def step(self) -> bool:
        self.ddp.finish_grad_sync()
        return super().step()


class Pair:
    """The same training twice: as it was set up, and with ``recompute``, which must see no difference."""

    def __init__(self, rank: Rank, setup: Setup) -> None:
        self.made = Training(rank, setup)
        self.expected = Training(rank, replace(setup, strategy="recompute"))
        self.half = setup.model.dtype != torch.float32

    def accumulate(self, micro_batch: Callable[[Training], Any], kept: int, remade: int = 0) -> None:
        """A micro-batch of each, and how many of its gradients were made in the forward, or again."""
        with promises(kept, remade):
            micro_batch(self.made)
        with promises(0, 0):
            micro_batch(self.expected)

    def zero_grad(self) -> None:
        for training in (self.made, self.expected):
            training.zero_grad()

    def assert_same_steps(self) -> None:
        """Gradients within rounding, and a step of each."""
        bound = 2e-2 if self.half else GRADIENT_BOUND
        for one, other in zip(self.made.gradients(), self.expected.gradients(), strict=True):
            assert float((one - other).double().norm()) <= bound * float(other.double().norm())
        for training in (self.made, self.expected):
            training.assert_steps()
        # Adam makes a step of what rounding left: go on from the same parameters.
        with torch.no_grad():
            for one, other in zip(self.made.state_tensors(), self.expected.state_tensors(), strict=True):
                one.copy_(other)


def one_token_changed(mask: torch.Tensor) -> torch.Tensor:
    changed = mask.clone()
    changed[1, 3] = 1.0 - changed[1, 3]
    return changed


@contextlib.contextmanager
def what_was_said() -> Iterator[io.StringIO]:
    from megatron_fused_ce.adapter import report

    report._said.clear()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield said


def notes(said: io.StringIO) -> list[str]:
    return [line for line in said.getvalue().splitlines() if "instead of grad_in_forward" in line]


@on_ranks(*RANKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_wrong_loss(rank: Rank, optimizer):
    """In the second micro-batch of the second step: no token's gradient is wrong, and all steps are taken."""
    if optimizer == "hybrid":
        needs_core(0, 17)  # MambaModel took no loss_mask before: grad_in_forward is never used for it
    have_groups(rank.size)
    pair = Pair(rank, OPTIMIZERS[optimizer])
    steps = [
        [(True, 1, 0), (True, 1, 0)],
        [(True, 1, 0), (False, 0, 1)],
        [(False, 0, 0), (True, 0, 0)],  # the head no longer relies on the mask
    ]
    for step in steps:
        pair.zero_grad()
        for right, kept, remade in step:
            pair.accumulate(lambda training, right=right: training.backward(right=right), kept, remade)
        pair.assert_same_steps()


@on_ranks(*RANKS)
@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed"])
def test_a_wrong_loss_in_skipped_steps(rank: Rank, distributed):
    """fp16's gradients overflow and Megatron skips the step, as with ``recompute``; the next one is right."""
    setup = Setup(FP16, fp16=True, distributed=distributed, loss_scale=2.0**40)
    have_groups(rank.size)
    pair = Pair(rank, setup)
    for right, kept, remade in ((True, 1, 0), (False, 0, 1), (True, 0, 0)):
        pair.zero_grad()
        pair.accumulate(lambda training, right=right: training.backward(right=right), kept, remade)
        for training in (pair.made, pair.expected):
            before = training.state()
            assert not training.step(), "the step was not skipped: the case tests nothing"
            assert all(map(torch.equal, before, training.state()))


@on_ranks(*RANKS)
def test_an_upstream_overflow(rank: Rank):
    """An upstream gradient that is itself inf: Megatron sees it in the gradients and skips; the promise
    stands."""
    have_groups(rank.size)
    training = Training(rank, Setup(FP16, fp16=True))
    before = training.state()
    training.zero_grad()
    with promises(0, 1):
        training.backward(scale=float("inf"))
    assert not training.step()
    assert all(map(torch.equal, before, training.state()))
    training.zero_grad()
    with promises(1):
        training.backward()
    training.assert_steps()


def run_iteration(
    training: Training, state_machine: Any, wrong_in: tuple[int, ...], reject_first: bool
) -> list[list[torch.Tensor]]:
    """One iteration of Megatron's train_step up to the optimizer: losses and gradients of each run."""
    masks = [training.mask() for _ in range(2)]
    start = training.generator.get_state()
    runs: list[list[torch.Tensor]] = []
    while state_machine.should_run_forward_backward(None):
        training.zero_grad()
        training.generator.set_state(start)
        seen: list[torch.Tensor] = []
        for mask in masks:
            used = one_token_changed(mask) if len(runs) in wrong_in else mask
            losses = training.losses(loss_mask=mask)
            seen.append(losses.detach().clone())
            loss = training.backward_of(losses, used)
            state_machine.validate_result(
                result=loss,
                rejection_func=lambda value, rejected=reject_first and not runs: rejected,
                message="rejected by the test",
                fatal=False,
            )
        gradients = [parameter.main_grad.clone() for parameter in training.model.parameters()]
        runs.append(seen + gradients)
    state_machine.should_checkpoint_and_exit()
    return runs


def rerun(
    rank: Rank,
    mode: str,
    wrong_in: tuple[int, ...] = (),
    reject_first: bool = False,
    setup: Setup = SETUP,
) -> None:
    """Megatron's re-run state machine: a second run of an iteration has the first one's bits.

    The machine would blame the hardware for others. No result is rejected in the first iteration of all,
    where Megatron validates nothing.
    """
    from megatron.core import rerun_state_machine as machine

    have_groups(rank.size)
    if rank.size == 1:  # which has no sequence parallelism
        setup = replace(setup, model=replace(setup.model, sequence_parallel=False))
    training = Training(rank, setup)
    state_machine: Any = machine.RerunStateMachine(mode=machine.RerunMode(mode))
    state_machine._maybe_report_stats = lambda: None  # 0.16.1's raises an AttributeError
    if reject_first:
        assert len(run_iteration(training, state_machine, (), False)) == 1
        training.assert_steps()
    runs = run_iteration(training, state_machine, wrong_in, reject_first)
    assert len(runs) == (2 if reject_first or mode == "report_determinism_stats" else 1)
    if len(set(range(len(runs))) & set(wrong_in)) in (0, len(runs)):
        for first, again in zip(runs[0], runs[-1], strict=True):
            assert torch.equal(first, again) and first.isfinite().all() and first.any()
    training.assert_steps()
    run_iteration(training, state_machine, (), False)
    training.assert_steps()


@on_ranks(*RANKS)
def test_an_all_masked_micro_batch(rank: Rank):
    """A micro-batch without any token that counts is legal, and adds nothing to the gradient."""
    have_groups(rank.size)
    gradients = []
    for with_empty in (False, True):
        training = Training(rank, Setup())
        training.zero_grad()
        training.backward()
        if with_empty:
            nothing = torch.zeros(BATCH, SEQUENCE, device=rank.device)
            training.backward_of(training.losses(loss_mask=nothing), nothing)
        training.ddp.finish_grad_sync()
        gradients.append([p.main_grad.clone() for p in training.model.parameters()])
        training.assert_steps()
    assert all(map(torch.equal, *gradients))

    def nothing_but_one(training: Training) -> None:
        nothing = torch.zeros(BATCH, SEQUENCE, device=rank.device)
        training.backward_of(training.losses(loss_mask=nothing), one_token_changed(nothing))

    pair = Pair(rank, Setup())
    pair.zero_grad()
    pair.accumulate(nothing_but_one, kept=0, remade=1)
    pair.assert_same_steps()


@on_ranks(*RANKS)
def test_multi_token_prediction(rank: Rank):
    """MTP's heads rely on no mask, and get their scales; the main head does. Told once."""
    have_groups(rank.size)
    with what_was_said() as said:
        pair = Pair(rank, Setup(Model(mtp=2)))
        for right in (True, True, False):
            pair.zero_grad()
            pair.accumulate(lambda training, right=right: training.backward(right=right), right, not right)
            pair.assert_same_steps()
    lines = notes(said)
    assert len(lines) == (rank.rank == 0), lines
    assert all("multi-token prediction" in line for line in lines)


@on_ranks(*RANKS)
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_without_a_mask(rank: Rank, family):
    """No loss_mask (old MambaModel's signature has none): exact for any loss, said once."""
    have_groups(rank.size)
    with what_was_said() as said:
        training = Training(rank, Setup(Model(family=family)))
        for _ in range(2):
            training.zero_grad()
            anything = torch.randn(BATCH, SEQUENCE, generator=training.generator)
            training.backward_of(training.losses(), anything.to(rank.device))
            training.assert_steps()
    lines = notes(said)
    assert len(lines) == (rank.rank == 0), lines
    assert all("loss_mask" in line for line in lines)


@on_ranks(*RANKS)
def test_evaluation_says_nothing(rank: Rank):
    have_groups(rank.size)
    with what_was_said() as said:
        training = Training(rank, Setup())
        training.model.eval()
        with torch.no_grad():
            training.losses()
            training.losses(loss_mask=training.mask())
    assert notes(said) == []


MODES = ("disabled", "validate_results", "report_determinism_stats")
TO_THE_BIT = {
    "store": Setup(strategy="store"),
    "recompute, sp": Setup(Model(sequence_parallel=True), strategy="recompute"),
    "grad_in_forward, sp, fused wgrad": Setup(Model(sequence_parallel=True, fused_wgrad=True)),
    "store, bf16, sp": Setup(
        Model(dtype=torch.bfloat16, sequence_parallel=True), distributed=True, strategy="store"
    ),
    "grad_in_forward, tied, MTP 1, fused wgrad": Setup(Model(tied=True, mtp=1, fused_wgrad=True)),
}


@on_ranks(*RANKS)
@pytest.mark.parametrize("wrong_in", [(), (0, 1)], ids=["right", "wrong"])
@pytest.mark.parametrize("mode", MODES)
def test_rerun_machine(rank: Rank, mode, wrong_in):
    rerun(rank, mode, wrong_in)


@on_ranks(*RANKS)
@pytest.mark.parametrize("wrong_in", [(), (0,), (1,), (0, 1)], ids=lambda runs: f"wrong in {runs}")
def test_rerun_after_a_rejected_result(rank: Rank, wrong_in):
    rerun(rank, "validate_results", wrong_in, reject_first=True)


@on_ranks(*RANKS)
@pytest.mark.parametrize("setup", TO_THE_BIT)
def test_rerun_to_the_bit(rank: Rank, setup):
    rerun(rank, "report_determinism_stats", setup=TO_THE_BIT[setup])
