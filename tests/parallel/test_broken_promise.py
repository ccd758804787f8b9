"""A loss that is not what ``grad_in_forward`` was promised trains as ``recompute`` trains it, on every rank.

Small GPT models in Megatron's DDP, through its schedules, its ``finalize_model_grads`` and its optimizers.
The loss of one data-parallel replica weights a token of its last micro-batch otherwise than the
``loss_mask`` that its model was called with.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, parallel
from megatron_fused_ce.scripts.lib.collectives import Collectives
from tests.support import megatron
from tests.support.megatron import DDP, NEWEST, both_cores, have_groups, of_core, transformer_config
from tests.support.op import promises
from tests.support.ranks import Rank, on_ranks

TWO, FOUR = both_cores(2, needs_nccl=DDP), of_core(4, NEWEST)

VOCAB, HIDDEN, SEQUENCE, BATCH, NUM_MICRO_BATCHES = 64, 16, 8, 2, 2


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is cut and stepped; what is left over of the ranks are replicas."""

    pp: int = 1
    tp: int = 1
    sp: bool = False
    distributed: bool = False
    frozen: str = ""  # part of the names of frozen parameters
    dtype: torch.dtype = torch.float32
    fused_wgrad: bool = False
    strategy: str = "grad_in_forward"
    skip_masked: bool = False


def build(rank: Rank, setup: TrainingSetup, seed: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        gradient_accumulation_fusion=setup.fused_wgrad,
        tensor_model_parallel_size=setup.tp,
        sequence_parallel=setup.sp,
        pipeline_model_parallel_size=setup.pp,
        pipeline_dtype=setup.dtype,
        params_dtype=setup.dtype,
        bf16=setup.dtype == torch.bfloat16,
        fp16=setup.dtype == torch.float16,
    )
    model = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(rank.device, setup.dtype)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if setup.frozen and setup.frozen in f"{name} stage {stage}":
            parameter.requires_grad_(False)
    return model


