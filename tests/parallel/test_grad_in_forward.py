"""``grad_in_forward`` under Megatron's schedules and optimizers: for any loss it trains as ``recompute``.

Real models in Megatron's DDP. A wrong loss weights a token of the last micro-batch otherwise than the
``loss_mask`` that the model was called with, on the last data-parallel replica.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.head import promise
from megatron_fused_ce.ranks import agreement
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support import megatron
from tests.support.collectives import Collectives
from tests.support.megatron import BATCH, DDP, SEQUENCE, Model, both_cores, flag, of_core
from tests.support.op import SIZES, promises, shard_of
from tests.support.ranks import Rank, on_ranks

TWO, FOUR = both_cores(2, needs_nccl=DDP), of_core(4, megatron.NEWEST)
#: Both cores, one of them at TP 2.
EITHER = [TWO[0], of_core(1, megatron.INSTALLED)]
NUM_MICRO_BATCHES = 2
PROMISES = Model(strategy="grad_in_forward")


@dataclass(frozen=True)
class Setup:
    """How a model is cut and stepped; what is left over of the ranks are replicas."""

    model: Model = PROMISES
    tp: int = 1
    pp: int = 1
    distributed: bool = False
    chained: bool = False
    frozen: str = ""  # part of the names of frozen parameters
    loss_scale: float = 2.0**8

    def but(self, **model: Any) -> Setup:
        return replace(self, model=replace(self.model, **model))


class Training(megatron.Training):
    """One model and its optimizer on this rank."""

    def __init__(self, rank: Rank, setup: Setup, seed: int = 7) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        megatron.have_groups(setup.tp, setup.pp)
        of = setup.model
        with flag(strategy=of.strategy, num_chunks=3, skip_masked=of.skip_masked):
            model = megatron.build(of, rank, seed)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not setup.frozen or setup.frozen not in f"{name} stage {stage}")
        scale = {"fp16": True, "initial_loss_scale": setup.loss_scale, "min_loss_scale": 1.0}
        scale = scale if of.dtype == torch.float16 else {}
        super().__init__(rank, model, distributed=setup.distributed, **scale)
        if setup.chained and not isinstance(self.optimizer, ChainedOptimizer):
            self.optimizer = ChainedOptimizer([self.optimizer])
        model.config.grad_scale_func = self.optimizer.scale_loss
        model.config.finalize_model_grads_func = finalize_model_grads
        replica = parallel_state.get_data_parallel_rank()
        self.is_last_replica = replica == rank.size // (setup.tp * setup.pp) - 1
        self.gains = of.skip_masked or setup.pp > 1  # either kind of a wrong loss
        self.generator = torch.Generator().manual_seed(5 + replica)

    def draw(self) -> megatron.Batch:
        return megatron.draw(self.rank, self.generator, 0.7)

    def state(self) -> list[Tensor]:
        """Every parameter of the model and of the optimizer."""
        return [each.detach() for each in (*self.model.parameters(), *self.optimizer.get_parameters())]

    def assert_steps(self) -> None:
        before = [parameter.clone() for parameter in self.state()]
        assert self.optimizer.step()[0]
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            assert not all(map(torch.equal, before, self.state())), "no parameter changed"

    def forward_backward(self, wrong: bool = False) -> None:
        """As Megatron's train_step up to the optimizer; ``wrong``: the loss of the last micro-batch."""

        def step(data: Any, model: Any) -> tuple[Tensor, Any]:
            last, batch = next(data) == NUM_MICRO_BATCHES - 1, self.draw()
            used = one_token_changed(batch.mask, self.gains) if wrong and last else batch.mask
            return megatron.losses_of(model, batch, self.rank), lambda losses: (
                (losses.float() * used).sum() / used.sum().clamp(min=1), {}
            )  # fmt: skip

        self.zero_grad()
        megatron.scheduled(step, [self.ddp], range(NUM_MICRO_BATCHES))

    def backward_of(self, losses: Tensor, used: Tensor) -> Tensor:
        """A micro-batch without a schedule."""
        loss = (losses.view(-1).float() * used.view(-1).float()).sum() / used.sum().int().clamp(min=1)
        self.optimizer.scale_loss(loss).backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return list(megatron.gradients_of(self.model).values())


def one_token_changed(mask: Tensor, gains: bool = False) -> Tensor:
    """A token that counted does not; ``gains``: a masked one does."""
    changed, flat = mask.clone(), mask.view(-1)
    changed.view(-1)[flat.argmin() if gains else flat.argmax()] = float(gains)
    return changed


