"""The tracker must count what lives, when it lives, and keep nothing alive itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from megatron_fused_ce.scripts.lib.live_storages import LiveStorages, LogitStorages

T, H, V = 24, 16, 40
ALL = T * V * 4  # bytes in fp32


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator, requires_grad=True) for n in (T, V))
    return hidden, weight, LogitStorages(vocab_rows=V, hidden_size=H)


def test_what_lives_is_counted_once_and_kept_alive_by_nobody(problem):
    hidden, weight, logits = problem
    with logits, torch.no_grad():
        for _ in range(3):
            product = hidden @ weight.T
            gone = weakref.ref(product.untyped_storage())
            assert logits.live_bytes == ALL
            gc.disable()
            del product
            assert gone() is None and logits.live_bytes == 0
            gc.enable()
        assert (logits.peak_bytes, logits.num_storages) == (ALL, 3), "those in turn do not add up"
        first = hidden @ weight.T
        views = [first.view(2, T // 2, V), first[3:5], first.transpose(0, 1), first.exp_()]
        del first
        assert logits.live_bytes == ALL, "the views keep the storage"
        views.clear()
        # A buffer counts from the first logits on, once, with its size.
        buffer = torch.empty(T // 4 * V)
        assert logits.live_bytes == 0
        for rows in hidden.split(T // 4):
            torch.mm(rows, weight.T, out=buffer.view(T // 4, V))
        assert logits.live_bytes == ALL // 4
        left = weight @ hidden.T
        assert left.shape == (V, T) and logits.live_bytes == ALL * 5 // 4, "transposed, they count as well"
    del buffer, left
    assert logits.live_bytes == 0, "what outlives the block leaves the count when it is freed"


def test_backward_is_watched_and_saved_tensors_stay_counted(problem):
    hidden, weight, logits = problem
    with logits, LiveStorages() as live:
        loss = F.cross_entropy(hidden @ weight.T, torch.arange(T))
        # log_softmax saved its output for the backward; the product itself is gone.
        assert logits.live_bytes == ALL and live.peak_bytes >= 2 * ALL
        logits.peak_bytes = logits.live_bytes
        loss.backward()
        assert logits.peak_bytes >= 2 * ALL  # the saved one and a gradient
        hidden.grad = weight.grad = None
        del loss
        assert logits.live_bytes == live.live_bytes == 0
