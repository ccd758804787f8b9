"""Deferred logits for callers without labels, as slime and miles are: in Megatron's schedules, off and on."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, flag, have_groups, of_core
from tests.support.op import gemm_flops
from tests.support.ranks import Rank, on_ranks

TEMPERATURE = 0.7
#: Of four samples: all tokens, those of the response. The rest of the sequence is padding.
LENGTHS = ((9, 4), (4, 3), (2, 0), (8, 7))


def definition(logits: Tensor, tokens: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
    """Of real logits ``[1, n, V / R]``."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    log_p = gather_from_tensor_model_parallel_region(logits.contiguous()).log_softmax(-1)
    log_prob = log_p.gather(-1, tokens[..., None])[..., 0]
    of_all = -(log_p.exp() * log_p).sum(-1)
    return log_prob, {"none": None, "detached": of_all.detach()}.get(entropy, of_all)


def at_once(logits: Any, ids: Tensor, entropy: str, keep: bool) -> Any:
    """All tokens at once, as slime has them: ``[T]``."""
    assert logits.dtype == torch.float32 and len(logits.shape) == 3 and logits.size(0) == 1
    logits = (logits.squeeze(0) / TEMPERATURE).contiguous()
    if isinstance(logits, DeferredLogits) and not keep:
        return logits.log_probs(ids.roll(-1), entropy)
    log_prob, of_all = definition(logits.clone().unsqueeze(0), ids.roll(-1).unsqueeze(0), entropy)
    return log_prob[0], None if of_all is None else of_all[0]


def by_samples(logits: Any, ids: Tensor, entropy: str, keep: bool) -> Any:
    """Sample by sample, as miles has them: ``[n]`` of all."""

    def cut(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert rows.dtype == torch.float32 and rows.size(0) == 1
        end = 0
        for total, response in LENGTHS:
            end += total
            tokens = ids[end - total : end]
            yield rows[0, end - response - 1 : end - 1], tokens[-response:]  # of no response all tokens

    logits = logits / TEMPERATURE
    if isinstance(logits, DeferredLogits) and not keep:
        made = logits.log_probs_of(cut, entropy)
    else:
        each = [
            definition(rows[None], tokens[None, : len(rows)], entropy) for rows, tokens in cut(logits.clone())
        ]
        made = [None if x[0] is None else [part[0] for part in x] for x in zip(*each, strict=True)]
    assert [log_prob.shape for log_prob in made[0]] == [(response,) for _, response in LENGTHS]
    return [x and torch.cat(x) for x in made]


CALLERS = {"at once": at_once, "samples": by_samples}


class Seen:
    """Of one model: a pass without gradients, then a training step, both by Megatron's schedule."""

    def __init__(self, model: Model, rank: Rank, log_probs: Any, entropy: str, real: bool) -> None:
        """``real``: for a caller who takes real logits all the same."""
        built = build(model, rank)
        caller = megatron.as_called(model, built)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, VOCAB, (1, SEQUENCE), generator=generator).to(rank.device)
        upstream = torch.randn(2, SEQUENCE, generator=generator).to(rank.device)
        positions, causal = megatron.positions_and_mask(rank)
        self.made: list[tuple[Tensor, Tensor | None]] = []

        def loss(logits: Any, non_loss_data: bool = False) -> Any:
            log_prob, of_entropy = log_probs(logits, ids[0], entropy, real)
            self.made.append((log_prob, of_entropy))
            if non_loss_data:
                return self.made[-1]
            total = (log_prob * upstream[0, : len(log_prob)]).sum()
            if entropy == "differentiable":
                total = total + (of_entropy * upstream[1, : len(log_prob)]).sum()
            return total, torch.ones((), dtype=torch.int, device=logits.device), {}

        def step(data: Any, model: Any) -> Any:
            return model(ids, positions[:1], causal, labels=None), loss

        with LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=megatron.HIDDEN) as self.storages:
            for forward in ({"forward_only": True, "collect_non_loss_data": True}, {}):
                megatron.scheduled(step, [caller], [None], micro_batch_size=1, **forward)
        self.gradients = {name: parameter.grad for name, parameter in built.named_parameters()}


@on_ranks(of_core(2, NEWEST), of_core(2, megatron.INSTALLED))
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    ("name", "entropy", "real"),
    [
        ("gpt", "none", False),
        ("gpt", "differentiable", False),
        ("gpt", "detached", True),
        ("hybrid", "detached", False),
    ],
)
def test_off_against_on(rank: Rank, caller, name, entropy, real):
    in_half = (name, caller) == ("hybrid", "at once")
    dtype = torch.bfloat16 if in_half else torch.float32
    model = Model(family=name, tied=real, sequence_parallel=entropy != "none", dtype=dtype)
    have_groups(rank.size)
    off = Seen(model, rank, CALLERS[caller], entropy, real)
    precision = "activations" if model.dtype == torch.bfloat16 else "auto"
    options = {"strategy": "recompute", "num_chunks": 6, "logit_precision": precision}
    with flag(deferred_logits=True, **options) as seen:
        on = Seen(model, rank, CALLERS[caller], entropy, real)
    assert seen.counts == ((0, 2, 0) if real else (2, 0, 0))
    bound = 2e-7 if model.dtype == torch.float32 else 1e-2
    for got, right in zip(on.made, off.made, strict=True):
        assert [x is None for x in got] == [x is None for x in right] == [False, entropy == "none"]
        for mine, theirs in zip(got, right, strict=True):
            if theirs is None:
                continue
            assert mine.dtype == torch.float32 and mine.shape == theirs.shape
            assert mine.requires_grad == theirs.requires_grad
            assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm()
    megatron.assert_same_gradients(on.gradients, off.gradients, model.dtype != torch.float32)
    # Stock holds [T, V / R] in fp32 at least, the head some of six chunks (entropy takes a third one).
    everything = 4 * SEQUENCE * VOCAB // rank.size
    assert off.storages.peak_bytes >= everything
    if not real and entropy != "differentiable":
        assert 0 < on.storages.peak_bytes <= everything * 4 / 6