def close(made: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(made, expected, strict=True):
        assert float((one - other).double().norm()) <= bound * float(other.double().norm()) + 1e-12


class Pair:
    """The same training twice: as it was set up, and with ``recompute``, which must see no difference."""

    def __init__(self, rank: Rank, setup: Setup) -> None:
        self.made, self.expected = Training(rank, setup), Training(rank, setup.but(strategy="recompute"))
        self.bound = 1e-5 if setup.model.dtype == torch.float32 else 2e-2

    def take(self, step: Callable[[Training], Any], kept: int, remade: int = 0) -> None:
        """A step of each up to the optimizer, and how many gradients were made in the forward, or again."""
        with promises(kept, remade):
            step(self.made)
        with promises(0, 0):
            step(self.expected)
        close(self.made.gradients(), self.expected.gradients(), self.bound)

    def step(self) -> None:
        """The optimizers'."""
        for training in (self.made, self.expected):
            training.assert_steps()
        with torch.no_grad():  # Adam makes a step of what rounding left: go on from the same parameters
            for one, other in zip(self.made.state(), self.expected.state(), strict=True):
                one.copy_(other)


def trains_as_recompute(rank: Rank, setup: Setup) -> None:
    """Steps with a right and a wrong loss, and what follows."""
    megatron.have_groups(setup.tp, setup.pp)
    pair = Pair(rank, setup)
    here = pair.made.is_last_replica and pair.made.model.post_process
    kept = NUM_MICRO_BATCHES * pair.made.model.post_process
    steps = [
        (False, kept, 0),
        (True, kept - here, int(here)),
        # The head no longer relies on the mask there.
        (True, 0 if here else kept, 0),
        (False, 0 if here else kept, 0),
    ]
    for wrong, *counts in steps:
        wrong = wrong and pair.made.is_last_replica
        pair.take(lambda training, wrong=wrong: training.forward_backward(wrong), *counts)
        pair.step()


DP, TP, PP = Setup(), Setup(tp=2), Setup(pp=2)
BF16, FP16 = torch.bfloat16, torch.float16
LAUNCHES = {
    "dp, fp16, distributed optimizer": replace(DP, distributed=True).but(dtype=FP16),
    "dp, frozen head": replace(DP, frozen="output_layer"),
    "pp": PP,
    "pp, frozen head": replace(PP, frozen="output_layer"),
    "pp, frozen last stage": replace(PP, frozen="stage 1"),
    "tp, sp, bf16, distributed": replace(TP, distributed=True).but(sequence_parallel=True, dtype=BF16),
    "tp, fused wgrad, chained": replace(TP, chained=True).but(fused_wgrad=True),
    "tp, tied": TP.but(tied=True),
    "tp, hybrid": TP.but(family="hybrid"),
}


@on_ranks(*TWO)
@pytest.mark.parametrize("name", LAUNCHES)
def test_trains_as_recompute(rank: Rank, name):
    if name == "tp, hybrid":
        megatron.needs_core(0, 17)  # MambaModel took no loss_mask before: it is never used for it
    trains_as_recompute(rank, LAUNCHES[name])


@on_ranks(*TWO)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_one_rank_alone_finds_it_broken(rank: Rank, sp):
    """All ranks of the tensor-parallel group recompute, or none: one MAX all-reduce of three numbers."""
    pair = Pair(rank, TP.but(sequence_parallel=sp, fused_wgrad=True))
    fit = promise.fit_scalar

    def spoilt(*given: Any) -> Any:
        scale, found = fit(*given)
        return scale, found + promise.BROKEN * rank.rank

    def step(training: Training) -> None:
        with Collectives({dist.group.WORLD: "world"}) as issued:
            training.forward_backward()
        words = [made for made in issued.calls if (made.dtype, made.op) == ("float64", "MAX")]
        shapes.append([word.shapes for word in words])

    shapes: list[Any] = []
    pair.take(step, NUM_MICRO_BATCHES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promise, "fit_scalar", spoilt)
        pair.take(step, 0, 1)
    # Later forwards of the head plan without its weights.
    assert shapes == [[((3,),)] * NUM_MICRO_BATCHES, [], [((3,),)], []]


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.5, 0.5)], ids=["1 0", "equal"])
def test_each_rank_with_a_scalar_of_its_own(rank: Rank, factors, sp):
    """Each fits, but ``grad_hidden`` was summed over them. In a checkpoint, whose forward runs twice."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    hidden, weight, group = shard_of(rank, inputs, sp)
    mask = (inputs.grad_loss > -0.5).float()
    made, kept = [], factors[0] == factors[1]
    for strategy, told in (("grad_in_forward", (kept, not kept)), ("recompute", (0, 0))):
        # Ignored labels: their mask is the last tensor that both forwards save.
        config = FusedCEConfig(strategy, num_chunks=2, ignore_index=3)
        given = {**group, "token_weights": mask, "config": config}
        head = functools.partial(fused_linear_cross_entropy, weight=weight, labels=inputs.labels, **given)
        with warnings.catch_warnings(), promises(*told):
            warnings.simplefilter("ignore")
            loss = (checkpoint(head, hidden, use_reentrant=False) * factors[rank.rank] * mask).sum()
            made.append(torch.autograd.grad(loss, (hidden, weight)))
    close(*made, 1e-5)


@on_ranks(FOUR)
@pytest.mark.parametrize("pp", [1, 2], ids=["tp 2, dp 2", "tp 2, pp 2"])
def test_trains_as_recompute_on_four(rank: Rank, pp):
    trains_as_recompute(rank, Setup(tp=2, pp=pp).but(sequence_parallel=True))


@on_ranks(TWO[0])
def test_another_model_keeps_its_promise(rank: Rank):
    """An actor's and a critic's, in one process."""
    actor, critic = Training(rank, DP), Training(rank, DP, seed=8)
    for remade in (1, 0):
        with promises(NUM_MICRO_BATCHES):
            actor.forward_backward()
        with promises(NUM_MICRO_BATCHES - 1 if remade else 0, remade):
            critic.forward_backward(wrong=True)
        actor.assert_steps()
        critic.assert_steps()


@on_ranks(2)
def test_another_head_with_as_many_rows_on_one_rank(rank: Rank):
    """Of 20 and 20 rows, and of 20 and 12: all ranks know which of them broke its promise."""
    torch.manual_seed(3)
    unequal, equal = torch.randn(32, 8).to(rank.device), torch.randn(40, 8).to(rank.device)

    def step(weight: Tensor, keeps: bool) -> None:
        labels = torch.randint(0, len(weight), (24,)).to(rank.device)
        hidden, random, draws = (torch.randn(24, *of).to(rank.device) for of in ((8,), (), ()))
        mask, made = (draws < 0.5).float(), []
        shard = (weight[20:] if rank.rank else weight[:20]).clone().requires_grad_()
        for strategy in ("grad_in_forward", "recompute"):
            leaf, config = hidden.clone().requires_grad_(), FusedCEConfig(strategy, num_chunks=3)
            given = {"tp_group": rank.group, "token_weights": mask, "config": config}
            losses = fused_linear_cross_entropy(leaf, shard, labels, **given)
            losses.backward(0.3 * mask if keeps else random)
            made.append([losses.detach(), leaf.grad])
        close(*made, 1e-6)

    step(unequal, True)
    step(equal, True)
    with warnings.catch_warnings(), promises(kept=0, remade=1):
        warnings.simplefilter("ignore")
        step(equal, False)
    with promises(kept=2):
        step(unequal, True)
        step(unequal, True)
    step(equal, True)
    agreement.forget()


@on_ranks(TWO[0])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", ["recompute", "grad_in_forward"])
def test_a_skipped_token_with_an_upstream_gradient(rank: Rank, sp, strategy):
    """It cannot be made right: every rank of the group raises, and nothing was added for its micro-batch."""
    training = Training(rank, TP.but(sequence_parallel=sp, skip_masked=True, strategy=strategy))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^1 tokens were left out .*with skip_masked, of weight 0"):
            training.forward_backward(wrong=True)
        training.forward_backward()
        training.assert_steps()


@on_ranks(*EITHER)
def test_a_wrong_loss_in_skipped_steps(rank: Rank):
    """fp16's gradients overflow and Megatron skips the step, as with ``recompute``; the next one is right."""
    setup = Setup(tp=rank.size, distributed=True, loss_scale=2.0**40).but(dtype=FP16)
    made, expected = Training(rank, setup), Training(rank, setup.but(strategy="recompute"))
    for wrong, kept, remade in ((False, 2, 0), (True, 1, 1), (False, 0, 0)):
        for training, counts in ((made, (kept, remade)), (expected, (0, 0))):
            with promises(*counts):
                training.forward_backward(wrong)
            before = [parameter.clone() for parameter in training.state()]
            assert not training.optimizer.step()[0], "the step was not skipped: the case tests nothing"
            assert all(map(torch.equal, before, training.state()))


