"""A wrong loss on one rank stops every rank of the model, and no other model.

Small GPT models in Megatron's DDP, through its schedules, its ``finalize_model_grads`` and its optimizers.
The loss of one data-parallel replica weights a token otherwise than the ``loss_mask`` that its model was
called with; strategy ``grad_in_forward`` then has wrong gradients there, which replicas and pipeline stages
without the head get too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce.testing.collectives import Collectives
from tests.support import megatron
from tests.support.megatron import NEWEST, have_groups, of_core, transformer_config
from tests.support.ranks import Environment, Rank, Ranks, on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


def prepare(device: torch.device) -> None:
    """Megatron is imported first and patched then, as where ``enable()`` comes late."""
    from megatron.core import distributed, optimizer  # noqa: F401
    from megatron.core.models.gpt import gpt_model  # noqa: F401
    from megatron.core.pipeline_parallel import schedules  # noqa: F401

    import megatron_fused_ce

    megatron.prepare(device)
    megatron_fused_ce.enable()
    megatron_fused_ce.disable()


PREPARE = "tests.parallel.test_upstream_mismatch:prepare"
MEGATRON = Environment("late", prepare=PREPARE)
MEGATRON_0_19 = replace(NEWEST, name="late-0.19.2", prepare=PREPARE)
TWO, FOUR = Ranks(2, MEGATRON), Ranks(4, MEGATRON)
NEWER = of_core(2, MEGATRON_0_19)

VOCAB, HIDDEN, SEQUENCE, BATCH, NUM_MICRO_BATCHES = 64, 16, 8, 2, 2


@dataclass(frozen=True)
class Launch:
    """How a model is cut and stepped; what is left over of the ranks are replicas."""

    pp: int = 1
    tp: int = 1
    clip_grad: float = 1.0
    distributed: bool = False
    frozen: str = ""  # part of the names of frozen parameters
    dtype: torch.dtype = torch.float32
    strategy: str = "grad_in_forward"
    skip_masked: bool = False


def build(rank: Rank, launch: Launch, seed: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=launch.tp,
        pipeline_model_parallel_size=launch.pp,
        pipeline_dtype=launch.dtype,
        params_dtype=launch.dtype,
        bf16=launch.dtype == torch.bfloat16,
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
    ).to(rank.device, launch.dtype)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if launch.frozen and launch.frozen in f"{name} stage {stage}":
            parameter.requires_grad_(False)
    return model


class Training(megatron.Training):
    """One model and its optimizer on this rank."""

    def __init__(self, rank: Rank, launch: Launch, seed: int = 7) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.parallel_state import get_data_parallel_rank

        import megatron_fused_ce

        have_groups(launch.tp, launch.pp)
        megatron_fused_ce.enable(
            megatron_fused_ce.FusedCEConfig(
                strategy=launch.strategy, num_chunks=2, skip_masked=launch.skip_masked
            )
        )
        try:
            model = build(rank, launch, seed)
        finally:
            megatron_fused_ce.disable()
        super().__init__(rank, model, distributed=launch.distributed, clip_grad=launch.clip_grad)
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


def last_replica(rank: Rank, launch: Launch) -> int:
    return rank.size // (launch.tp * launch.pp) - 1


LAUNCHES = {
    "dp": Launch(),
    "dp, no clipping": Launch(clip_grad=0.0),
    "dp, bf16, no clipping": Launch(clip_grad=0.0, dtype=torch.bfloat16),
    "dp, distributed optimizer": Launch(distributed=True, clip_grad=0.0),
    "dp, frozen head": Launch(frozen="output_layer", clip_grad=0.0),
    "dp, masked tokens skipped": Launch(strategy="recompute", skip_masked=True),
    "pp": Launch(pp=2),
    "pp, no clipping": Launch(pp=2, clip_grad=0.0),
    "pp, distributed optimizer": Launch(pp=2, distributed=True),
    "pp, frozen head": Launch(pp=2, frozen="output_layer"),
    "pp, frozen last stage": Launch(pp=2, frozen="stage 1", clip_grad=0.0),
    "tp": Launch(tp=2),
}


def check_wrong_loss(rank: Rank, launch: Launch) -> None:
    """In the first step and again after right ones; the wrong loss is that of one replica."""
    training = Training(rank, launch)
    for _ in range(2):
        training.forward_backward(wrong=training.replica == last_replica(rank, launch))
        said = training.assert_raises_and_changes_nothing()
        assert ("the head of GPTModel" in said) == training.has_head, said
        assert training.has_head or "a head on another rank" in said
        training.forward_backward()
        training.assert_steps()


@on_ranks(TWO, NEWER)
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_wrong_loss_stops_every_rank(rank: Rank, name):
    check_wrong_loss(rank, LAUNCHES[name])


@pytest.mark.rest
@on_ranks(FOUR)
@pytest.mark.parametrize(
    "launch",
    [Launch(pp=2, clip_grad=0.0), Launch(tp=2, distributed=True), Launch(tp=2, pp=2)],
    ids=["pp 2, dp 2", "tp 2, dp 2", "tp 2, pp 2"],
)
def test_a_wrong_loss_stops_every_rank_of_four(rank: Rank, launch):
    check_wrong_loss(rank, launch)


@on_ranks(TWO, NEWER)
@pytest.mark.parametrize("pp", [1, 2])
def test_what_it_costs(rank: Rank, pp):
    """One all-reduce of one int a step, where some rank uses grad_in_forward; one in all where none does."""

    def told(training: Training) -> int:
        with Collectives({dist.group.WORLD: "world"}) as issued:
            training.forward_backward()
        training.assert_steps()
        return sum((made.dtype, made.op, made.shapes) == ("int32", "MAX", ((1,),)) for made in issued.calls)

    used = Training(rank, Launch(pp=pp))
    assert [told(used) for _ in range(3)] == [2, 1, 1]
    unused = Training(rank, Launch(pp=pp, strategy="store"))
    assert [told(unused) for _ in range(3)] == [1, 0, 0]


@on_ranks(TWO)
def test_auto_keeps_to_what_the_ranks_agreed_on(rank: Rank):
    """No rank used grad_in_forward in the first step, so nobody would be told: no later call takes it."""
    from megatron_fused_ce import FusedCEConfig, planner
    from megatron_fused_ce.adapter import model_guard

    training = Training(rank, Launch(pp=2, strategy="auto"))
    told = []
    stock = planner.plan

    def plan(inputs: Any) -> Any:
        assert inputs.uses_in_flight == 1  # without multi-token prediction
        told.append(inputs.token_weights_known)
        return stock(inputs)

    planner.plan = plan
    try:
        for _ in range(2):
            training.forward_backward()
            training.assert_steps()
    finally:
        planner.plan = stock
    if training.has_head:
        assert told == [True, False], "a plan for the first step, one for all that follow"
        assert not model_guard.guard_of(training.model.output_layer).allowed
    assert FusedCEConfig().strategy == "auto"


@on_ranks(TWO)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_models_optimizer_goes_on(rank: Rank, dtype, distributed):
    """An actor's and a critic's, in one process: each stops for its own head alone."""
    launch = Launch(dtype=dtype, distributed=distributed)
    actor, critic = Training(rank, launch), Training(rank, launch, seed=8)
    for _ in range(2):
        actor.forward_backward()
        critic.forward_backward(wrong=rank.rank == 0)
        actor.assert_steps()
        critic.assert_raises_and_changes_nothing()
        critic.forward_backward()
        critic.assert_steps()


@on_ranks(TWO)
def test_a_model_without_a_fused_head_goes_on(rank: Rank):
    """Its Megatron optimizer says which parameters are its model's."""
    import megatron_fused_ce

    critic = Training(rank, Launch())
    with contextlib.ExitStack() as stack:
        stock = megatron_fused_ce.enable
        megatron_fused_ce.enable = lambda config: None
        stack.callback(setattr, megatron_fused_ce, "enable", stock)
        actor = Training(rank, Launch(dtype=torch.bfloat16))
    assert not hasattr(actor.model.output_layer, "fused_ce_config")
    critic.forward_backward(wrong=rank.rank == 1)
    actor.forward_backward()
    actor.assert_steps()
    critic.assert_raises_and_changes_nothing()


