"""The training part of `make demo`: one small GPT, trained three times, by each rank of torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        scripts/demo/training.py build/demo/job.json

The model is megatron-core's GPTModel with its local layers, tensor parallel over all ranks. Each
run starts from the same seed and sees the same batches; they differ in the loss alone:

    stock    Megatron's unfused cross entropy on full logits
    native   Megatron's own `cross_entropy_fusion_impl="native"`, the yardstick
    fused    the first again, after `megatron_fused_ce.enable()`

On a CPU: fp32, gloo, AdamW. On GPUs: bf16, NCCL, sequence parallelism, Megatron's DDP and its
distributed optimizer. Rank 0 writes what it measured to the job's `results` file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.scripts.demo.job import Job, Run
from megatron_fused_ce.scripts.lib import gloo
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages


def stand_in_for_cuda() -> None:
    """The three things of CUDA that megatron-core's layers ask for where there is none."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    # Dropout is 0 and weights come from the CPU's generator: no state to switch.
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]


class MarkedLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm under sequence parallelism, which megatron-core's wrapper of it refuses.

    Each rank normalises its part of the sequence; the mark makes Megatron add up the gradients.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_gpt(job: Job, *, native_loss: bool) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = job.device == "cuda"
    config = TransformerConfig(
        num_layers=job.num_layers,
        hidden_size=job.hidden_size,
        num_attention_heads=job.num_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,  # apex's extension need not be there
        use_cpu_initialization=True,  # the same weights on every device
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=on_gpu,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        pipeline_dtype=torch.bfloat16 if on_gpu else torch.float32,
        cross_entropy_loss_fusion=native_loss,
        cross_entropy_fusion_impl="native",
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = MarkedLayerNorm
    layer.submodules.pre_mlp_layernorm = MarkedLayerNorm
    layers = TransformerBlockSubmodules([layer] * job.num_layers, layer_norm=MarkedLayerNorm)
    gpt: torch.nn.Module = GPTModel(
        config,
        layers,  # type: ignore[arg-type]
        vocab_size=job.vocab_size,
        max_sequence_length=job.seq_length,
        share_embeddings_and_output_weights=False,
    )
    return gpt


@dataclass(frozen=True)
class Trainer:
    """A model with what its device needs around a step."""

    model: torch.nn.Module
    zero_grad: Callable[[], Any]
    finish_grads: Callable[[], Any]  # after the backward, before the optimizer
    optimizer: Any


def trainer_on_cpu(job: Job, gpt: torch.nn.Module) -> Trainer:
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=job.learning_rate, betas=(0.9, 0.95))
    return Trainer(gpt, optimizer.zero_grad, lambda: None, optimizer)


def trainer_on_gpu(job: Job, gpt: torch.nn.Module) -> Trainer:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config: Any = gpt.config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        Float16Module(config, gpt.cuda()),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=job.learning_rate,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            adam_beta2=0.95,
        ),
        [ddp],
    )

    def zero_grad() -> None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()

    return Trainer(ddp, zero_grad, lambda: finalize_model_grads([ddp]), optimizer)