# --- heads without a promise -------------------------------------------------------------------


@contextlib.contextmanager
def telling(rank: Rank, words: str) -> Iterator[Any]:
    """Rank 0 says once why a head is not ``grad_in_forward``; in evaluation nobody does. What is said."""
    with flag(False) as seen:
        model = Training(rank, Setup(tp=rank.size)).model.eval()
        with torch.no_grad():
            megatron.forward(model, rank, labels=True)
    assert "instead of" not in seen.said
    with flag(False) as seen:
        yield seen
    lines = seen.lines("instead of grad_in_forward")
    assert len(lines) == (rank.rank == 0) and all(words in line for line in lines), lines


@on_ranks(TWO[0])
def test_multi_token_prediction(rank: Rank):
    """MTP's heads rely on no mask, and get their scales; the main head does. Told once, with what to do."""
    with telling(rank, "multi-token prediction") as seen:
        pair = Pair(rank, Setup(tp=rank.size).but(mtp=2))
        for wrong in (False, True):
            pair.take(lambda training, wrong=wrong: training.forward_backward(wrong), 2 - wrong, int(wrong))
            pair.step()
    for words in ("of the head of GPTModel (160 rows of 32) is not a scalar", "strategy recompute or store"):
        assert seen.said.count(words) == (rank.rank == 0), words


