"""From the head to what the loss function reports, on a stand-in for Megatron's schedules."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import threading
import types
import weakref

import pytest
import torch

from megatron_fused_ce.adapter import accuracy, report
from megatron_fused_ce.adapter.accuracy import KEY
from megatron_fused_ce.adapter.token_weights import TokenWeights
from tests.support.megatron import pretrain_loss

B, S = 2, 5
MASK = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0]])
CORRECT = torch.tensor([[True, True, False, True, False], [False, True, True, False, False]])
LABELS = torch.arange(B * S).view(B, S)


def stock_calc_loss(model, output_tensor, loss_func, config, forward_data_store, non_loss=False):
    """What Megatron's does with a loss function, on the last stage (``model``: True) and elsewhere."""
    if model and loss_func is None:
        forward_data_store.append(output_tensor)
    elif model and non_loss:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
    elif model:
        *_, reported = loss_func(output_tensor)
        forward_data_store.append(reported)
    return output_tensor, torch.tensor(0)


@pytest.fixture
def schedules():
    module = types.ModuleType("fake.schedules")
    module.forward_step_calc_loss = stock_calc_loss
    accuracy.patch(module)
    yield module
    assert accuracy._latest.evaluated is None


@pytest.fixture
def told(monkeypatch):
    """What the user is told."""
    found = []
    monkeypatch.setattr(report, "say_once", lambda tp_rank, text: found.append(text))
    return found


def lm_loss(mask=MASK):
    """pretrain_gpt.py's loss function for a mask."""

    return functools.partial(pretrain_loss, mask)


def head(correct=CORRECT, mask=MASK, ignore_index=None, loss=None):
    """A head is evaluated; the loss that it hands out."""
    loss = torch.rand(B, S, requires_grad=True) * 1.0 if loss is None else loss
    counts = accuracy.count(LABELS, TokenWeights(mask), correct, ignore_index)
    accuracy.remember(loss, counts, "", tp_rank=0)
    return loss


def calc_loss(schedules, output, loss_func=None, last_stage=True, **kwargs):
    """The report of one micro-batch."""
    store = []
    loss_func = loss_func or lm_loss()
    schedules.forward_step_calc_loss(last_stage, output, loss_func, None, store, **kwargs)
    return store[0] if store else None


def test_joins_the_lm_loss(schedules, told):
    reported = calc_loss(schedules, head())
    assert list(reported) == ["lm loss", KEY]  # others take the first key for the loss
    assert reported[KEY].tolist() == [3.0, 8.0]  # of five correct ones the mask leaves out two
    assert reported[KEY].dtype == reported["lm loss"].dtype and not reported[KEY].requires_grad
    assert told == []


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.full((B, S), 0.25), [1.25, 2.5]),  # each token counts by its weight
        *((MASK.to(dtype), [3.0, 8.0]) for dtype in (torch.bfloat16, torch.float64, torch.float32)),
    ],
)
def test_counts_are_fp32_whatever_the_mask_is(schedules, mask, expected):
    reported = calc_loss(schedules, head(mask=mask), lm_loss(mask))
    assert reported[KEY].tolist() == expected and reported[KEY].dtype == torch.float32


def test_ignored_labels_do_not_count(schedules):
    """Nor are they missed: the lm loss counts them by its mask."""
    reported = calc_loss(schedules, head(ignore_index=0))  # correct, in the mask
    assert reported[KEY].tolist() == [2.0, 7.0] and reported["lm loss"][1] == 8


def test_micro_batches_keep_apart(schedules):
    corrects = [CORRECT, ~CORRECT, torch.ones_like(CORRECT), torch.zeros_like(CORRECT)]
    found = [calc_loss(schedules, head(correct))[KEY][0].item() for correct in corrects]
    assert found == [3.0, 5.0, 8.0, 0.0]


@pytest.mark.parametrize(
    "moved",
    [
        lambda loss: loss.detach().requires_grad_(),  # combined 1F1B
        lambda loss: loss.view_as(loss),  # Megatron-FSDP
        lambda loss: loss.view(-1),
        lambda loss: torch.empty(1).set_(loss.detach()),
    ],
)
def test_the_same_memory_is_the_same_loss(schedules, told, moved):
    assert calc_loss(schedules, moved(head()))[KEY].tolist() == [3.0, 8.0]
    assert told == []


@pytest.mark.parametrize("other", [lambda loss: loss * 2, lambda loss: loss[:1], lambda loss: loss.clone()])
def test_another_loss_is_told_and_nan(schedules, told, other):
    reported = calc_loss(schedules, other(head()), lambda output: (0, 1, {"lm loss": torch.ones(2)}))
    assert reported[KEY].shape == (2,) and reported[KEY].isnan().all()
    assert told == ["the lm accuracy is NaN: the loss function gets something else than the loss of the head"]


def test_the_main_head_comes_last(schedules):
    """Multi-token prediction's heads come before it; they know no mask."""
    accuracy.remember(torch.rand(B, S), None, "multi-token prediction", tp_rank=0)
    assert calc_loss(schedules, head())[KEY].tolist() == [3.0, 8.0]


