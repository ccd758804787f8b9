"""The adapter to NeMo-RL, on a stand-in for the module that it changes."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.adapter import nemo_rl
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import stand_in
from tests.support.head import SIZES, rows_of, same_on_all_ranks, shard_of, whole_hidden, whole_rows
from tests.support.ranks import Rank, on_ranks


def stock(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    """NeMo-RL's, with its parameters as of 0.7."""
    raise AssertionError("not replaced")


@on_ranks(1, 2)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_its_function_is_replaced(rank: Rank, sp):
    """Tokens outside the vocabulary; the result is divided in place, as NeMo-RL does for a temperature."""
    inputs = make_inputs("odd-labels", **{**SIZES, "vocab": 100}, dtype=torch.float32, device=rank.device)
    several = rank.size > 1
    split = sp and several
    hidden, weight, _ = shard_of(rank, inputs, split, "equal")
    rows = rows_of(rank, "equal", 100)
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = stand_in.module(monkeypatch, nemo_rl.MODULE, **{nemo_rl.FUNCTION: stock})
        nemo_rl.serve_nemo_rl()
        nemo_rl.serve_nemo_rl()  # twice is once
        function = getattr(module, nemo_rl.FUNCTION)
    target = inputs.labels.roll(1, -1)  # NeMo-RL's is not shifted
    given = (hidden, weight, None, target, rows.start, rows.stop)
    made = function(*given, tp_group=rank.group, cp_group=None if several else rank.group, chunk_size=5)
    made.div_(0.7)
    assert made.shape == (3, 23)
    made.backward(inputs.grad_loss[:, :-1])
    upstream = inputs.grad_loss / 0.7
    upstream[:, -1] = 0
    exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": upstream}, torch.float64)
    unknown = (inputs.labels < 0) | (inputs.labels >= 100)
    expected = exact.log_prob.masked_fill(unknown, 0.0)[:, :-1] / 0.7
    same_on_all_ranks(rank, made)
    bound = FLOOR[torch.float32]
    assert unknown[:, :-1].any() and relative_error(made.detach(), expected) < bound
    assert relative_error(whole_hidden(rank, hidden.grad, split), grad_hidden) < bound
    assert relative_error(whole_rows(rank, weight.grad), grad_weight) < bound
    assert not function(*given, tp_group=rank.group, inference_only=True).requires_grad
    if several:
        with pytest.raises(ValueError, match="context parallelism"):
            function(*given, tp_group=rank.group, cp_group=rank.group)


def test_another_signature_is_refused(monkeypatch):
    """That of 0.6 had the weight twice."""
    older = lambda tensor_parallel_hidden_states, output_weight_layer, output_weight: None  # noqa: E731
    module = stand_in.module(monkeypatch, nemo_rl.MODULE, **{nemo_rl.FUNCTION: older})
    with pytest.raises(RuntimeError, match=r"takes \[.*'output_weight'\]; expected .*leave serve_nemo_rl"):
        nemo_rl.serve_nemo_rl()
    assert getattr(module, nemo_rl.FUNCTION) is older
    delattr(module, nemo_rl.FUNCTION)
    with pytest.raises(RuntimeError, match="it is not there"):
        nemo_rl.serve_nemo_rl()