class Training(megatron.Training):
    """One model and its optimizer on this rank."""

    def __init__(self, rank: Rank, setup: TrainingSetup, seed: int = 7) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.parallel_state import get_data_parallel_rank

        import megatron_fused_ce

        have_groups(setup.tp, setup.pp)
        megatron_fused_ce.enable(
            megatron_fused_ce.FusedCEConfig(
                strategy=setup.strategy, num_chunks=2, skip_masked=setup.skip_masked
            )
        )
        try:
            model = build(rank, setup, seed)
        finally:
            megatron_fused_ce.disable()
        scale = {"fp16": True, "initial_loss_scale": 2.0**8, "min_loss_scale": 1.0}
        scale = scale if setup.dtype == torch.float16 else {}
        super().__init__(rank, model, distributed=setup.distributed, **scale)
        model.config.grad_scale_func = self.optimizer.scale_loss
        self.has_head = model.post_process
        model.config.finalize_model_grads_func = finalize_model_grads
        self.replica = get_data_parallel_rank()
        self.iteration = 0

    def forward_backward(self, wrong: bool = False) -> None:
        """As Megatron's train_step up to the optimizer; ``wrong``: the loss of the last micro-batch."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.iteration += 1
        self.zero_grad()
        get_forward_backward_func()(
            forward_step_func=functools.partial(self._forward_step, wrong=wrong),
            data_iterator=iter(range(NUM_MICRO_BATCHES)),
            model=self.ddp,
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )

    def _forward_step(self, data: Any, model: Any, wrong: bool) -> tuple[torch.Tensor, Any]:
        micro_batch = next(data)
        seed = 100 * self.iteration + 10 * self.replica + micro_batch
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=random).to(self.rank.device)
        mask = (torch.rand(BATCH, SEQUENCE, generator=random) < 0.7).float().to(self.rank.device)
        used = mask.clone()
        if wrong and micro_batch == NUM_MICRO_BATCHES - 1:
            assert mask.min() == 0
            used.view(-1)[mask.view(-1).argmin()] = 1.0
        positions = torch.arange(SEQUENCE, device=self.rank.device).expand(BATCH, -1)
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=self.rank.device).triu(1)
        output = model(ids[:, :-1], positions, causal[None, None], labels=ids[:, 1:], loss_mask=mask)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return (losses.float() * used).sum() / used.sum().clamp(min=1), {}

        return output, loss_of


def is_wrong(rank: Rank, setup: TrainingSetup, replica: int) -> bool:
    """Whether this replica is the last one, whose loss is wrong."""
    return replica == rank.size // (setup.tp * setup.pp) - 1


LAUNCHES = {
    "dp": TrainingSetup(),
    "dp, bf16": TrainingSetup(dtype=torch.bfloat16),
    "dp, fp16": TrainingSetup(dtype=torch.float16),
    "dp, distributed optimizer": TrainingSetup(distributed=True, fused_wgrad=True),
    "dp, frozen head": TrainingSetup(frozen="output_layer"),
    "pp": TrainingSetup(pp=2),
    "pp, distributed optimizer": TrainingSetup(pp=2, distributed=True),
    "pp, frozen head": TrainingSetup(pp=2, frozen="output_layer"),
    "pp, frozen last stage": TrainingSetup(pp=2, frozen="stage 1"),
    "tp": TrainingSetup(tp=2),
    "tp, sp, fused wgrad": TrainingSetup(tp=2, sp=True, fused_wgrad=True),
    "tp, sp, bf16": TrainingSetup(tp=2, sp=True, dtype=torch.bfloat16),
}


def close(made: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for one, other in zip(made, expected, strict=True):
        assert float((one - other).double().norm()) <= bound * float(other.double().norm()) + 1e-12


def gradients(training: Training) -> list[torch.Tensor]:
    return [p.main_grad.clone() for p in training.model.parameters() if p.requires_grad]


def trains_as_recompute(rank: Rank, setup: TrainingSetup) -> None:
    """Gradients of steps with a right and a wrong loss, then one step of the optimizer."""
    made, expected = Training(rank, setup), Training(rank, replace(setup, strategy="recompute"))
    here = is_wrong(rank, setup, made.replica) and made.has_head
    bound = 1e-5 if setup.dtype == torch.float32 else 2e-2
    kept = NUM_MICRO_BATCHES * made.has_head
    steps = [
        (False, kept, 0),
        (True, kept - here, int(here)),
        # The head no longer relies on the mask there.
        (True, 0 if here else kept, 0),
        (False, 0 if here else kept, 0),
    ]
    if setup.frozen == "stage 1" and setup.pp == 2:
        steps = [(wrong, kept, remade) for wrong, kept, remade in steps]
    for wrong, kept_now, remade in steps:
        on_this_replica = wrong and is_wrong(rank, setup, made.replica)
        with promises(kept_now, remade):
            made.forward_backward(on_this_replica)
        with promises(0, 0):
            expected.forward_backward(on_this_replica)
        close(gradients(made), gradients(expected), bound)
    for training in (made, expected):
        training.assert_steps()
    if setup.dtype == torch.float32:  # else Adam makes a step of what rounding left
        close(made.state(), expected.state(), 1e-4)


@on_ranks(*TWO)
@pytest.mark.parametrize("name", LAUNCHES)
def test_trains_as_recompute(rank: Rank, name):
    trains_as_recompute(rank, LAUNCHES[name])


@on_ranks(FOUR)
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(TrainingSetup(tp=4), marks=pytest.mark.rest),
        TrainingSetup(tp=4, sp=True, fused_wgrad=True),
        TrainingSetup(tp=2, distributed=True),
        TrainingSetup(tp=2, pp=2, sp=True),
        pytest.param(TrainingSetup(pp=2), marks=pytest.mark.rest),
    ],
    ids=["tp 4", "tp 4, sp", "tp 2, dp 2", "tp 2, pp 2, sp", "pp 2, dp 2"],
)
def test_trains_as_recompute_on_four(rank: Rank, setup):
    trains_as_recompute(rank, setup)


@on_ranks(*TWO)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_one_rank_alone_finds_it_broken(rank: Rank, sp):
    """All ranks of the tensor-parallel group recompute, or none: one MAX all-reduce of three numbers."""
    from megatron_fused_ce import promise

    setup = TrainingSetup(tp=2, sp=sp, fused_wgrad=True)
    made, expected = Training(rank, setup), Training(rank, replace(setup, strategy="recompute"))
    fit = promise.fit_scalar

    def spoilt(*given: Any) -> Any:
        scale, found = fit(*given)
        return (scale, found) if rank.rank == 0 else (scale, found + promise.BROKEN)

    def words(issued: Collectives) -> list[Any]:
        return [made for made in issued.calls if (made.dtype, made.op) == ("float64", "MAX")]

    with Collectives({dist.group.WORLD: "world"}) as issued, promises(NUM_MICRO_BATCHES):
        made.forward_backward()
    assert [word.shapes for word in words(issued)] == [((3,),)] * NUM_MICRO_BATCHES
    expected.forward_backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promise, "fit_scalar", spoilt)
        with Collectives({dist.group.WORLD: "world"}) as issued, promises(0, 1):
            made.forward_backward()
    assert len(words(issued)) == 1, "later forwards of the head plan without its weights"
    expected.forward_backward()
    close(gradients(made), gradients(expected), 1e-5)


@on_ranks(TWO[0])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("factors", [(1.0, 2.0), (1.0, 0.0), (0.5, 0.5)], ids=["1 2", "1 0", "equal"])
def test_each_rank_with_a_scalar_of_its_own(rank: Rank, factors, sp):
    """Each fits, and no scalar is right for ``grad_hidden``, which was summed over them in the forward."""
    parallel.forget()
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(2, 20, 8, generator=generator).to(rank.device)[rank.rank]
    whole = torch.randn(12, 2, 8, generator=generator).to(rank.device)
    hidden = whole.chunk(2)[rank.rank] if sp else whole
    labels = torch.randint(0, 40, (2, 12), generator=generator).to(rank.device)
    mask = (torch.rand(2, 12, generator=generator) < 0.7).float().to(rank.device)

    def gradients(strategy: str) -> list[Tensor]:
        operands = [one.clone().requires_grad_() for one in (hidden, weight)]
        losses = fused_linear_cross_entropy(
            *operands,
            labels,
            tp_group=dist.group.WORLD,
            sequence_parallel=sp,
            token_weights=mask,
            config=FusedCEConfig(strategy=strategy, num_chunks=2),
        )
        losses.backward(factors[rank.rank] * mask)
        return [one.grad for one in operands]

    with (
        promises(*((1, 0) if factors[0] == factors[1] else (0, 1))),
        warnings.catch_warnings(action="ignore"),
    ):
        made = gradients("grad_in_forward")
    close(made, gradients("recompute"), 1e-6)
    parallel.forget()


@on_ranks(TWO[0])
def test_another_model_keeps_its_promise(rank: Rank):
    """An actor's and a critic's, in one process."""
    actor, critic = Training(rank, TrainingSetup()), Training(rank, TrainingSetup(), seed=8)
    for remade in (1, 0):
        with promises(NUM_MICRO_BATCHES):
            actor.forward_backward()
        with promises(NUM_MICRO_BATCHES - 1 if remade else 0, remade):
            critic.forward_backward(wrong=True)
        actor.assert_steps()
        critic.assert_steps()


@on_ranks(TWO[0])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_another_head_with_as_many_rows_on_one_rank(rank: Rank, num_chunks):
    """Of 20 and 20 rows, and of 20 and 12: all ranks know which of them broke its promise."""
    parallel.forget()
    config = FusedCEConfig(strategy="grad_in_forward", num_chunks=num_chunks)
    torch.manual_seed(3)
    unequal, equal = torch.randn(32, 8).to(rank.device), torch.randn(40, 8).to(rank.device)

    def step(weight: Tensor, keeps: bool) -> None:
        hidden = torch.randn(24, 8).to(rank.device).requires_grad_()
        labels = torch.randint(0, len(weight), (24,)).to(rank.device)
        mask, random = (torch.rand(24) < 0.7).float().to(rank.device), torch.randn(24).to(rank.device)
        upstream = 0.3 * mask if keeps else random
        shard = weight[:20] if rank.rank == 0 else weight[20:]
        shard = shard.clone().requires_grad_()
        losses = fused_linear_cross_entropy(
            hidden, shard, labels, tp_group=dist.group.WORLD, token_weights=mask, config=config
        )
        losses.backward(upstream)
        expected = hidden.detach().double().requires_grad_()
        plain = F.cross_entropy(expected @ weight.double().t(), labels, reduction="none")
        plain.backward(upstream.double())
        close([losses.detach(), hidden.grad], [plain.detach(), expected.grad], 1e-6)

    step(unequal, True)
    step(equal, True)
    with promises(kept=0, remade=1), warnings.catch_warnings(action="ignore"):
        step(equal, False)
    with promises(kept=2):
        step(unequal, True)
        step(unequal, True)
    step(equal, True)
    parallel.forget()


@on_ranks(TWO[0])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_a_checkpoint(rank: Rank, sp):
    """Two micro-batches in flight; the first backward changes the plan by which the second's forward runs.

    Ignored labels: their mask is the last tensor that both forwards save, and has to lie in the same place.
    """
    parallel.forget()
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 20, 8, generator=generator).to(rank.device)[rank.rank]
    batches = torch.randn(2, 12, 2, 8, generator=generator).to(rank.device).chunk(2 if sp else 1, 1)
    hidden = batches[rank.rank if sp else 0]
    labels = torch.randint(0, 40, (2, 12), generator=generator).to(rank.device)

    def gradients(strategy: str) -> list[Tensor]:
        operands = [one.clone().requires_grad_() for one in (*hidden, weight)]
        head = functools.partial(
            fused_linear_cross_entropy,
            tp_group=dist.group.WORLD,
            sequence_parallel=sp,
            token_weights=torch.ones_like(labels, dtype=torch.float32),
            config=FusedCEConfig(strategy=strategy, num_chunks=2, ignore_index=3),
        )
        losses = [
            checkpoint(head, one, operands[2], labels, use_reentrant=False).square().mean()
            for one in operands[:2]
        ]
        return list(torch.autograd.grad(losses, operands, [torch.ones_like(losses[0])] * 2))

    with warnings.catch_warnings(action="ignore"):
        close(gradients("grad_in_forward"), gradients("recompute"), 1e-6)
    parallel.forget()


@on_ranks(TWO[0])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_said(rank: Rank, tp):
    """By the replica that it happens on, once, with what to do."""
    training = Training(rank, TrainingSetup(tp=tp))
    wrong = is_wrong(rank, TrainingSetup(tp=tp), training.replica)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(2):
            training.forward_backward(wrong)
    said = printed.getvalue()
    tells = wrong and rank.rank == (1 if tp == 1 else 0)
    assert said.count("of the head of GPTModel (64 rows of 16) is not a scalar") == tells
    assert said.count("--fused-ce-strategy recompute or store") == tells
    assert said.count("[fused-ce] rank 1: the upstream") == (tells and tp == 1)


@on_ranks(TWO[0])
@pytest.mark.parametrize("setup", [TrainingSetup(tp=2), TrainingSetup(tp=2, sp=True)], ids=["", "sp"])
@pytest.mark.parametrize("strategy", ["recompute", "grad_in_forward"])
def test_a_skipped_token_with_an_upstream_gradient(rank: Rank, setup, strategy):
    """It cannot be made right: every rank of the group raises, and nothing was added for its micro-batch."""
    training = Training(rank, replace(setup, skip_masked=True, strategy=strategy))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^1 tokens of weight 0 were left out"):
            training.forward_backward(wrong=True)
        training.forward_backward()
        training.assert_steps()
