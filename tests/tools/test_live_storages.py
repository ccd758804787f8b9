"""The tracker must count what lives, when it lives, and keep nothing alive itself."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from megatron_fused_ce.scripts.lib.live_storages import LiveStorages, LogitStorages

T, H, V = 24, 16, 40
ALL = T * V * 4  # bytes in fp32
HIDDEN, WEIGHT = (torch.randn(n, H, requires_grad=True) for n in (T, V))


def test_what_lives_is_counted_once_and_kept_alive_by_nobody():
    with LogitStorages(vocab_rows=V, hidden_size=H) as logits, torch.no_grad():
        for _ in range(3):
            product = HIDDEN @ WEIGHT.T
            assert logits.live_bytes == ALL
            del product
            assert logits.live_bytes == 0
        assert (logits.peak_bytes, logits.num_storages) == (ALL, 3), "those in turn do not add up"
        first = HIDDEN @ WEIGHT.T
        views = [first.view(2, T // 2, V), first[3:5], first.transpose(0, 1), first.exp_()]
        del first
        assert logits.live_bytes == ALL, "the views keep the storage"
        views.clear()
        # A buffer counts from the first logits on, once, with its size.
        buffer = torch.empty(T // 4 * V)
        assert logits.live_bytes == 0
        for rows in HIDDEN.split(T // 4):
            torch.mm(rows, WEIGHT.T, out=buffer.view(T // 4, V))
        assert logits.live_bytes == ALL // 4
        left = WEIGHT @ HIDDEN.T
        assert left.shape == (V, T) and logits.live_bytes == ALL * 5 // 4, "transposed, they count as well"
    del buffer, left
    assert logits.live_bytes == 0, "what outlives the block leaves the count when it is freed"


def test_backward_is_watched_and_saved_tensors_stay_counted():
    with LogitStorages(vocab_rows=V, hidden_size=H) as logits, LiveStorages() as live:
        loss = F.cross_entropy(HIDDEN @ WEIGHT.T, torch.arange(T))
        # log_softmax saved its output for the backward; the product itself is gone.
        assert logits.live_bytes == ALL and live.peak_bytes >= 2 * ALL
        logits.peak_bytes = logits.live_bytes
        loss.backward()
        assert logits.peak_bytes >= 2 * ALL  # the saved one and a gradient
        HIDDEN.grad = WEIGHT.grad = None
        del loss
        assert logits.live_bytes == live.live_bytes == 0
