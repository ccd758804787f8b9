"""Megatron's models on a CPU or on GPUs: cores, process groups, small models, and what they are fed."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce.scripts.lib.results import version
from tests.support.rank_process import Environment
from tests.support.ranks import Rank, Ranks

VOCAB, HIDDEN, SEQUENCE, BATCH = 160, 32, 24, 2

#: Largest difference of a gradient between two right ways to compute it, norm-relative: fp32 rounding
#: through two layers, or that of half precision.
GRADIENT_BOUND, HALF_BOUND = 1e-5, 2e-2
LOSS_BOUND = 1e-6

#: Where scripts/dev/setup_env.sh puts megatron-core 0.19.2, whose metadata asks for Python 3.12.
CORE_0_19 = Path(sys.prefix) / "mcore-0.19.2"
#: Every rank finds it imported, and with it what the flag imports of this package.
CORE = ("megatron.core.distributed", "megatron.core.models.gpt.gpt_layer_specs")
CORE += ("megatron_fused_ce.adapter.language_module",)
#: The megatron-core in the environment: 0.16.1 in CI.
INSTALLED = Environment("megatron", prepare=f"{__name__}:prepare", preload=(*Environment().preload, *CORE))
NEWEST = replace(INSTALLED, name="megatron-0.19.2", path=(str(CORE_0_19),))
#: A reason for ``Ranks.needs_nccl``.
DDP = "Megatron's DDP reduces gradients by coalesced collectives, which gloo has for CPU tensors alone"


def of_core(size: int, environment: Environment, *marks: Any, own: str = "", needs_nccl: str = "") -> Any:
    """``size`` ranks with this megatron-core, for :func:`.on_ranks`.

    Tests of the installed one are of `make test-rest`, but where 0.19.2 cannot be had.
    """
    if str(CORE_0_19) not in environment.path and CORE_0_19.is_dir():
        marks += (pytest.mark.rest,)
    for folder in map(Path, environment.path):
        installed = folder == CORE_0_19 and (version("megatron-core") or "") >= "0.19"
        missing = f"no {folder.name} in the environment: run scripts/dev/setup_env.sh"
        marks += (pytest.mark.skipif(not (installed or folder.is_dir()), reason=missing),)
    if importlib.util.find_spec("megatron") is None:
        marks += (pytest.mark.skip(reason="megatron-core is not installed"),)
    return pytest.param(Ranks(size, environment, own, needs_nccl), marks=marks)


def both_cores(size: int, own: str = "", needs_nccl: str = "") -> list[Any]:
    return [of_core(size, each, own=own, needs_nccl=needs_nccl) for each in (NEWEST, INSTALLED)]


def needs_core(major: int, minor: int) -> None:
    """Skips, on a rank, where its megatron-core is older."""
    if core_version() < (major, minor):
        pytest.skip(f"not in megatron-core before {major}.{minor}")


def prepare(device: torch.device) -> None:
    """Stand-ins for CUDA on a CPU (with apex's kernel in Python); only the norms on GPUs."""
    from megatron_fused_ce.scripts.lib import megatron_cpu

    if device.type == "cpu":
        megatron_cpu.install(fused_wgrad=True)
        # A backward called on a tensor runs outside the stand-ins' mode: name the CPU itself.
        torch.cuda.current_device = lambda: device
        torch.cuda.default_generators = {device: torch.default_generator}
    else:
        from megatron.core.transformer import torch_norm

        megatron_cpu.stand_in_for_torch_norm(torch_norm)


def imported(file: Path, name: str) -> Any:
    """The module of this name that a file has, beside those that were imported."""
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the flag --------------------------------------------------------------------------------


@dataclass
class Flag:
    """What was seen while the flag was on: heads fused, made real, left to Megatron; and what was printed."""

    counts: tuple[int, int, int] = (0, 0, 0)
    said: str = ""

    def lines(self, words: str) -> list[str]:
        return [line for line in self.said.splitlines() if words in line]


@contextlib.contextmanager
def flag(on: bool = True, deferred_logits: bool = False, trust: Any = (), **options: Any) -> Iterator[Flag]:
    """What happens inside, of which the :class:`Flag` knows at the end; with the flag ``on``, it has these
    options of its config. It was off, and is afterwards."""
    import megatron_fused_ce
    from megatron_fused_ce.adapter import say

    counters, seen, printed = megatron_fused_ce.counters(), Flag(), io.StringIO()
    counters.reset()
    say._said.clear()
    try:
        with contextlib.redirect_stdout(printed):
            if on:
                config = megatron_fused_ce.FusedCEConfig(**options)
                megatron_fused_ce.enable(config, deferred_logits=deferred_logits, trust=trust)
            yield seen
    finally:
        megatron_fused_ce.disable()
        seen.counts = counters.fused, counters.materialised, counters.stock
        seen.said = printed.getvalue().replace("\n[fused-ce]   ", " ")  # each line of the log in one piece
        print(seen.said, end="")


# --- process groups --------------------------------------------------------------------------

_layout: tuple[int, int, int | None] | None = None
#: Those of the layout.
groups: set[Any] = set()


def have_groups(tensor: int, pipeline: int = 1, virtual: int | None = None) -> None:
    """Megatron's parallel state is of this layout from now on. Made anew, by all ranks, where it differs.

    Kept from test to test where ranks live on: every gloo group polls in threads of its own as long as it
    lives, and ``destroy_model_parallel`` only forgets them.
    """
    from megatron.core import parallel_state

    global _layout
    wanted, alive = (tensor, pipeline, virtual), dist.distributed_c10d._world.pg_map
    if wanted == _layout and groups <= alive.keys():
        return
    parallel_state.destroy_model_parallel()
    # In one order on all ranks, which a set has not: NCCL's end of a communicator waits for the others'.
    for group in [group for group in alive if group in groups]:
        dist.destroy_process_group(group)
    others = set(alive)
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual_pipeline_model_parallel_size=virtual)
    groups.clear()
    groups.update(alive.keys() - others)
    _layout = wanted


