"""Log-probabilities in a batch-invariant mode: the bits of whole logits, by a stand-in for Megatron's mode.

With Megatron's own kernels, on a GPU: scripts/bench/batch_invariant.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.rl import batch_invariant_log_probs, token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import megatron, rl_utils
from tests.support.batch_invariant import stand_in
from tests.support.head import same_on_all_ranks, shard_of, whole_hidden, whole_rows
from tests.support.megatron import NEWEST, Model, build, flag, have_groups, of_core
from tests.support.ranks import Rank, on_ranks
from tests.support.rl_utils import patched_caller, tokens_of

SIZES = {"s": 24, "b": 3, "hidden_size": 32, "vocab": 512}


def on_whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor, in_fp32: bool) -> Tensor:
    """As Megatron's path and ``selective_log_softmax`` have it, ``[b, s]``."""
    logits = torch.mm(hidden.flatten(0, 1), weight.t()).view(*hidden.shape[:2], -1)
    logits = logits.transpose(0, 1).contiguous()
    rows = [(row.float() if in_fp32 else row).log_softmax(-1) for row in logits]
    known = (labels >= 0) & (labels < len(weight))
    found = [
        row.gather(-1, of.unsqueeze(-1)).squeeze(-1)
        for row, of in zip(rows, labels.where(known, 0), strict=True)
    ]
    return torch.stack(found).where(known, torch.stack(rows).amax(-1))


@on_ranks(1, 2)
@pytest.mark.parametrize(("dtype", "sp"), [(torch.bfloat16, False), (torch.float32, True)], ids=str)
def test_the_bits_of_whole_logits(rank: Rank, dtype, sp):
    """In chunks of every length; gradients are right."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=dtype, device=rank.device)
    for in_fp32 in (True, False):
        with stand_in():
            right = on_whole_logits(inputs.hidden, inputs.weight, inputs.labels, in_fp32)
            for options in ({"chunk_tokens": 2}, {"chunk_tokens": 14}, {"num_chunks": 1}, {}):
                hidden, weight, settings = shard_of(rank, inputs, sp, "equal")
                given = {**settings, "in_fp32": in_fp32, "config": FusedCEConfig(**options)}
                made = batch_invariant_log_probs(hidden, weight, inputs.labels, **given)
                assert made.dtype == right.dtype and torch.equal(made.detach(), right)
            left = token_log_probs(hidden, weight, inputs.labels, **settings).log_prob
            assert not torch.equal(left.detach(), right.float()), "the stand-in cannot tell"
        made.backward(inputs.grad_loss.to(made.dtype))
        same_on_all_ranks(rank, made)
        _, *exact = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
        _, *eager = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, dtype)
        grads = whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad)
        for ours, true, theirs in zip(grads, exact, eager, strict=True):
            bound = max(FLOOR[dtype], 2 * relative_error(theirs, true))
            # The upstream gradient is rounded, where the result is.
            assert relative_error(ours, true) < (bound if in_fp32 else 2 * bound)


@on_ranks(2)
def test_what_it_refuses(rank: Rank):
    """On every rank, where one of them has it."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    hidden, weight, settings = shard_of(rank, inputs, False, "unequal")
    with pytest.raises(ValueError, match="expected equal ones in rank order"):
        batch_invariant_log_probs(hidden, weight, inputs.labels, **settings)
    hidden, weight, settings = shard_of(rank, inputs, False, "equal")
    for options in ({"logit_scale": 2.0}, {"logit_softcap": 3.0}, {"ignore_index": -100}):
        config = FusedCEConfig(**(options if rank.rank else {}))
        with pytest.raises(ValueError, match="the plain logits, without"):
            batch_invariant_log_probs(hidden, weight, inputs.labels, config=config, **settings)


@on_ranks(of_core(1, NEWEST), of_core(2, NEWEST))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_get_logprobs(rank: Rank, dtype):
    """Megatron's model off and on: equal bits. A loss of labels stays Megatron's."""
    have_groups(rank.size)
    model = Model(dtype=dtype, sequence_parallel=rank.size > 1)
    tokens, positions, upstream = tokens_of(rank)
    results = []
    for on in (False, True):
        with stand_in(), patched_caller(), flag(chunk_tokens=14) if on else megatron.counted() as seen:
            built = build(model, rank)
            built.config.batch_invariant_mode = True  # whose own check wants FlashAttention
            made = rl_utils.get_logprobs(built, tokens, positions)
            made.backward(upstream.to(made.dtype))
            loss = built(tokens, positions, None, labels=tokens)
        assert seen.counts == ((1, 0, 1) if on else (0, 0, 0))
        results.append((made.detach(), loss.detach(), {n: p.grad for n, p in built.named_parameters()}))
    (off, loss_off, grads_off), (on, loss_on, grads_on) = results
    assert torch.equal(on, off) and torch.equal(loss_on, loss_off)
    # The stand-in rounds all of Megatron's GEMMs to fp16.
    megatron.assert_same_gradients(grads_on, grads_off, in_half=True)
