"""torch FSDP2 and Megatron-FSDP with the flag on against Megatron's DDP with it off: trained, equal.

The ranks are data parallel and see tokens of their own. Each case trains the same model by Megatron's own
wrappers and Adam, evaluates it between two steps, and compares losses, gradient norms and, at the end,
every parameter, gathered.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import megatron, rl_utils
from tests.support.megatron import CORE_0_19, DDP, Model, both_cores, flag, have_groups, needs_core
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

pytest.importorskip("einops", reason="Megatron-FSDP imports it")


#: Ranks of their own where ranks live on: DTensor remembers the mesh of an earlier one that is equal.
BOTH = both_cores(2, own="fsdp", needs_nccl=DDP)

STEPS, MICRO_BATCHES = 3, 2

#: Norm-relative, for losses and gradient norms of three steps in fp32.
BOUND = 2e-6
#: Absolute, of parameters that Adam moved by 3e-3: where a gradient is nearly 0, rounding decides how far.
PARAMETER_BOUND = 1e-5


@dataclass(frozen=True)
class Sharding:
    """How parameters are spread over the data-parallel ranks."""

    kind: str = "ddp"  # or fsdp2, megatron
    #: FSDP2: gather the output layer by itself, as Megatron does under Transformer Engine.
    own_unit: bool = False
    #: Megatron-FSDP's data_parallel_sharding_strategy
    what: str = "optim_grads_params"

    def __str__(self) -> str:
        return f"{self.kind}{' own unit' if self.own_unit else ''}"


def wrapped(sharding: Sharding, model: Any) -> Any:
    if sharding.kind == "fsdp2":
        return fsdp2(sharding, model)
    if sharding.kind == "megatron":
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=sharding.what,
            gradient_reduce_div_fusion=False,  # gloo cannot
        )
        return FullyShardedDataParallel(model.config, config, model)
    return None  # Megatron's DDP


def fsdp2(sharding: Sharding, model: Any) -> Any:
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig,
    )
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.transformer_layer import TransformerLayer

    # Megatron never names the stock class for local layers, which have more of them.
    units = {TransformerLayer, LanguageModelEmbedding}
    units |= {type(model.output_layer)} if sharding.own_unit else set()
    config = TorchFullyShardedDataParallelConfig()
    return TorchFullyShardedDataParallel(model.config, config, model, sub_modules_to_wrap=units)


class Training(megatron.Training):
    """One model under training. ``seen``: what it can be compared by."""

    def __init__(self, rank: Rank, model: Model, sharding: Sharding) -> None:
        built = megatron.build(model, rank)
        distributed = sharding.kind == "megatron"
        super().__init__(rank, built, wrapped(sharding, built), distributed=distributed, lr=1e-3)
        self.sharding = sharding
        self.generator = torch.Generator().manual_seed(11 + rank.rank)
        self.seen: dict[str, torch.Tensor] = {}

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-token losses ``[b, s]`` of tokens of this rank's own, and the mask."""
        batch = megatron.draw(self.rank, self.generator, 0.8)
        return megatron.losses_of(self.ddp, batch, self.rank), batch.mask

    def train(self, number: int) -> None:
        self.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            losses, mask = self.losses()
            (losses * mask).sum().div(mask.sum() * MICRO_BATCHES).backward()
            self.seen[f"loss {number}.{micro_batch}"] = losses.detach().clone()
        self.ddp.finish_grad_sync()
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self.seen[f"gradient norm {number}"] = torch.as_tensor(norm)

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.seen["evaluation"] = self.losses()[0]
        self.ddp.train()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter, whole, as the next forward would see it."""
        whole = functools.partial(gathered, self.sharding)
        if self.sharding.kind == "megatron":
            self.ddp.module._replace_param_with_distributed_if_needed()
        return {name: whole(tensor).clone() for name, tensor in self.model.named_parameters()}


def gathered(sharding: Sharding, parameter: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return parameter.detach()
    if sharding.what == "no_shard":
        return parameter.detach().to_local()
    if sharding.kind == "fsdp2":
        return parameter.detach().full_tensor()
    # Megatron-FSDP cuts buckets of parameters anywhere: gloo gathers parts of one size only.
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, parameter.detach().to_local().flatten().cpu())
    return torch.cat(parts).view(parameter.shape).to(parameter.device)


FSDP2, FSDP2_OWN_UNIT = Sharding("fsdp2"), Sharding("fsdp2", own_unit=True)
MEGATRON = Sharding("megatron")
CASES = {
    **{f"FSDP2, {name}": (Model(strategy=name), FSDP2) for name in STRATEGIES},
    **{f"FSDP2, {name}, own unit": (Model(strategy=name), FSDP2_OWN_UNIT) for name in STRATEGIES},
    **{f"Megatron-FSDP, {name}": (Model(strategy=name), MEGATRON) for name in STRATEGIES},
    **{f"Megatron-FSDP, {name}, tied": (Model(strategy=name, tied=True), MEGATRON) for name in STRATEGIES},
    **{
        f"Megatron-FSDP, {what}": (Model(), Sharding("megatron", what=what))
        for what in ("no_shard", "optim", "optim_grads")
    },
    "FSDP2, own unit, MTP 1": (Model(mtp=1), FSDP2_OWN_UNIT),
    "Megatron-FSDP, tied, MTP 1": (Model(mtp=1, tied=True), MEGATRON),
}


def trained(rank: Rank, model: Model, sharding: Sharding) -> dict[str, torch.Tensor]:
    training = Training(rank, model, sharding)
    are_sharded = [hasattr(parameter, "placements") for parameter in training.model.parameters()]
    assert all(are_sharded) if sharding.kind != "ddp" else not any(are_sharded)
    for number in range(STEPS):
        training.train(number)
        if number == 0:
            training.evaluate()
    return training.seen | training.parameters()


#: One a way of sharding, by both cores; the others are of `make test-rest`, by one.
CORE = ("FSDP2, store", "FSDP2, recompute, own unit", "Megatron-FSDP, grad_in_forward")


@on_ranks(*BOTH)
@pytest.mark.parametrize("case", CORE)
def test_sharded_against_ddp(rank: Rank, case):
    against_ddp(rank, case)


@pytest.mark.rest
@on_ranks(BOTH[0 if CORE_0_19.is_dir() else 1])
@pytest.mark.parametrize("case", [case for case in CASES if case not in CORE])
def test_other_cases_against_ddp(rank: Rank, case):
    against_ddp(rank, case)


def against_ddp(rank: Rank, case: str) -> None:
    if case == "Megatron-FSDP, no_shard":
        needs_core(0, 19)  # 0.16.1's fails there without this package too
    have_groups(1)
    model, sharding = CASES[case]
    expected = trained(rank, model, Sharding())
    with flag(strategy=model.strategy, num_chunks=3) as seen:
        got = trained(rank, model, sharding)
    forwards = STEPS * MICRO_BATCHES + 1  # one in evaluation
    assert seen.counts == ((1 + model.mtp) * forwards, 0, 0)
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        difference = (got[name].double() - right.double()).norm()
        assert got[name].shape == right.shape, name
        if "loss" in name or "norm" in name.split() or name == "evaluation":
            difference, bound = difference / right.double().norm(), BOUND
        else:
            difference, bound = (got[name] - right).abs().max(), PARAMETER_BOUND
        assert difference <= bound, f"{name}: differs by {difference:.2e}, more than {bound:.0e}"


@on_ranks(*BOTH)
def test_a_sharding_hooks_output_is_the_loss(rank: Rank):
    """What a sharding hook puts in the place of the layer's output is what gets a gradient."""
    have_groups(1)
    reached: list[bool] = []

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        replaced = output[0].view_as(output[0])
        replaced.register_hook(lambda grad: reached.append(True))
        return replaced, None

    hook.__module__ = "megatron.core.distributed.fsdp.a_test"
    with flag():
        built = megatron.build(Model(), rank)
    built.output_layer.register_forward_hook(hook)
    megatron.forward(built, rank, labels=True).sum().backward()
    assert reached == [True]