# --- models ----------------------------------------------------------------------------------

#: Of :attr:`.Model.extra`: logits are scaled (not in 0.16).
MUP = {"use_mup": True, "mup_base_hidden_size": 8}


@dataclass(frozen=True)
class Model:
    """One model and how its head is used."""

    family: str = "gpt"  # gpt or hybrid (MambaModel before 0.18)
    mtp: int = 0
    virtual: int | None = None  # stages on each rank of a pipeline; None: one
    tied: bool = False
    sequence_parallel: bool = False
    fused_wgrad: bool = False
    overlap: bool = False
    dtype: torch.dtype | None = torch.float32
    strategy: str = "recompute"
    skip_masked: bool = False
    hidden: int = HIDDEN
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


#: Nothing random, and no fused kernel that a CPU or a bare GPU lacks; 0.15 has no scaling of MTP's loss.
ALWAYS: dict[str, Any] = dict(
    hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, num_attention_heads=4,
    add_bias_linear=False, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    apply_rope_fusion=False, deallocate_pipeline_outputs=True, mtp_loss_scaling_factor=0.1,
)  # fmt: skip


def core_version() -> tuple[int, int]:
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR


def build(model: Model, rank: Rank, seed: int = 7) -> Any:
    """The model, cut as :func:`have_groups` says; of a pipeline with one stage a rank this rank's."""
    (built,) = build_stages(model, rank, seed)
    return built


