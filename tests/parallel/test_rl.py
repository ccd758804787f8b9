"""Log-probabilities over a tensor-parallel group: of one label or several, of all tokens or some of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_several, relative_error
from tests.support.op import EXP_DTYPE, SIZES, gemm_flops, same_on_all_ranks, shard_of, whole
from tests.support.ranks import Rank, on_ranks


@dataclass(frozen=True)
class Case:
    strategy: str = "recompute"
    sp: bool = False
    count: int = 0  # of a token's labels; 0 for ``[b, s]``
    temperature: str = "per token"  # or number
    entropy: str = "differentiable"
    active: str = ""  # which tokens count: see :func:`some_tokens`
    reduces: bool = True  # whether ``grad_hidden`` is summed here
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


EXP: dict[str, Any] = {"options": {"logits_backend": "scaled_exp"}}
STORE_SP: dict[str, Any] = {"strategy": "store", "sp": True}
CASES = {
    "a temperature": Case(**STORE_SP, **EXP, temperature="number", entropy="none"),
    "a temperature, partial": Case(**EXP, temperature="number", entropy="none", reduces=False),
    "a temperature per token": Case(**STORE_SP),
    "a temperature per token, partial": Case("store", entropy="detached", reduces=False),
    "in the GEMM": Case(**EXP, entropy="detached"),
    "gradients in the GEMM": Case(**EXP, **STORE_SP),
    "one label": Case(count=1),
    "five": Case("store", count=5, reduces=False, options={"logit_softcap": 5.0}),
    "five, parts": Case(**STORE_SP, count=5, options={"merge": "all_reduce"}),
    "bf16, parts": Case(sp=True, count=64, dtype=torch.bfloat16, options={"logit_softcap": 5.0}),
    "many, parts": Case(**STORE_SP, count=300, options={"true_vocab_size": 90}),
    "a third": Case(active="a third"),
    "a third, parts": Case(active="a third", sp=True, dtype=torch.bfloat16),
    "one part whole": Case(active="one part whole", sp=True, count=3),
    "none": Case(active="none", sp=True),
}


def some_tokens(what: str, labels: torch.Tensor) -> torch.Tensor:
    """Which count, bool ``[b, s]``: a third in every part, all of the last part and a few others, or none."""
    b, s = labels.shape
    counts = torch.rand(b, s, generator=torch.Generator().manual_seed(4)) < 0.3
    if what == "one part whole":
        counts[:, : s // 2] &= counts[:, : s // 2].roll(1, 1)
        counts[:, s // 2 :] = True
    return (counts if what != "none" else torch.zeros_like(counts)).to(labels.device)


def several(labels: torch.Tensor, count: int, vocab: int) -> torch.Tensor:
    """``[b, s, K]``: tokens sure of a label of either shard, ids twice, of one shard alone, of none."""
    made = torch.randint(0, vocab, (*labels.shape, count), generator=torch.Generator().manual_seed(3))
    made = made.to(labels.device)
    made[:, ::2, 0] = labels[:, ::2]
    made[:, 1::5] = made[:, 1::5] % 33  # of the first rank alone
    made[:, 2::5, -1] = made[:, 2::5, 0]
    made[:, 3::5, count // 2] = vocab
    made[:, 4::5, count // 2 :] = -1
    made[:, 6] = -1
    return made


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(rank: Rank, name):
    """Shards of unequal sizes, some labels outside the vocabulary. Neither pass works on more tokens than the
    fullest part has that count; a gradient outside of them, on one rank, raises on all."""
    case, chunk_tokens, sizes, dtype = CASES[name], 28, SIZES, CASES[name].dtype
    if "logits_backend" in case.options:
        dtype, chunk_tokens, sizes = EXP_DTYPE, 14, {**SIZES, "s": 12, "vocab": 512}
        if rank.device.type == "cuda":  # many steps of a GEMM along k, and of each row
            sizes, chunk_tokens = {"s": 2050, "b": 2, "hidden_size": 1024, "vocab": 12800}, 1400
    kind = "peaked" if case.count else "odd-labels"
    inputs = make_inputs(kind, **sizes, dtype=dtype, device=rank.device)
    labels = several(inputs.labels, case.count, sizes["vocab"]) if case.count else inputs.labels
    ids = labels if case.count else labels.where(labels != -1, -2).unsqueeze(-1)
    generator, temperature = torch.Generator().manual_seed(3), inputs.grad_loss.abs() + 0.5
    if case.temperature == "number":
        temperature = torch.full_like(temperature, 0.7)
    active = some_tokens(case.active, inputs.labels) if case.active else inputs.labels > -1000
    upstream = torch.randn(ids.shape, generator=generator).to(rank.device) * active.unsqueeze(-1)
    of_entropy = inputs.grad_loss.roll(1, 1) * active if case.entropy == "differentiable" else None
    config = FusedCEConfig(case.strategy, chunk_tokens=chunk_tokens, debug_checks=True, **case.options)
    hidden, weight, settings = shard_of(rank, inputs, case.sp)
    forward = partial(
        token_log_probs,
        hidden,
        weight,
        labels,
        temperature=0.7 if case.temperature == "number" else temperature,
        entropy=case.entropy,
        zero_unknown=not case.count,
        reduce_grad_hidden=case.reduces,
        active_mask=active if case.active else None,
        config=config,
        **settings,
    )
    with patch.object(tokens, "ROUND_TO", 1), gemm_flops() as flops:
        made = forward()
        grads = {made.log_prob: upstream.view(labels.shape)}
        if of_entropy is not None:
            grads[made.entropy] = of_entropy
        torch.autograd.backward(list(grads), list(grads.values()))
    same_on_all_ranks(rank, *made)
    if not case.reduces:
        dist.all_reduce(hidden.grad, group=rank.group)
    inputs = replace(inputs, config=config, temperature=temperature)
    exact, eager = (
        plain_several(inputs, ids, upstream, precision, of_entropy) for precision in (torch.float64, dtype)
    )
    told = (ids != -1) & active.unsqueeze(-1)
    log_prob = made.log_prob.detach().view(ids.shape)
    if case.count:
        assert (log_prob[(ids == -1) & active.unsqueeze(-1)] == -torch.inf).all()
    else:
        unknown = ((labels < 0) | (labels >= sizes["vocab"])).unsqueeze(-1)
        assert unknown.any() and not log_prob[unknown].any()
        told &= ~unknown
    ours = [log_prob[told], None if made.entropy is None else made.entropy.detach()[active]]
    ours += whole(rank, case.sp, {"grad_hidden": hidden.grad, "grad_weight": weight.grad}).values()
    select = [lambda x: x[told], lambda x: x[active], lambda x: x, lambda x: x]
    floor = 2 * FLOOR[dtype]
    for value, true, rough, of in zip(ours, exact, eager, select, strict=True):
        if value is not None:
            error, bound = relative_error(value, of(true)), 2 * relative_error(of(rough), of(true))
            assert error <= max(floor, bound), (error, bound)
    if case.active:
        parts = rank.size if case.sp else 1
        worked_on = parts * int(active.t().reshape(parts, -1).sum(1).max())
        assert flops.get_total_flops() == 4 * worked_on * 2 * weight.numel()
        assert not log_prob[~active].any() and not made.entropy[~active].any()
        outside = torch.zeros_like(inputs.grad_loss)
        if rank.rank == 0:
            outside[tuple((~active).nonzero()[0])] = 1e-20
        with pytest.raises(RuntimeError, match=r"^1 tokens were left out .outside active_mask"):
            forward().entropy.backward(outside)