def test_a_head_evaluated_twice(schedules):
    """A forward that is run again (on this thread) leaves what the next micro-batch replaces."""
    first, again = head(), head(~CORRECT)
    assert calc_loss(schedules, again)[KEY].tolist() == [5.0, 8.0]
    assert KEY not in calc_loss(schedules, first)


def test_a_head_evaluated_on_autograds_thread(schedules):
    loss = head()
    backward = threading.Thread(target=head, args=(~CORRECT,))
    backward.start(), backward.join()
    assert calc_loss(schedules, loss)[KEY].tolist() == [3.0, 8.0]


def test_other_stages_and_models_without_it(schedules):
    assert calc_loss(schedules, torch.rand(B, S), last_stage=False) is None
    assert list(calc_loss(schedules, torch.rand(B, S))) == ["lm loss"]


def test_unknown_is_told_and_nan(schedules, told):
    """A call on Megatron's own path, a model called without a mask: the key stays."""
    loss = torch.rand(B, S)
    accuracy.remember(loss, None, "GPT was called without a loss_mask", tp_rank=0)
    assert calc_loss(schedules, loss)[KEY].isnan().all()
    assert told == ["the lm accuracy is NaN: GPT was called without a loss_mask"]
    assert accuracy.count(LABELS, TokenWeights(None, "why"), CORRECT, None) is None
    assert accuracy.count(LABELS, TokenWeights(MASK), None, None) is None


@pytest.mark.parametrize("by", [-1.0, 1.0, 100.0])
def test_another_count_than_the_masks_is_nan(schedules, by):
    """The loss function masks other tokens than the model was told."""

    def loss_func(output):
        loss, num_tokens, reported = lm_loss()(output)
        return loss, num_tokens, {"lm loss": reported["lm loss"] + torch.tensor([0.0, by])}

    assert calc_loss(schedules, head(), loss_func)[KEY].isnan().all()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        # Averaged already, as older loss functions report; a pair that is no tensor.
        ((0.0, {"lm loss": torch.tensor(2.0)}), "does not report its 'lm loss' as a sum and a count"),
        ((0.0, 1, {"lm loss": (torch.ones(1), torch.ones(1))}), "as a sum and a count"),
        ((0.0, 1, {"avg": torch.ones(2)}), "as a sum and a count"),
        ((0.0, 1, [torch.ones(2)]), "returns no dict of what it reports"),
        ((0.0, 1, {"lm loss": torch.ones(2), KEY: torch.ones(2)}), "reports one of its own"),
    ],
)
def test_other_loss_functions_are_left_alone_and_told(schedules, told, outputs, words):
    assert calc_loss(schedules, head(), lambda output: outputs) is outputs[-1]
    assert len(told) == 1 and told[0].startswith("no lm accuracy: ") and words in told[0]


def test_a_pair_beside_a_loss_without_a_count(schedules, told):
    """``(loss, report)``: Megatron averages the loss over micro-batches and the report as ever."""
    loss_func = lambda output: (output.sum(), lm_loss()(output)[2])  # noqa: E731
    assert calc_loss(schedules, head(), loss_func)[KEY].tolist() == [3.0, 8.0]
    assert told == []


def test_what_is_no_loss_passes(schedules, told):
    kept = (1, 2, {"lm loss": torch.ones(2)})

    def collect(output, non_loss_data=False):
        assert non_loss_data
        return kept

    assert calc_loss(schedules, head(), collect, non_loss=True) is kept
    store = []
    output = head()
    schedules.forward_step_calc_loss(True, output, None, None, store)
    assert store == [output] and told == []


def test_nothing_stays_behind(schedules):
    """What waits holds no graph; what was counted goes with its micro-batch, also when that raises."""
    leaf = torch.rand(B, S, requires_grad=True)
    graph = weakref.ref(leaf)
    head(loss=leaf * 2)
    del leaf
    gc.collect()
    assert graph() is None

    loss = head()
    counted = weakref.ref(accuracy._latest.evaluated.counts.pair)
    with pytest.raises(KeyError, match="in the loss function"):
        calc_loss(schedules, loss, lambda output: {}["in the loss function"])
    gc.collect()
    assert counted() is None
    assert list(calc_loss(schedules, loss)) == ["lm loss"]


def test_an_error_after_the_head_joins_no_other_loss(schedules):
    """It is the next head that is reported, also where it lies in the freed memory of the first."""
    head(torch.ones_like(CORRECT))  # and the forward raises
    for _ in range(3):
        assert calc_loss(schedules, head())[KEY].tolist() == [3.0, 8.0]


def test_schedules_without_the_seam_are_left_alone():
    module = types.ModuleType("fake.schedules")
    accuracy.patch(module)
    assert not hasattr(module, accuracy.HOOK_POINT)


def test_nan_is_told_once(schedules, monkeypatch):
    monkeypatch.setattr(report, "_said", set())
    monkeypatch.setattr(report, "_speaks", lambda tp_rank: tp_rank == 0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for tp_rank in (0, 0, 1):
            loss = torch.rand(B, S)
            accuracy.remember(loss, None, "a reason", tp_rank)
            assert math.isnan(calc_loss(schedules, loss)[KEY][0])
    assert said.getvalue() == "[fused-ce] the lm accuracy is NaN: a reason\n"