@on_ranks(TWO)
def test_an_optimizer_without_finalize_model_grads(rank: Rank):
    """A bare torch optimizer over the model stops on the rank that knows, as before."""
    from megatron_fused_ce.grad_guard import UpstreamMismatch

    training = Training(rank, Launch(strategy="grad_in_forward"))
    training.ddp.config.finalize_model_grads_func = None
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.forward_backward(wrong=rank.rank == 0)
    for parameter in training.model.parameters():
        parameter.grad = parameter.main_grad.clone()
    before = training.state()
    raised = False
    try:
        optimizer.step()
    except UpstreamMismatch as error:
        raised = "the head of GPTModel" in str(error)
    assert raised == (rank.rank == 0)
    assert all(map(torch.equal, before, training.state())) == (rank.rank == 0)


@on_ranks(FOUR)
@pytest.mark.parametrize("one_axis", [False, True], ids=["two axes", "one axis"])
def test_models_on_a_part_of_the_ranks(rank: Rank, one_axis):
    """Two of them, on two ranks each: told over their own groups, whatever the other does."""
    from types import SimpleNamespace

    import megatron_fused_ce
    from megatron_fused_ce.adapter import model_guard
    from megatron_fused_ce.grad_guard import Guard, UpstreamMismatch, raise_if_mismatch

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([number]) for number in range(4)][rank.rank]
    mine = pairs[rank.rank // 2]
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer)
    guard = model_guard._of_layer[layer] = Guard("the head", [model])
    guard.prepare(rank.device)
    groups = SimpleNamespace(
        tp=alone, pp=alone if one_axis else [mine, alone], dp_cp=mine if one_axis else alone
    )
    megatron_fused_ce.enable()
    megatron_fused_ce.disable()
    with Collectives({mine: "mine"}) as issued:
        for wrong_on in (None, 1, 0, None):
            if rank.rank == wrong_on:
                guard.record_mismatch(torch.tensor(True, device=rank.device))
            if rank.rank >= 2 and wrong_on == 1:
                continue  # the other model is in another step
            model_guard.tell_all_ranks([model], groups)
            try:
                raise_if_mismatch()
            except UpstreamMismatch:
                assert rank.rank < 2 and wrong_on is not None
            else:
                assert rank.rank >= 2 or wrong_on is None
    assert {made.group for made in issued.calls} == {"mine"}
    assert len(issued.calls) == 1 + (4 if rank.rank < 2 else 3)
