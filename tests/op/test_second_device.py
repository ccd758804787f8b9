"""Tensors of another device than the current one: each stream that is waited on is the tensors' own."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.ranks import collectives
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@on_ranks(2)
def test_a_group_that_cannot_coalesce(rank: Rank):
    """gloo's: its collectives run one by one, and each is waited for by an event of its own."""
    group = dist.new_group(backend="gloo")
    total = torch.full((2,), rank.rank + 1.0)
    with patch("torch.cuda.Stream") as side, patch("torch.cuda.stream"), patch("torch.cuda.current_stream"):
        stream = collectives._SideStream(torch.device("cuda", 0))
        with stream.coalesced(group):
            pending = stream.start(dist.all_reduce, (total,), group=group)
            side().record_event.assert_called_once_with()
            pending.wait()
    assert total.tolist() == [3.0, 3.0]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("of_this_torch", [True, False])
def test_the_side_stream_coalesces(of_this_torch):
    """Where the backend says that it can, or is NCCL and too old to say."""
    backend = MagicMock(spec=["name", *["supports_coalescing"] * of_this_torch])
    backend.name.return_value = "another" if of_this_torch else "nccl"
    group, device = MagicMock(), torch.device("cuda", 0)
    group._get_backend.return_value = backend
    with patch("torch.cuda.Stream") as side, patch("torch.cuda.stream"), patch("torch.cuda.current_stream"):
        stream = collectives._SideStream(device)
        with stream.coalesced(group):
            pending = [stream.start(MagicMock(), (torch.ones(1),)) for _ in range(2)]
            assert not side().record_event.called and not group._end_coalescing.called
        group._start_coalescing.assert_called_once_with(device)
        group._end_coalescing.assert_called_once_with(device)
        side().record_event.assert_called_once_with()
        for work in pending:
            work.wait()


def run(device: torch.device, strategy: str, group=None, rank: int = 0, size: int = 1, **settings):
    """Loss and both gradients of one rank's shard."""
    sizes = {"s": 96, "b": 2, "hidden_size": 64, "vocab": 512}
    inputs = make_inputs("plain", **sizes, dtype=torch.bfloat16, device=device)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.chunk(size)[rank].clone().requires_grad_()
    config = FusedCEConfig(strategy=strategy, num_chunks=4, **settings)
    more = {"tp_group": group, "token_weights": inputs.grad_loss, "config": config}
    loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, **more)
    loss.backward(inputs.grad_loss)
    return loss.detach(), hidden.grad, weight.grad


def results_on_its_device_and_from_another(device: torch.device, *given, **settings):
    there = []
    for current in (device, torch.device("cuda", 0)):
        with torch.cuda.device(current):
            made = run(device, *given, **settings)
            assert torch.cuda.current_device() == current.index
            there.append([tensor.cpu() for tensor in made])
    return there


@two_gpus
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("logits_backend", ["auto", "gemm_rows"])
def test_another_device_is_current(strategy, logits_backend):
    device = torch.device("cuda", 1)
    settings = {"logits_backend": logits_backend}
    assert all(map(torch.equal, *results_on_its_device_and_from_another(device, strategy, **settings)))


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_device_is_current_on_rank_1(rank: Rank, strategy):
    if rank.device.type != "cuda":
        pytest.skip("needs two GPUs")
    given = (strategy, rank.group, rank.rank, rank.size)
    assert all(map(torch.equal, *results_on_its_device_and_from_another(rank.device, *given)))