class Batches:
    """Windows of the text at random places, the same for every run and rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokens = torch.from_numpy(np.load(job.tokens).astype(np.int64))  # noqa: TID251 (without pickles)
        self._generator = torch.Generator().manual_seed(job.seed)
        self.position_ids = torch.arange(job.seq_length).repeat(job.micro_batch, 1).to(job.device)
        above_diagonal = torch.ones(job.seq_length, job.seq_length, dtype=torch.bool).triu(1)
        self.attention_mask = above_diagonal[None, None].to(job.device)  # True: not attended

    def next(self) -> tuple[Tensor, Tensor]:
        length = self._job.seq_length
        last = self._tokens.numel() - length - 1
        starts = torch.randint(last, (self._job.micro_batch,), generator=self._generator)
        rows = torch.stack([self._tokens[start : start + length + 1] for start in starts.tolist()])
        rows = rows.to(self._job.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def learning_rate_at(job: Job, step: int) -> float:
    """Linear warm-up over a tenth of the run, then half a cosine down to a tenth."""
    num_warmup = max(1, job.num_steps // 10)
    if step < num_warmup:
        return job.learning_rate * (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, job.num_steps - num_warmup)
    return job.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train(job: Job, name: str, report: Callable[[Run], None]) -> Run:
    """Train one model from the seed and measure it.

    The tracker of logits runs in every step on a CPU, where it costs nothing that one could
    measure; on a GPU in step 1 alone, without compiled functions, and its time is not used.
    """
    on_gpu = job.device == "cuda"
    run = Run(name)
    torch.manual_seed(job.seed)
    gpt = build_gpt(job, native_loss=name == "native")
    trainer = (trainer_on_gpu if on_gpu else trainer_on_cpu)(job, gpt)
    batches = Batches(job)
    num_vocab_rows = job.vocab_size // dist.get_world_size()

    for step in range(job.num_steps):
        tokens, labels = batches.next()
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate_at(job, step)
        started = synchronised_ms(job)
        trainer.zero_grad()
        tracker = LogitStorages(vocab_rows=num_vocab_rows, hidden_size=job.hidden_size)
        with watch(tracker, eager=on_gpu) if not on_gpu or step == 1 else contextlib.nullcontext():
            # The mask, as pretrain_gpt.py gives it: the flag then knows the weights in the forward.
            loss = trainer.model(
                tokens,
                batches.position_ids,
                batches.attention_mask,
                labels=labels,
                loss_mask=torch.ones(labels.shape, device=labels.device),
            )
            loss.mean().backward()
        trainer.finish_grads()
        trainer.optimizer.step()
        run.step_ms.append(synchronised_ms(job) - started)
        run.losses.append(loss.detach().double().mean().item())
        run.logits_peak_bytes = max(run.logits_peak_bytes, tracker.peak_bytes)
        run.logits_storages += tracker.num_storages
        if on_gpu and step == 2:
            torch.cuda.reset_peak_memory_stats()  # step 1 ran eagerly, step 2 compiled
        report(run)
        if not math.isfinite(run.losses[-1]):
            raise RuntimeError(f"the {name} run's loss became {run.losses[-1]} in step {step}")

    if on_gpu:
        run.device_peak_bytes = torch.cuda.max_memory_allocated()
    peaks = torch.tensor([run.logits_peak_bytes, run.device_peak_bytes], device=job.device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    run.logits_peak_bytes, run.device_peak_bytes = peaks.tolist()
    return run


@contextlib.contextmanager
def watch(tracker: LogitStorages, *, eager: bool) -> Iterator[None]:
    """Run with the tracker; `grad_in_forward` keeps torch.compile's functions from hiding their storages."""
    previous = torch.compiler.set_stance("force_eager") if eager else None
    with previous or contextlib.nullcontext(), tracker:
        yield


def synchronised_ms(job: Job) -> float:
    if job.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3


class Progress:
    """Rank 0's bars, one for each run; lines instead where the output is no terminal."""

    def __init__(self, job: Job, names: list[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._job = job
        self._console = Console()
        self._quiet = dist.get_rank() != 0
        self._bars = Bars(
            TextColumn("{task.description:<7}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=self._quiet or not self._console.is_terminal,
        )
        self._tasks = {
            name: self._bars.add_task(name, total=job.num_steps, state="", start=False) for name in names
        }

    def __enter__(self) -> Progress:
        self._bars.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bars.__exit__(*exc)

    def start(self, name: str) -> None:
        self._bars.start_task(self._tasks[name])

    def __call__(self, run: Run) -> None:
        num_steps = len(run.losses)
        state = f"loss {run.losses[-1]:.4f}  {run.step_ms[-1]:.0f} ms/step"
        self._bars.update(self._tasks[run.name], completed=num_steps, state=state)
        at_end = num_steps == self._job.num_steps
        if not self._quiet and not self._console.is_terminal and (num_steps % 20 == 0 or at_end):
            print(f"{run.name:<7} step {num_steps:>3}/{self._job.num_steps}  {state}", flush=True)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    on_gpu = job.device == "cuda"
    warnings.filterwarnings("ignore")  # Megatron's, about Apex and Transformer Engine
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo.use_one_thread()
    dist.init_process_group("nccl" if on_gpu else "gloo")

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_fused_ce

    if on_gpu:
        parallel_state.initialize_model_parallel(dist.get_world_size())
        model_parallel_cuda_manual_seed(job.seed)
    else:
        stand_in_for_cuda()
        parallel_state.initialize_model_parallel(dist.get_world_size())

    names = ["stock", "native", "fused"]
    runs = []
    with Progress(job, names) as progress:
        for name in names:
            if name == "fused":  # last: it stays enabled
                config = megatron_fused_ce.FusedCEConfig(num_chunks=job.num_chunks)
                megatron_fused_ce.enable(config)
            progress.start(name)
            run = train(job, name, progress)
            if name == "fused":
                counters = megatron_fused_ce.counters()
                run.heads_fused = counters.fused
                run.logits_materialised = counters.materialised
                run.heads_stock = counters.stock
            runs.append(run)
    if dist.get_rank() == 0:
        Path(job.results).write_text(json.dumps([asdict(run) for run in runs], indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gloo.leave()
