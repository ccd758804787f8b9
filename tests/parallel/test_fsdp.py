"""torch FSDP2 and Megatron-FSDP with the flag on against Megatron's DDP with it off: trained, equal.

The ranks are data parallel and see tokens of their own. Each case trains the same model by Megatron's own
wrappers and Adam, evaluates it between two steps, and compares losses, gradient norms and, at the end,
every parameter, gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import megatron, rl_utils
from tests.support.megatron import DDP, Model, both_cores, flag, have_groups
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
    from megatron.core import distributed

    if sharding.kind == "fsdp2":
        from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
        from megatron.core.transformer.transformer_layer import TransformerLayer

        # Megatron never names the stock class for local layers, which have more of them.
        units = {TransformerLayer, LanguageModelEmbedding}
        units |= {type(model.output_layer)} if sharding.own_unit else set()
        config: Any = distributed.TorchFullyShardedDataParallelConfig()
        return distributed.TorchFullyShardedDataParallel(
            model.config, config, model, sub_modules_to_wrap=units
        )
    if sharding.kind == "megatron":
        config = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=sharding.what,
            gradient_reduce_div_fusion=False,  # gloo cannot
        )
        return distributed.FullyShardedDataParallel(model.config, config, model)
    return None  # Megatron's DDP


class Training(megatron.Training):
    """One model under training. ``seen``: what it can be compared by."""

    def __init__(self, rank: Rank, model: Model, sharding: Sharding) -> None:
        built = megatron.build(model, rank)
        super().__init__(rank, built, wrapped(sharding, built), sharding.kind == "megatron", lr=1e-3)
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
        if self.sharding.kind == "megatron":
            self.ddp.module._replace_param_with_distributed_if_needed()
        named = self.model.named_parameters()
        return {name: gathered(self.sharding, tensor).clone() for name, tensor in named}


def gathered(sharding: Sharding, parameter: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return parameter.detach()
    if sharding.kind == "fsdp2":
        return parameter.detach().full_tensor()
    # Megatron-FSDP cuts buckets of parameters anywhere: gloo gathers parts of one size only.
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, parameter.detach().to_local().flatten().cpu())
    return torch.cat(parts).view(parameter.shape).to(parameter.device)


FSDP2, FSDP2_OWN_UNIT, MEGATRON = Sharding("fsdp2"), Sharding("fsdp2", own_unit=True), Sharding("megatron")
CASES = {
    "FSDP2, store": (Model(strategy="store"), FSDP2),
    "FSDP2, recompute, own unit": (Model(), FSDP2_OWN_UNIT),
    "FSDP2, grad_in_forward, own unit, MTP 1": (Model(mtp=1, strategy="grad_in_forward"), FSDP2_OWN_UNIT),
    "Megatron-FSDP, grad_in_forward": (Model(strategy="grad_in_forward"), MEGATRON),
    "Megatron-FSDP, store, tied, MTP 1": (Model(mtp=1, tied=True, strategy="store"), MEGATRON),
    "Megatron-FSDP, optim": (Model(), Sharding("megatron", what="optim")),
}


def trained(rank: Rank, model: Model, sharding: Sharding) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was seen on the way, and the parameters in the end."""
    training = Training(rank, model, sharding)
    are_sharded = [hasattr(parameter, "placements") for parameter in training.model.parameters()]
    assert all(are_sharded) if sharding.kind != "ddp" else not any(are_sharded)
    for number in range(STEPS):
        training.train(number)
        if number == 0:
            training.evaluate()
    return training.seen, training.parameters()


@on_ranks(*BOTH)
@pytest.mark.parametrize("case", CASES)
def test_sharded_against_ddp(rank: Rank, case):
    have_groups(1)
    model, sharding = CASES[case]
    expected = trained(rank, model, Sharding())
    with flag(strategy=model.strategy, num_chunks=3) as seen:
        got = trained(rank, model, sharding)
    forwards = STEPS * MICRO_BATCHES + 1  # one in evaluation
    assert seen.counts == ((1 + model.mtp) * forwards, 0, 0)
    megatron.assert_same(got[0], expected[0], BOUND)
    assert got[1].keys() == expected[1].keys()
    for name, right in expected[1].items():
        difference = (got[1][name] - right).abs().max()
        assert difference <= PARAMETER_BOUND, f"{name}: differs by {difference:.2e}"


@on_ranks(*BOTH)
def test_what_a_sharding_does_to_the_layer(rank: Rank):
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
    # A tied weight under FSDP2 is refused, as by Megatron's arguments: its rows are elsewhere again by then.
    with flag():
        training = Training(rank, Model(tied=True), FSDP2)
    with pytest.raises(TypeError, match=r"weight is a DTensor, placed \(Shard\(dim=0\),\)"):
        training.losses()


@on_ranks(BOTH[0])
@pytest.mark.parametrize("sharding", [FSDP2, FSDP2_OWN_UNIT, MEGATRON], ids=str)
@pytest.mark.parametrize("by", ["get_logprobs", "output_processor"])
def test_log_probs_of_a_sharded_model(rank: Rank, by, sharding):
    """Megatron's own: after the model's call weights are sharded again, and hooks wait for its output. Those
    of output_processor: minus the loss of Megatron's DDP."""
    import megatron_fused_ce

    processor = {"output_processor": megatron_fused_ce.output_processor}
    of_loss = by == "output_processor"

    def step(how: Sharding) -> tuple[torch.Tensor, torch.Tensor]:
        training = Training(rank, Model(tied=sharding.kind == "megatron"), how)
        training.zero_grad()
        batch = megatron.draw(rank, training.generator)
        if of_loss:
            made = megatron.losses_of(training.ddp, batch, rank, **(processor if how is sharding else {}))
            log_probs = made[0] if how is sharding else -made
        else:
            positions, _ = megatron.positions_and_mask(rank)
            log_probs = rl_utils.get_logprobs(training.ddp, batch.ids, positions)
        log_probs.mean().backward()
        training.ddp.finish_grad_sync()
        return log_probs.detach(), torch.as_tensor(training.optimizer.step()[1])

    have_groups(1)
    expected = step(Sharding())
    with rl_utils.patched_caller(), flag() as seen:  # the unit is of the class that the flag makes
        got = step(sharding)
    assert seen.counts == ((1, 0, 0) if of_loss else (0, 0, 1))
    for value, right in zip(got, expected, strict=True):
        assert (value - right).norm() <= BOUND * right.norm() > 0
