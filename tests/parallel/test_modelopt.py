"""ModelOpt's distillation in Megatron's loop, flag off and on: the same losses and weights, no logits."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from tests.support import megatron
from tests.support.megatron import BATCH, SEQUENCE, VOCAB, Flag, Model, flag, of_core
from tests.support.ranks import Rank, on_ranks

#: Where scripts/dev/setup_env.sh puts ModelOpt and what it imports. With megatron-core it takes seconds.
MODELOPT, PLUGIN = str(Path(sys.prefix) / "modelopt-0.47.0"), "modelopt.torch.distill.plugins.megatron"
NEWER, OLDER = (
    replace(of, name=f"{of.name} modelopt", path=(*of.path, MODELOPT), preload=(*of.preload, PLUGIN))
    for of in (megatron.NEWEST, megatron.INSTALLED)
)
MICRO_BATCHES, CHUNKS = 2, 6
ARGUMENTS = "megatron.training.global_vars"
STUDENT, TEACHER = Model(), Model(hidden=64)


@dataclass(frozen=True)
class Pair:
    """A student, its teacher, and what ModelOpt is asked for."""

    student: Model = STUDENT
    teacher: Model = TEACHER
    skip_lm_loss: bool = True
    temperature: float = 1.0
    anneals: bool = False  # a tensor that is another at each step
    reverse: bool = False
    topk: int | None = None
    intermediate: bool = False
    #: Megatron's own arguments: they keep a head from being adopted where its model is built, as in
    #: pretrain_gpt.py. Without them it is as in Megatron-Bridge.
    arguments: bool = True
    why_not: str | None = None
    spoiler: Callable[[Any], None] | None = None
    #: of the optimizer; then an evaluation
    steps: int = 2


SPLIT = Model(sequence_parallel=True)
PAIRS = {
    "gpt": Pair(temperature=2.0, anneals=True),
    "gpt sp mixed": Pair(replace(SPLIT, tied=True), replace(SPLIT, hidden=64), skip_lm_loss=False),
    "gpt mtp reverse bridge": Pair(
        Model(mtp=1, fused_wgrad=True), temperature=0.5, reverse=True, arguments=False
    ),
    "hybrid intermediate": Pair(
        Model(family="hybrid", sequence_parallel=True, strategy="grad_in_forward"),
        SPLIT, intermediate=True, skip_lm_loss=False,
    ),
}  # fmt: skip


def of_clamped_logits(loss: Any) -> None:
    loss._projection = torch.nn.Hardtanh(-2.0, 2.0)


def without_last_classes(loss: Any) -> None:
    """Somebody's, of whom a few numbers show nothing."""
    stock, kept = loss.pre_forward, VOCAB // 2 - 3
    loss.pre_forward = lambda *sides: tuple(side[..., :kept] for side in stock(*sides))


TOPK = "distillation: TopKLogitsKLLoss takes real logits"
NO_DIVERGENCE = "distillation: LogitsKLLoss of this ModelOpt is no divergence"
STAY = {
    "top-k": Pair(topk=16, skip_lm_loss=False, why_not=TOPK),
    "another loss": Pair(spoiler=of_clamped_logits, why_not=NO_DIVERGENCE),
    "masks classes": Pair(spoiler=without_last_classes, why_not=NO_DIVERGENCE),
}


def peaked(model: Model, rank: Rank, seed: int) -> Any:
    """A model whose distributions differ from token to token, and from those of another seed."""
    built = megatron.build(model, rank)
    generator = torch.Generator().manual_seed(seed)
    weight = built.shared_embedding_or_output_weight() if model.tied else built.output_layer.weight
    whole = torch.randn(VOCAB, model.hidden, generator=generator)
    with torch.no_grad():
        weight.copy_(0.4 * whole.chunk(rank.size)[rank.rank])
    return built


