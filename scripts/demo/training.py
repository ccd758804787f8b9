"""The training part of `make demo`: a small GPT of megatron-core's, by each rank of torchrun.

    torchrun --nproc-per-node 2 -m megatron_fused_ce.launch scripts/demo/training.py \\
        --tokens tokens.npy --train-iters 100 --fused-chunked-ce --fused-ce-num-chunks 8

It takes the flags of pretrain_gpt.py that `compare` adds, and logs as Megatron does. On a CPU: fp32, gloo. On
GPUs: bf16, NCCL. Tensor parallel over all ranks, AdamW, the same weights and batches whatever the flags.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import arguments
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages

SEED = 1234
#: About 0.5 s a step on 2 CPU cores. A rank's logits take 32 MiB, its largest weight 3 MiB.
VOCAB, LAYERS, HIDDEN, HEADS = 8192, 2, 192, 4
SEQUENCE, BATCH = 128, 16
LEARNING_RATE = 1.5e-3
#: Begins rank 0's last line.
MEASURED = "[demo] peak, MiB:"


def build_gpt(given: argparse.Namespace, on_gpu: bool) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,  # the same weights on every device
        tensor_model_parallel_size=dist.get_world_size(),
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        cross_entropy_loss_fusion=given.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl="native",
    )
    gpt: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
    )
    return gpt.cuda() if on_gpu else gpt


def batch_of(tokens: Tensor, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows of the text at random places, and the tokens that follow, ``[b, s]`` each."""
    starts = torch.randint(len(tokens) - SEQUENCE - 1, (BATCH,), generator=generator)
    rows = torch.stack([tokens[start : start + SEQUENCE + 1] for start in starts.tolist()]).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(given: argparse.Namespace, device: torch.device) -> float:
    """Logs every step; the peak of logits on a CPU, of all memory on a GPU, in MiB of the fullest rank."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(SEED)
    gpt = build_gpt(given, on_gpu)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, given.train_iters, pct_start=0.1, div_factor=10.0, cycle_momentum=False
    )
    tokens = torch.from_numpy(np.load(given.tokens).astype(np.int64))  # noqa: TID251 (without pickles)
    generator = torch.Generator().manual_seed(SEED)
    positions = torch.arange(SEQUENCE, device=device).repeat(BATCH, 1)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)[None, None]  # not attended
    tracker = LogitStorages(vocab_rows=VOCAB // dist.get_world_size(), hidden_size=HIDDEN)
    for step in range(given.train_iters):
        rows, labels = batch_of(tokens, generator, device)
        began = time.perf_counter()
        optimizer.zero_grad()
        # On a CPU watching costs nothing that one could measure; a GPU has its own count of all memory.
        with contextlib.nullcontext() if on_gpu else tracker:
            # The mask, as pretrain_gpt.py gives it: the flag then knows the weights in the forward.
            named = {"labels": labels, "loss_mask": torch.ones(labels.shape, device=device)}
            loss = gpt(rows, positions, mask, **named)
            loss.mean().backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach().double().mean().item()
        ms = 1e3 * (time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(
                f" iteration {step + 1:8d}/{given.train_iters:8d} | elapsed time per iteration (ms): {ms:.1f}"
                f" | lm loss: {mean:.9E} | number of skipped iterations:   0 |",
                flush=True,
            )
    peak = torch.cuda.max_memory_allocated() if on_gpu else tracker.peak_bytes
    dist.all_reduce(held := torch.tensor(float(peak), device=device), dist.ReduceOp.MAX)
    return held.item() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--train-iters", type=int, default=100)
    parser.add_argument("--cross-entropy-loss-fusion", action="store_true")
    parser.add_argument("--cross-entropy-fusion-impl", choices=("native",))
    given = arguments.add_arguments(parser).parse_args()
    warnings.filterwarnings("ignore")  # Megatron's, about Apex and Transformer Engine
    device = torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        megatron_cpu.install()
    gloo.use_one_thread()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if given.fused_chunked_ce:
        megatron_fused_ce.enable(FusedCEConfig(num_chunks=given.fused_ce_num_chunks))

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(dist.get_world_size())
    model_parallel_cuda_manual_seed(SEED)
    if dist.get_rank() == 0:
        print(f"  params_dtype {'.' * 36} torch.{'bfloat16' if device.type == 'cuda' else 'float32'}")
    peak_mib = train(given, device)
    if dist.get_rank() == 0:
        print(MEASURED, peak_mib, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gloo.leave()
