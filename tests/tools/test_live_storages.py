"""The tracker must count what lives, when it lives, and keep nothing alive itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from megatron_fused_ce.scripts.lib.live_storages import LiveStorages, LogitStorages

T, H, V = 24, 16, 40
FP32_BYTES = 4


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    labels = torch.randint(V, (T,), generator=generator)
    return hidden, weight, labels


def _watch() -> LogitStorages:
    return LogitStorages(vocab_rows=V, hidden_size=H)


def test_one_product_counts_its_logits_and_frees_them() -> None:
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
        product = hidden @ weight.T
        assert logits.live_bytes == T * V * FP32_BYTES
        del product
        assert logits.live_bytes == 0
    assert logits.peak_bytes == T * V * FP32_BYTES
    assert logits.num_storages == 1


def test_two_alive_at_once_add_up_and_two_in_turn_do_not() -> None:
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
        for _ in range(3):
            product = hidden @ weight.T
            del product
        assert logits.peak_bytes == T * V * FP32_BYTES
        first = hidden @ weight.T
        second = first.to(torch.float64)
        assert logits.live_bytes == 3 * T * V * FP32_BYTES
        del first, second
    assert logits.peak_bytes == 3 * T * V * FP32_BYTES


def test_views_and_in_place_work_count_once() -> None:
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
        product = hidden @ weight.T
        views = [product.view(2, T // 2, V), product[3:5], product.transpose(0, 1), product.exp_()]
        assert logits.live_bytes == T * V * FP32_BYTES
        del product
        assert logits.live_bytes == T * V * FP32_BYTES  # the views keep the storage
        views.clear()
        assert logits.live_bytes == 0


def test_a_reused_flat_buffer_counts_from_its_first_view_as_logits() -> None:
    hidden, weight, _ = _problem()
    chunk_tokens = T // 4
    with _watch() as logits, torch.no_grad():
        buffer = torch.empty(chunk_tokens * V)
        assert logits.live_bytes == 0
        for rows in hidden.split(chunk_tokens):
            torch.mm(rows, weight.T, out=buffer.view(chunk_tokens, V))
        assert logits.peak_bytes == chunk_tokens * V * FP32_BYTES
        assert logits.num_storages == 1


def test_transposed_chunks_count() -> None:
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
        product = weight @ hidden.T
        assert product.shape == (V, T)
        assert logits.live_bytes == T * V * FP32_BYTES


@pytest.mark.parametrize("shape", [(V, H), (H, V)])
def test_a_gradient_of_the_weight_does_not_count(shape: tuple[int, int]) -> None:
    with _watch() as logits:
        gradient = torch.zeros(shape)
        gradient.add_(1.0)
        assert logits.live_bytes == 0
    assert logits.num_storages == 0


def test_weights_gradients_and_optimizer_state_do_not_count() -> None:
    hidden, weight, _ = _problem()
    older = torch.zeros(T, V)
    optimizer = torch.optim.Adam([weight])
    with _watch() as logits:
        older.add_(1.0)
        older.view(2, -1, V).mul_(2.0)
        weight.grad = hidden.new_ones(T, V).T @ hidden.detach()
        optimizer.step()
        assert logits.peak_bytes == T * V * FP32_BYTES  # the new_ones above, nothing else
        assert logits.live_bytes == 0


def test_backward_is_watched_and_saved_tensors_stay_counted() -> None:
    hidden, weight, labels = _problem()
    with _watch() as logits:
        loss = F.cross_entropy(hidden @ weight.T, labels)
        # log_softmax saved its output for the backward; the product itself is gone.
        assert logits.live_bytes == T * V * FP32_BYTES
        logits.reset_peak()
        loss.backward()
        assert logits.peak_bytes >= 2 * T * V * FP32_BYTES  # the saved one and a gradient
        del loss
        assert logits.live_bytes == 0


def test_nothing_is_kept_alive() -> None:
    hidden, weight, _ = _problem()
    gc.disable()
    try:
        with _watch() as logits, torch.no_grad():
            product = hidden @ weight.T
            gone = weakref.ref(product.untyped_storage())
            del product
            assert gone() is None
            assert logits.live_bytes == 0
    finally:
        gc.enable()


def test_a_resized_storage_counts_with_its_new_size() -> None:
    with _watch() as logits:
        buffer = torch.empty(2, V)
        buffer.resize_(6, V)
        assert logits.live_bytes == 6 * V * FP32_BYTES


def test_what_outlives_the_block_leaves_the_count_when_freed() -> None:
    hidden, weight, _ = _problem()
    with _watch() as logits, torch.no_grad():
        product = hidden @ weight.T
    assert logits.live_bytes == T * V * FP32_BYTES
    del product
    assert logits.live_bytes == 0


@pytest.mark.parametrize(("vocab_rows", "hidden_size"), [(0, 4), (4, 0), (4, 4)])
def test_sizes_that_cannot_tell_logits_from_weights_are_refused(vocab_rows: int, hidden_size: int) -> None:
    with pytest.raises(ValueError, match="differ"):
        LogitStorages(vocab_rows=vocab_rows, hidden_size=hidden_size)


def test_live_storages_count_whatever_was_made() -> None:
    """Gradients too, a view and an in-place product once, nothing that is older."""
    hidden, weight, labels = _problem()
    with LiveStorages() as live:
        loss = F.cross_entropy(hidden @ weight.T, labels)
        made = live.peak_bytes
        assert made >= 2 * T * V * FP32_BYTES  # logits, and their log-softmax for the backward
        loss.backward()
        assert live.peak_bytes > made
        view = weight.grad.view(-1).mul_(2.0)
        kept = (hidden.numel() + weight.numel()) * FP32_BYTES
        assert live.live_bytes == kept + loss.nbytes
        hidden.grad = weight.grad = None
        assert live.live_bytes == weight.nbytes + loss.nbytes, "the view holds its storage"
        del view
        assert live.live_bytes == loss.nbytes