@on_ranks(*EITHER)
def test_without_a_mask(rank: Rank):
    """No loss_mask (old MambaModel's signature has none): exact for any loss, said once."""
    with telling(rank, "loss_mask"):
        training = Training(rank, Setup(tp=rank.size).but(family="hybrid"))
        for _ in range(2):
            training.zero_grad()
            batch, anything = training.draw(), torch.randn(BATCH, SEQUENCE, generator=training.generator)
            losses = training.ddp(batch.ids, *megatron.positions_and_mask(rank), labels=batch.labels)
            training.backward_of(losses, anything.to(rank.device))
            training.ddp.finish_grad_sync()
            training.assert_steps()


# --- Megatron's re-run state machine -----------------------------------------------------------


def run_iteration(
    training: Training, state_machine: Any, wrong_in: tuple[int, ...], reject_first: bool
) -> list[list[Tensor]]:
    """One iteration of Megatron's train_step up to the optimizer: losses and gradients of each run."""
    batches = [training.draw() for _ in range(2)]
    runs: list[list[Tensor]] = []
    while state_machine.should_run_forward_backward(None):
        training.zero_grad()
        seen: list[Tensor] = []
        for batch in batches:
            losses = megatron.losses_of(training.ddp, batch, training.rank)
            seen.append(losses.detach().clone())
            used = one_token_changed(batch.mask) if len(runs) in wrong_in else batch.mask
            state_machine.validate_result(
                result=training.backward_of(losses, used),
                rejection_func=lambda value, rejected=reject_first and not runs: rejected,
                message="rejected by the test",
                fatal=False,
            )
        runs.append(seen + training.gradients())
    state_machine.should_checkpoint_and_exit()
    training.ddp.finish_grad_sync()
    return runs


#: The machine's mode; the runs in which the loss is wrong; whether the first result is rejected; the model.
SPLIT = DP.but(sequence_parallel=True)
RERUNS: dict[str, tuple[str, tuple[int, ...], bool, Setup]] = {
    "off": ("disabled", (0,), False, DP),
    "rejects": ("validate_results", (), True, DP),
    "rejects, wrong at first": ("validate_results", (0,), True, DP),
    "rejects, wrong again": ("validate_results", (1,), True, DP),
    "repeats": ("report_determinism_stats", (0, 1), False, DP),
    "repeats, recompute, sp": ("report_determinism_stats", (), False, SPLIT.but(strategy="recompute")),
    "repeats, store, tied, mtp 1, fused wgrad": (
        *("report_determinism_stats", (), False),
        DP.but(strategy="store", tied=True, mtp=1, fused_wgrad=True),
    ),
}


@on_ranks(*EITHER)
@pytest.mark.parametrize("name", RERUNS)
def test_rerun(rank: Rank, name):
    """A second run of an iteration has the first one's bits: the machine would blame the hardware for others.

    No result is rejected in the first iteration of all, where Megatron validates nothing.
    """
    from megatron.core import rerun_state_machine as machine

    mode, wrong_in, reject_first, setup = RERUNS[name]
    training = Training(rank, replace(setup, tp=rank.size))
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