@on_ranks(*BOTH)
@pytest.mark.parametrize("sharding", [FSDP2, FSDP2_OWN_UNIT, MEGATRON], ids=str)
def test_log_probs_of_a_sharded_model(rank: Rank, sharding):
    """Megatron's own: after the model's call weights are sharded again, and hooks wait for its output."""

    def step(how: Sharding) -> tuple[torch.Tensor, torch.Tensor]:
        training = Training(rank, Model(tied=sharding.kind == "megatron"), how)
        training.ddp.zero_grad_buffer()
        batch = megatron.draw(rank, training.generator)
        positions, _ = megatron.positions_and_mask(rank)
        log_probs = rl_utils.get_logprobs(training.ddp, batch.ids, positions)
        log_probs.mean().backward()
        training.ddp.finish_grad_sync()
        return log_probs.detach(), torch.as_tensor(training.optimizer.step()[1])

    have_groups(1)
    expected = step(Sharding())
    with rl_utils.patched_caller(), flag() as seen:
        got = step(sharding)
    assert seen.counts == (0, 0, 1)
    for value, right in zip(got, expected, strict=True):
        assert (value - right).norm() <= BOUND * right.norm() > 0


@on_ranks(BOTH[0])
@pytest.mark.parametrize("sharding", [FSDP2, FSDP2_OWN_UNIT, MEGATRON], ids=str)
def test_output_processor_of_a_sharded_model(rank: Rank, sharding):
    """Minus its log-probability is the loss of Megatron's DDP, and trains the same."""
    import megatron_fused_ce

    needs_core(0, 18)
    have_groups(1)
    processor = {"output_processor": megatron_fused_ce.output_processor}
    seen = []
    for how, given in ((Sharding(), {}), (sharding, processor)):
        with flag() if how.own_unit else contextlib.nullcontext():  # the unit is of its class
            training = Training(rank, Model(tied=sharding.kind == "megatron"), how)
        training.zero_grad()
        made = megatron.losses_of(training.ddp, megatron.draw(rank, training.generator), rank, **given)
        loss = -made[0] if given else made
        loss.mean().backward()
        training.ddp.finish_grad_sync()
        seen.append((loss.detach(), torch.as_tensor(training.optimizer.step()[1])))
    for value, right in zip(*reversed(seen), strict=True):
        assert (value - right).norm() <= BOUND * right.norm() > 0


@on_ranks(*BOTH)
def test_tied_under_fsdp2_is_refused(rank: Rank):
    """As Megatron's arguments do; the embedding's rows are elsewhere again by then."""
    have_groups(1)
    with flag():
        training = Training(rank, Model(tied=True), Sharding("fsdp2"))
    with pytest.raises(TypeError, match=r"weight is a DTensor, placed \(Shard\(dim=0\),\)"):
        training.losses()
