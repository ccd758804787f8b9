"""The tracker must count what lives, when it lives, and keep nothing alive itself."""

from __future__ import annotations

import torch

from megatron_fused_ce.scripts.lib.live_storages import LogitStorages

T, H, V = 24, 16, 40
ALL = T * V * 4  # bytes in fp32


def test_what_lives_is_counted_once_and_kept_alive_by_nobody():
    hidden, weight = torch.randn(T, H), torch.randn(V, H)
    with LogitStorages(vocab_rows=V, hidden_size=H) as logits:
        for _ in range(3):
            product = hidden @ weight.T
            assert logits.live_bytes == ALL
            del product
            assert logits.live_bytes == 0
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