def build_stages(model: Model, rank: Rank, seed: int = 7) -> list[Any]:
    """This rank's stages, first to last."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig, multi_token_prediction

    if model.fused_wgrad:  # a CPU's ranks have it in Python
        pytest.importorskip("fused_weight_gradient_mlp_cuda", reason="apex's extension is not installed")
    tensor = state.get_tensor_model_parallel_world_size()
    pipeline = state.get_pipeline_model_parallel_world_size()
    multi_token_prediction.MTPLossLoggingHelper.tracker.clear()  # as large as an earlier model's
    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=max(2, pipeline * (model.virtual or 1)),
        hidden_size=model.hidden,
        gradient_accumulation_fusion=model.fused_wgrad,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=model.virtual,
        pipeline_dtype=model.dtype,
        overlap_p2p_comm=bool(model.virtual),
        batch_p2p_comm=not model.virtual,
        sequence_parallel=model.sequence_parallel and tensor > 1,
        mtp_num_layers=model.mtp or None,
        params_dtype=model.dtype,
        bf16=model.dtype == torch.bfloat16,
        fp16=model.dtype == torch.float16,
        **ALWAYS | model.extra,
    )
    shared = {"vocab_size": VOCAB, "max_sequence_length": SEQUENCE, "position_embedding_type": "rope"}
    shared["share_embeddings_and_output_weights"] = model.tied
    stages = []
    for number in range(model.virtual or 1):
        torch.manual_seed(seed + 100 * number)
        own, stage = copy.copy(config), number if model.virtual else None  # as in Megatron's training loop
        layer = gpt_layer_specs.get_gpt_layer_local_spec()
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(own, layer, use_transformer_engine=False, vp_stage=stage)
        if model.family == "hybrid":
            made = _hybrid(rank, own, layer, mtp, **shared)
        else:
            of: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage}
            first, last = state.is_pipeline_first_stage(**of), state.is_pipeline_last_stage(**of)
            ends = {"pre_process": first, "post_process": last, "vp_stage": stage}
            made = GPTModel(own, layer, mtp_block_spec=mtp, **ends, **shared)
        stages.append(made.to(rank.device, model.dtype or torch.float32))
    return stages


def _hybrid(rank: Rank, config: Any, layer: Any, mtp: Any, **shared: Any) -> Any:
    """Megatron ships its stacks with Transformer Engine's layers alone: here two of GPT's, attention (``*``)
    with the MLP behind it. No Mamba layer: that needs mamba-ssm's kernels."""
    if rank.device.type == "cuda":
        pytest.importorskip("transformer_engine", reason="HybridModel's last norm is its")
    from megatron.core.transformer.spec_utils import ModuleSpec

    if core_version() >= (0, 18):
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        parts = HybridStackSubmodules(attention_layer=layer, mtp_block_spec=mtp)
        pattern = "**" + "/*" * (config.mtp_num_layers or 0)
        stack = ModuleSpec(module=HybridStack, submodules=parts)
        return HybridModel(config, stack, hybrid_layer_pattern=pattern, **shared)
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

    stack = ModuleSpec(module=MambaStack, submodules=MambaStackSubmodules(attention_layer=layer))
    return MambaModel(config, stack, hybrid_override_pattern="**", **shared)


def as_called(built: Any) -> Any:
    """As Megatron wraps it: half-precision models in Float16Module."""
    from megatron.core.transformer.module import Float16Module

    return built if built.config.params_dtype == torch.float32 else Float16Module(built.config, built)


def ddp(built: Any, overlap: bool = False, **options: Any) -> Any:
    """The model in Megatron's DDP, with gradients of zero."""
    from megatron.core import distributed

    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": overlap, "bucket_size": 1, **options}
    config = distributed.DistributedDataParallelConfig(**options)
    wrapped = distributed.DistributedDataParallel(built.config, config, built)
    wrapped.zero_grad_buffer()
    return wrapped


def in_ddp(model: Model, rank: Rank) -> list[Any]:
    """This rank's stages, first to last, each in Megatron's DDP, for its schedules."""
    from megatron.core import distributed

    stages = [ddp(as_called(stage), model.overlap) for stage in build_stages(model, rank)]
    config = stages[0].config
    if model.overlap:
        several = [stage.no_sync for stage in stages]
        config.no_sync_func = several if model.virtual else several[0]
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return stages


