"""A small pretrain_gpt.py on the training loop of megatron-core 0.19.2's wheel, which comes without scripts.

Arguments, model, optimizer, loop, logging and checkpoints are Megatron's own. Written here is what a training
script is there for: datasets (mock data), the batch, the forward step and the loss. The head takes it for any
other script: nothing in it knows the flag.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(num_samples):
    """Training, validation and test data: Megatron's mock documents, the same on every rank."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, num_samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


def next_batch(batches):
    """The next micro-batch, from the first rank of the tensor-parallel group to the others."""
    args = get_args()
    group = mpu.get_tensor_model_parallel_group()
    first = mpu.get_tensor_model_parallel_src_rank()
    read = next(batches) if mpu.get_tensor_model_parallel_rank() == 0 else None
    shape = (args.micro_batch_size, args.seq_length)
    kinds = dict.fromkeys(("tokens", "position_ids", "labels"), torch.int64) | {"loss_mask": torch.float32}
    batch = {}
    for name, dtype in kinds.items():
        batch[name] = torch.empty(shape, dtype=dtype) if read is None else read[name].contiguous()
        torch.distributed.broadcast(batch[name], first, group=group)
    return batch


def loss_of(loss_mask, losses):
    """Sum over unmasked tokens, their number, and the pair of both that Megatron's log averages."""
    loss = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(batches, model):
    batch = next_batch(batches)
    mask = torch.ones(1, 1, get_args().seq_length, get_args().seq_length, dtype=torch.bool).triu(1)
    losses = model(
        batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return losses, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    datasets.is_distributed = True  # built where the batches are read, not on rank 0 alone
    arguments = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