@on_ranks(of_core(2, NEWEST))
@pytest.mark.parametrize("how", ["", "nan", "checkpoint", "nan upstream"])
def test_a_rank_without_response_tokens(rank: Rank, how):
    """Context parallelism leaves ranks with prompt alone: `0 * logits.sum()` is all that their loss has."""
    have_groups(rank.size)
    broken = how == "nan"
    ids = torch.arange(SEQUENCE, device=rank.device)[None] % VOCAB
    positions, causal = megatron.positions_and_mask(rank)

    def loss_of(logits: Any) -> Tensor:
        loss = torch.zeros((), device=rank.device)
        if isinstance(logits, DeferredLogits):
            ((none, *_), _) = logits.log_probs_of(lambda rows: [(rows[0, :0], ids[0])])
            loss = loss + none.sum()
        loss += 0 * logits.sum()
        return loss

    def seen() -> tuple[Tensor, dict[str, Tensor], int, int]:
        # Megatron's DDP asserts in the end that every weight's hook has fired.
        (ddp,) = megatron.in_ddp(Model(fused_wgrad=True, overlap=True, sequence_parallel=True), rank)
        if broken:
            ddp.module.output_layer.weight.data[0] = torch.nan
        with LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=megatron.HIDDEN) as storages:
            logits = ddp(ids, positions[:1], causal, labels=None)
            again = how == "checkpoint"  # --recompute-loss-function
            loss = checkpoint(loss_of, logits, use_reentrant=False) if again else loss_of(logits)
            with gemm_flops() as flops:
                loss.backward(torch.full_like(loss, torch.nan) if how == "nan upstream" else None)
        ddp.finish_grad_sync()
        gradients = {name: parameter.main_grad for name, parameter in ddp.module.named_parameters()}
        return loss.detach(), gradients, storages.peak_bytes, flops.get_total_flops()

    off = seen()
    with flag(deferred_logits=True, strategy="store", num_chunks=6) as counted:
        on = seen()
    # None of the tokens, and all of them for their NaN. A second run is stopped before it has counted.
    assert counted.counts == (3 if how == "checkpoint" else 2, 0, 0)
    assert on[0].isnan() == off[0].isnan() == broken
    everything = 4 * SEQUENCE * VOCAB // rank.size
    assert off[2] >= everything and on[2] <= everything * 2 / 6
    of_one_gemm = 2 * SEQUENCE * VOCAB // rank.size * megatron.HIDDEN
    assert off[3] - on[3] == (1 if how == "checkpoint" else 2) * of_one_gemm, "the head's backward has a GEMM"
    for name, gradient in on[1].items():
        assert broken or torch.equal(gradient.isnan(), off[1][name].isnan()), name
        assert broken or torch.equal(gradient.nan_to_num(), off[1][name].nan_to_num()), name
    assert on[1]["output_layer.weight"].isnan().all() == (how == "nan upstream") or broken


@on_ranks(of_core(2, NEWEST))
def test_weights_that_were_changed_before_their_log_probs(rank: Rank):
    """Logits were computed at the call; the fused head computes only now, and would take the new ones."""
    have_groups(rank.size)
    ids = torch.zeros(1, SEQUENCE, dtype=torch.int64, device=rank.device)
    positions, causal = megatron.positions_and_mask(rank)
    with flag(deferred_logits=True), torch.no_grad():
        model = build(Model(), rank)
        logits = model(ids, positions[:1], causal, labels=None)
        model.output_layer.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="changed in place between its call"):
            at_once(logits.float(), ids[0], "none", False)


@on_ranks(of_core(1, NEWEST))
def test_an_upcast_imported_by_name_before_takes_deferred_logits(rank: Rank):
    """As the schedules of combined 1F1B have it, in a process that turns the head on later."""
    from megatron_fused_ce.adapter import rl_logprobs

    theirs, early = types.ModuleType("transformer.module"), types.ModuleType("common.utils")
    theirs.float16_to_fp32 = early.float16_to_fp32 = lambda value: pytest.fail("not for deferred logits")
    of_name = {module.__name__: module for module in (theirs, early)}
    with patch.dict(sys.modules, of_name), flag(deferred_logits=True):
        rl_logprobs.patch_upcast(theirs)
        have_groups(1)
        model = build(Model(dtype=torch.bfloat16), rank)
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device=rank.device)
        logits = model(ids, *megatron.positions_and_mask(rank), labels=None)
        assert early.float16_to_fp32(logits).dtype == torch.float32
        assert not logits.is_real