class Training:
    """A model under training by Megatron's Adam: ``model``, ``ddp`` around it, and ``optimizer``."""

    def __init__(self, rank: Rank, model: Any, wrapped: Any = None, distributed: bool = False, **more: Any):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.rank, self.model = rank, model
        self.ddp = wrapped or ddp(model, use_distributed_optimizer=distributed)
        adam = {"lr": 1e-2, "bf16": model.config.bf16, "params_dtype": model.config.params_dtype}
        adam |= {"clip_grad": 1.0, "use_distributed_optimizer": distributed, **more}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **adam), [self.ddp])

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()


def positions_and_mask(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """Position ids ``[b, s]`` and the causal mask ``[1, 1, s, s]`` (True: not attended)."""
    positions = torch.arange(SEQUENCE, device=rank.device).expand(BATCH, -1)
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=rank.device).triu(1)
    return positions, causal[None, None]


def forward(built: Any, rank: Rank, labels: bool, **kwargs: Any) -> Any:
    batch = draw(rank)
    return built(batch.ids, *positions_and_mask(rank), labels=batch.labels if labels else None, **kwargs)


def rollout(built: Any, rank: Rank) -> torch.Tensor:
    """Gathered logits of two generation steps of Megatron's: under inference mode, and under ``no_grad``."""
    from megatron.core.inference import contexts, utils

    is_active: Any = contextlib.nullcontext if core_version() < (0, 19) else utils.InferenceMode.active
    built.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), is_active():
            context = contexts.StaticInferenceContext(BATCH, SEQUENCE)
            logits = forward(built, rank, False, inference_context=context, runtime_gather_output=True)
    return logits


class Batch(NamedTuple):
    """One micro-batch, each ``[b, s]``."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


def draw(rank: Rank, generator: torch.Generator | None = None, kept: float | None = None) -> Batch:
    """A random micro-batch, the labels its tokens shifted; ``kept``: the share of the mask that is 1, else
    any weights."""
    generator = generator or torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator).to(rank.device)
    mask = torch.rand(BATCH, SEQUENCE, generator=generator).to(rank.device)
    return Batch(ids[:, :-1], ids[:, 1:].contiguous(), mask if kept is None else (mask < kept).float())


def losses_of(model: Any, batch: Batch, rank: Rank, **more: Any) -> Any:
    """What the model gives for labels and mask, where it takes one."""
    modules = getattr(model, "modules", list)()
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}  # ModelOpt makes subclasses
    takes_mask = "MambaModel" not in names or core_version() >= (0, 17)
    given = {"labels": batch.labels, **({"loss_mask": batch.mask} if takes_mask else {}), **more}
    return model(batch.ids, *positions_and_mask(rank), **given)


def scheduled(step: Any, stages: list[Any], batches: Sequence[Any], **more: Any) -> Any:
    """What Megatron's schedule gives for a training step of these micro-batches."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    given = {"seq_length": SEQUENCE, "micro_batch_size": BATCH, "forward_only": False, **more}
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in stages],
        model=stages,
        num_microbatches=len(batches),
        **given,
    )


def gradients_of(built: Any) -> dict[str, torch.Tensor]:
    """What was added up for each parameter, by name: in its ``main_grad`` where it has one."""
    named = {name: getattr(of, "main_grad", of.grad) for name, of in built.named_parameters()}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def assert_same(
    got: dict[str, Any], expected: dict[str, Any], bound: Any = GRADIENT_BOUND, may_be_zero: str = "not one"
) -> None:
    """By name, norm-relative; none of them zero, but those in whose name ``may_be_zero`` is found.

    ``bound``: a number, or a function of the name.
    """
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        norm = float(right.double().norm())
        assert norm > 0 or re.search(may_be_zero, name), f"{name} is zero: the case tests nothing"
        difference = float((got[name].double() - right.double()).norm()) / (norm or 1.0)
        limit = 0.0 if norm == 0 else bound(name) if callable(bound) else bound
        assert difference <= limit, f"{name}: differs by {difference:.2e}, more than {limit:.0e}"