def joined(pair: Pair, rank: Rank) -> Any:
    """As megatron/post_training/model_builder.py and Bridge's DistillationProvider join them."""
    import modelopt.torch.distill as mtd
    import modelopt.torch.distill.plugins.megatron as plugin

    student, teacher = (peaked(side, rank, seed) for seed, side in enumerate((pair.student, pair.teacher)))
    norms = "decoder.final_norm" if pair.student.family == "hybrid" else "decoder.final_layernorm"
    config = plugin.DistillationConfig(
        skip_lm_loss=pair.skip_lm_loss,
        logit_kl_temperature=pair.temperature,
        logit_kl_topk=pair.topk,
        intermediate_layer_pairs=[(norms, "decoder.final_layernorm")] if pair.intermediate else [],
    )
    config = plugin.setup_distillation_config(config, student.config, teacher.config)
    for loss in config.criterion.values():
        if pair.reverse:
            loss._reverse = True
        if pair.spoiler is not None:
            pair.spoiler(loss)
    mode = {"teacher_model": teacher, "criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(student, mode=[("kd_loss", mode)])
    plugin.adjust_distillation_model_for_mcore(model, config)
    return model


def masked(losses: Any, mask: Tensor) -> Tensor:
    """ModelOpt's reduction in Megatron's loss function: the losses of some are parts of a sum over ranks."""
    losses, reduces, split = losses if isinstance(losses, tuple) else (losses, False, False)
    if split:
        group = dist.group.WORLD
        mask = mask.tensor_split(group.size(), 1)[group.rank()]
    loss = (losses.reshape(-1).float() * mask.reshape(-1)).sum()
    if reduces or split:
        dist.all_reduce(loss)
    return loss


def kd_loss(mask: Tensor, model: Any, losses: Tensor) -> Any:
    """The loss function of Megatron's distillation."""
    of_labels = masked(losses, mask)
    made = model.compute_kd_loss(student_loss=of_labels, loss_reduction_fn=lambda loss: masked(loss, mask))
    report = {"lm": of_labels.detach().clone()} | {name: loss.detach().clone() for name, loss in made.items()}
    return made["kd_loss"] if model.training else of_labels, mask.sum().to(torch.int), report


class Run:
    """Some optimizer steps in Megatron's schedule, then an evaluation."""

    def __init__(self, pair: Pair, rank: Rank, flag: bool) -> None:
        arguments: Any = types.ModuleType(ARGUMENTS)
        named = {"export_kd_teacher_load": "folder", "modelopt_enabled": True}
        arguments._GLOBAL_ARGS = types.SimpleNamespace(**named)
        with patch.dict(sys.modules, {ARGUMENTS: arguments} if pair.arguments else {}):
            self.model = joined(pair, rank)
        if not flag and pair.why_not is None:
            # Megatron's cross entropies work in place, in fp32 on the logits that ModelOpt has kept.
            stock = self.model.compute_language_model_loss
            self.model.compute_language_model_loss = lambda labels, logits: stock(labels, logits.clone())
        training = megatron.Training(rank, self.model, lr=1e-3)
        self.reports: list[dict[str, Tensor]] = []

        def forward_step(data: Any, model: Any) -> Any:
            batch = next(data)
            return megatron.losses_of(model, batch, rank), functools.partial(kd_loss, batch.mask, self.model)

        def schedule(seed: int, forward_only: bool) -> None:
            generator = torch.Generator().manual_seed(seed)
            batches = [megatron.draw(rank, generator, 0.7) for _ in range(MICRO_BATCHES)]
            self.reports += megatron.scheduled(
                forward_step, [training.ddp], batches, forward_only=forward_only
            )

        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        training.ddp.train()
        storages = LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=pair.student.hidden)
        with warnings.catch_warnings(record=True) as warned, storages:
            warnings.simplefilter("always")
            for step in range(pair.steps):
                training.zero_grad()
                if pair.anneals:
                    (loss,) = self.model._layers_to_loss.values()
                    loss._temperature = torch.tensor(pair.temperature / (1 + step))
                schedule(step, False)
                if step == 0:
                    self.gradients = megatron.gradients_of(self.model)
                assert training.optimizer.step()[0]
        self.peak_bytes = storages.peak_bytes
        self.kept_twice = sum("already has an intermediate output" in str(w.message) for w in warned)
        training.ddp.eval()
        with torch.no_grad():
            schedule(pair.steps, True)
        for (name, parameter), before in zip(self.model.named_parameters(), start, strict=True):
            assert torch.equal(parameter, before) == name.startswith("_teacher_model"), name
        layers = self.model.output_layer, self.model.teacher_model.output_layer
        assert all(layer._intermediate_output is None for layer in layers)
        self.state = {name: x for name, x in self.model.state_dict().items() if isinstance(x, Tensor)}


def both(pair: Pair, rank: Rank, strategy: str) -> tuple[Run, Run, Flag]:
    """Off, on, and what was seen of the latter."""
    megatron.have_groups(rank.size)
    off = Run(pair, rank, flag=False)
    with flag(strategy=strategy, num_chunks=CHUNKS) as seen:
        on = Run(pair, rank, flag=True)
    return off, on, seen


def compare(off: Run, on: Run) -> None:
    assert len(on.reports) == len(off.reports) > MICRO_BATCHES
    for mine, theirs in zip(on.reports, off.reports, strict=True):
        assert mine.keys() == theirs.keys()
        for name, loss in theirs.items():
            # The weights of two right runs drift apart by their rounding.
            torch.testing.assert_close(mine[name], loss, rtol=20 * megatron.LOSS_BOUND, atol=0)
        assert theirs["logits_loss"] > 1, ("the models agree: the case tests nothing", theirs)
    assert on.kept_twice == off.kept_twice
    megatron.assert_same(on.gradients, off.gradients, may_be_zero="mtp")
    assert on.state.keys() == off.state.keys()


@on_ranks(of_core(2, NEWER), of_core(1, NEWER, pytest.mark.rest), of_core(2, OLDER))
@pytest.mark.parametrize("name", PAIRS)
def test_training_in_megatrons_loop(rank: Rank, name: str):
    pair = PAIRS[name]
    off, on, seen = both(pair, rank, pair.student.strategy)
    compare(off, on)
    calls = (pair.steps + 1) * MICRO_BATCHES
    of_labels = MICRO_BATCHES if pair.skip_lm_loss else calls
    of_labels += calls * pair.student.mtp
    assert seen.counts == (calls + of_labels, 0, 0)
    # Of [T, V / R] in fp32 ModelOpt's formula holds ten, and the head in plain PyTorch as many of a chunk.
    everything = 4 * BATCH * SEQUENCE * VOCAB // rank.size
    assert off.peak_bytes >= 8 * everything
    takes_mask = pair.student.family == "gpt" or megatron.core_version() >= (0, 17)
    if takes_mask:  # else `auto` chooses, and keeps all of so few
        assert 0 < on.peak_bytes <= 12 * everything / CHUNKS


@on_ranks(of_core(2, NEWER))
@pytest.mark.parametrize("name", STAY)
def test_what_stays_with_megatron(rank: Rank, name: str):
    """In words, and the same to the bit."""
    pair = replace(STAY[name], steps=1)
    off, on, seen = both(pair, rank, "recompute")
    assert seen.counts[:2] == (0, 0)
    for mine, theirs in zip([*on.reports, on.state], [*off.reports, off.state], strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert rank.rank or pair.why_not in seen.said, seen.said
