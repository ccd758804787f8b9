"""The cheapest change with which a training fits, and the fewest GPUs on which there is one.

The space of a setting on ``n`` GPUs is every setting that Megatron accepts with

- tensor parallelism by powers of two up to a node, with sequence parallelism where it is above 1,
- pipeline stages of equal size, or with a smaller last one,
- context parallelism, and expert parallelism where there are experts, by powers of two,
- activations recomputed as asked, of the MLPs (experts, latent up-projections), or of whole layers,
- the optimizer's state as asked, or divided (Megatron's distributed optimizer),

and everything else as asked. A change costs :data:`COSTS` points, for a size per doubling or halving; the
points are a rule of thumb for lost speed, not a measurement. The flag is none of the changes: the search runs
once for each way of computing the loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from megatron_fused_ce.estimate import blocks
from megatron_fused_ce.estimate.advice import Gpu, Way
from megatron_fused_ce.estimate.setting import RECOMPUTE_MODULES, Optimizer, Parallel, Recompute, Setting
from megatron_fused_ce.estimate.static import stages, static

#: Cheapest first. Sizes: for each doubling or halving.
COSTS = {
    "optimizer": 1,
    "sequence": 1,
    "expert": 2,
    "tensor": 3,
    "context": 4,
    "pipeline": 5,
    "selective": 6,
    "full": 12,
}
#: GPUs that NVLink connects.
NODE = 8
#: The search for a number of GPUs ends here.
MOST_GPUS = 4096

MakeWay = Callable[[Setting], Way]


@dataclass(frozen=True)
class Layout:
    """A setting of the space."""

    cost: float
    setting: Setting
    #: Megatron's, to add to the launch
    flags: str


@dataclass(frozen=True)
class Found:
    """The cheapest layout in which a way of computing the loss fits."""

    layout: Layout
    way: Way

    @property
    def gpus(self) -> int:
        return self.layout.setting.parallel.gpus


@dataclass(frozen=True)
class Search:
    """The space around a setting."""

    asked: Setting
    gpu: Gpu
    #: of optimizer, recompute and expert_tensor, what stays as asked: flags added to the launch would not
    #: change it
    fixed: frozenset[str] = frozenset()
    #: GPUs that NVLink connects: the largest tensor-parallel size
    node: int = NODE

    def cheapest(self, way: MakeWay, gpus: int) -> Found | None:
        """The cheapest layout on ``gpus`` GPUs in which ``way`` fits; None if there is none in the space."""
        for layout in self.layouts(gpus):
            try:
                found = way(layout.setting)
            except ValueError:  # the launch's own budget is too small for its strategy here
                continue
            if found.verdict == "fits":
                return Found(layout, found)
        return None

    def fewest_gpus(self, way: MakeWay) -> Found | None:
        """The cheapest layout on the fewest GPUs above the asked number on which there is one."""
        found = (self.cheapest(way, gpus) for gpus in self.numbers_of_gpus())
        return next(filter(None, found), None)

    def numbers_of_gpus(self) -> Iterator[int]:
        """Those above the asked one: every number up to a node, then whole nodes."""
        above = self.asked.parallel.gpus
        yield from range(above + 1, self.node + 1)
        yield from (gpus for gpus in range(2 * self.node, MOST_GPUS + 1, self.node) if gpus > above)

    def layouts(self, gpus: int) -> Iterator[Layout]:
        """Layouts on ``gpus`` GPUs, cheapest first, but for those whose weights, gradients and optimizer
        alone exceed the GPU."""
        asked = self.asked
        optimizers, recomputes = _optimizers(asked, self.fixed), _recomputes(asked, self.fixed)
        rows = sorted(
            (
                (cost + more + further, parallel, optimizer, recompute)
                for cost, parallel in _parallels(asked, gpus, self.fixed, self.node)
                for more, optimizer in optimizers
                for further, recompute in recomputes
            ),
            key=itemgetter(0),
        )
        too_large: dict[tuple[Parallel, Optimizer], bool] = {}
        for cost, parallel, optimizer, recompute in rows:
            setting = _with(asked, parallel, optimizer, recompute)
            if setting is None:
                continue
            # What is held of weights depends on neither.
            kind = replace(parallel, context=1, sequence=False), optimizer
            if kind not in too_large:
                held = max(static(setting, stage).total for stage in stages(setting))
                too_large[kind] = held > self.gpu.usable
            if not too_large[kind]:
                yield Layout(cost, setting, flags(asked, setting))


def _with(asked: Setting, parallel: Parallel, optimizer: Optimizer, recompute: Recompute) -> Setting | None:
    """``asked`` with these; None where Megatron would refuse it."""
    training, data = asked.training, parallel.data
    micro_batches = training.num_micro_batches
    if micro_batches is not None:
        micro_batches, rest = divmod(micro_batches * asked.parallel.data, data)
        if rest:
            return None
    training = replace(training, num_micro_batches=micro_batches, optimizer=optimizer, recompute=recompute)
    try:
        setting = replace(asked, parallel=parallel, training=training)
    except ValueError:
        return None
    return setting if accepted(setting) else None


def accepted(setting: Setting) -> bool:
    """Whether Megatron (core_v0.19.0) accepts what :class:`Setting` does not check: its parallel sizes."""
    model, parallel, training = setting.model, setting.parallel, setting.training
    if parallel.context > 1 and not training.transformer_engine:
        return False
    if training.sequence % (parallel.context * (2 if parallel.context > 1 else 1)):
        return False
    if model.mixture:
        if parallel.tensor > 1 and not parallel.sequence:
            return False
        if model.mixture.ffn_hidden_size % parallel.expert_tensor:
            return False
    if space := model.state_space:
        heads = parallel.tensor * parallel.context
        return not (space.num_heads % heads or space.num_groups % parallel.tensor)
    return True


def _steps(name: str, size: int, before: int) -> float:
    return COSTS[name] * abs(math.log2(size / before))


def _parallels(
    asked: Setting, gpus: int, fixed: frozenset[str], node: int
) -> Iterator[tuple[float, Parallel]]:
    """Ways to divide the model over ``gpus`` GPUs, and what each costs."""
    was, model, training = asked.parallel, asked.model, asked.training
    # FSDP goes with data parallelism alone. Megatron's own RMSNorm refuses sequence parallelism.
    stays = training.optimizer.sharding == "full"
    divides_sequence = training.transformer_engine or not model.rms_norm
    for pipeline, last in _pipelines(asked, gpus, stays):
        within = [size for size in _POWERS if size <= node]
        for tensor in _sizes(within, was.tensor, gpus // pipeline, stays):
            sequences = {was.sequence, divides_sequence} if tensor == was.tensor else {divides_sequence}
            expert_tensor = was.expert_tensor
            if model.mixture and "expert_tensor" not in fixed:
                expert_tensor = tensor
            for context in _sizes(_POWERS, was.context, gpus // pipeline // tensor, stays):
                for expert in _experts(asked, gpus // pipeline, expert_tensor, stays):
                    cost = _steps("tensor", tensor, was.tensor) + _steps("pipeline", pipeline, was.pipeline)
                    cost += _steps("context", context, was.context) + _steps("expert", expert, was.expert)
                    sizes: dict[str, Any] = {"gpus": gpus, "tensor": tensor, "pipeline": pipeline}
                    sizes |= {"context": context, "expert": expert, "expert_tensor": expert_tensor}
                    for sequence in {one and tensor > 1 for one in sequences}:
                        extra = COSTS["sequence"] * (tensor == was.tensor and sequence != was.sequence)
                        with contextlib.suppress(ValueError):
                            yield (
                                cost + extra,
                                replace(was, **sizes, sequence=sequence, last_stage_layers=last),
                            )


_POWERS = tuple(2**power for power in range(13))


def _sizes(choices: Sequence[int], asked: int, most: int, stays: bool) -> list[int]:
    """Of ``choices`` and the asked size those that divide ``most``."""
    sizes = {asked} if stays else {*choices, asked}
    return sorted(size for size in sizes if size <= most and most % size == 0)


def _pipelines(asked: Setting, gpus: int, stays: bool) -> Iterator[tuple[int, int | None]]:
    """Numbers of stages, and layers of the last one where it is smaller."""
    was, layers = asked.parallel, asked.model.num_layers
    by_hand = (was.first_stage_layers, was.last_stage_layers) != (None, None) or was.chunks > 1 or was.layout
    if stays or by_hand:
        if gpus % was.pipeline == 0:
            yield was.pipeline, was.last_stage_layers
        return
    for pipeline in range(1, min(layers, gpus) + 1):
        if gpus % pipeline:
            continue
        last = layers - (pipeline - 1) * -(-layers // pipeline)
        if layers % pipeline == 0:
            yield pipeline, None
        elif last >= 1:
            yield pipeline, last


def _experts(asked: Setting, ranks: int, expert_tensor: int, stays: bool) -> list[int]:
    if asked.model.mixture is None:
        return [asked.parallel.expert]
    sizes = _sizes(_POWERS, asked.parallel.expert, ranks // expert_tensor, stays)
    return [size for size in sizes if ranks % (size * expert_tensor) == 0]


def _optimizers(asked: Setting, fixed: frozenset[str]) -> list[tuple[int, Optimizer]]:
    was = asked.training.optimizer
    if was.sharding != "none" or "optimizer" in fixed:
        return [(0, was)]
    return [(0, was), (COSTS["optimizer"], replace(was, sharding="optimizer"))]


def _recomputes(asked: Setting, fixed: frozenset[str]) -> list[tuple[int, Recompute]]:
    was = asked.training.recompute
    found = [(0, was)]
    if "recompute" in fixed:
        return found
    modules = {*was.modules, *_selective(asked)}
    if not was.full and modules > set(was.modules):
        chosen = tuple(name for name in RECOMPUTE_MODULES if name in modules)
        found.append((COSTS["selective"], Recompute(modules=chosen)))
    if not was.full or was.block or (was.num_layers or 1) > 1:
        found.append((COSTS["full"], Recompute(full=True, num_layers=1)))
    return found


def _selective(asked: Setting) -> set[str]:
    """Modules that hold most and are computed again at the price of about two products of a layer's four."""
    model = asked.model
    kinds = {type(block) for layer in blocks.layers(model) for block in layer}
    names = {blocks.MLP: "mlp", blocks.Experts: "moe", blocks.LatentAttention: "mla_up_proj"}
    return {name for kind, name in names.items() if kind in kinds}


def flags(asked: Setting, setting: Setting) -> str:
    """Megatron's flags that make ``setting`` of ``asked`` (its number of GPUs apart)."""
    was, parallel = asked.parallel, setting.parallel
    words = [
        f"--{name}-model-parallel-size {size}"
        for name, size, before in (
            ("tensor", parallel.tensor, was.tensor),
            ("pipeline", parallel.pipeline, was.pipeline),
            ("expert", parallel.expert, was.expert),
        )
        if size != before
    ]
    if parallel.sequence and not was.sequence:
        words.append("--sequence-parallel")
    if parallel.last_stage_layers != was.last_stage_layers:
        words.append(f"--decoder-last-pipeline-num-layers {parallel.last_stage_layers}")
    if parallel.context != was.context:
        words.append(f"--context-parallel-size {parallel.context}")
    if setting.training.optimizer.sharding != asked.training.optimizer.sharding:
        words.append("--use-distributed-optimizer")
    recompute = setting.training.recompute
    if recompute != asked.training.recompute:
        if recompute.full:
            words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        else:
            words.append(
                f"--recompute-granularity selective --recompute-modules {' '.join(recompute.modules)}"
            )
    return " ".join(words)
