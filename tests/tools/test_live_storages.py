"""The tracker must count what lives, when it lives, and keep nothing alive itself."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.nn import functional as F

from megatron_fused_ce.scripts.lib.live_storages import LiveStorages, LogitStorages

T, H, V = 24, 16, 40
FP32_BYTES = 4
ALL = T * V * FP32_BYTES


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    labels = torch.randint(V, (T,), generator=generator)
    return hidden, weight, labels


def _watch() -> LogitStorages:
    return LogitStorages(vocab_rows=V, hidden_size=H)


def test_what_lives_is_counted_once_and_kept_alive_by_nobody():
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
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
        second = first.to(torch.float64)
        assert logits.live_bytes == logits.peak_bytes == 3 * ALL
        del first, second
        assert logits.live_bytes == ALL, "the views keep the storage"
        views.clear()
        assert logits.live_bytes == 0
        left = weight @ hidden.T
        assert left.shape == (V, T) and logits.live_bytes == ALL, "transposed, they count as well"
    del left
    assert logits.live_bytes == 0, "what outlives the block leaves the count when it is freed"


def test_a_reused_or_resized_buffer_counts_with_its_size():
    hidden, weight, _ = _problem()
    chunk_tokens = T // 4
    with _watch() as logits, torch.no_grad():
        buffer = torch.empty(chunk_tokens * V)
        assert logits.live_bytes == 0
        for rows in hidden.split(chunk_tokens):
            torch.mm(rows, weight.T, out=buffer.view(chunk_tokens, V))
        assert (logits.peak_bytes, logits.num_storages) == (ALL // 4, 1)
        resized = torch.empty(2, V)
        resized.resize_(6, V)
        assert logits.live_bytes == ALL // 4 + 6 * V * FP32_BYTES


def test_neither_gradients_of_the_weight_nor_optimizer_nor_older_tensors_count():
    hidden, weight, _ = _problem()
    older = torch.zeros(T, V)
    optimizer = torch.optim.Adam([weight])
    with _watch() as logits:
        older.add_(1.0)
        older.view(2, -1, V).mul_(2.0)
        for shape in ((V, H), (H, V)):
            torch.zeros(shape).add_(1.0)
        assert logits.num_storages == 0
        weight.grad = hidden.new_ones(T, V).T @ hidden.detach()
        optimizer.step()
        assert (logits.peak_bytes, logits.live_bytes) == (ALL, 0), "the new_ones, nothing else"


def test_backward_is_watched_and_saved_tensors_stay_counted():
    hidden, weight, labels = _problem()
    with _watch() as logits, LiveStorages() as live:
        loss = F.cross_entropy(hidden @ weight.T, labels)
        # log_softmax saved its output for the backward; the product itself is gone.
        assert logits.live_bytes == ALL and live.peak_bytes >= 2 * ALL
        logits.peak_bytes = logits.live_bytes
        loss.backward()
        assert logits.peak_bytes >= 2 * ALL  # the saved one and a gradient
        view = weight.grad.view(-1).mul_(2.0)
        assert live.live_bytes == hidden.nbytes + weight.nbytes + loss.nbytes, "gradients too, a view once"
        hidden.grad = weight.grad = None
        assert live.live_bytes == weight.nbytes + loss.nbytes, "the view holds its storage"
        del view, loss
        assert logits.live_bytes == live.live_bytes == 0
