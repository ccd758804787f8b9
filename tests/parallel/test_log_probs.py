"""Log-probabilities of Megatron's models, off and on: of output_processor, of train_rl.py's get_logprobs, and
of callers that take logits, as slime and miles do, which stay deferred.

The caller of train_rl.py's steps is tests/support/rl_utils.py. What was run with Megatron-LM's own:
docs/megatron.md.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.head import tokens as head_tokens
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from megatron_fused_ce.scripts.lib.reference import relative_error
from tests.support import megatron, rl_utils
from tests.support.collectives import Collective, Collectives
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, flag, have_groups, of_core
from tests.support.op import gemm_flops
from tests.support.ranks import Rank, on_ranks
from tests.support.rl_utils import patched_caller

CHUNKS, TEMPERATURE = 6, 0.7
#: Of four samples: all tokens, those of the response. The rest of the sequence is padding.
LENGTHS = ((9, 4), (4, 3), (2, 0), (8, 7))
CORES = [of_core(2, NEWEST), of_core(1, NEWEST, pytest.mark.rest)]


def storages(rank: Rank, rows: int = 0) -> LogitStorages:
    return LogitStorages(vocab_rows=rows or VOCAB // rank.size, hidden_size=megatron.HIDDEN)


class Seen:
    """What a model gives by a door: results of its passes, gradients, logits that were held, collectives."""

    def __init__(self, row: Row, rank: Rank, on: bool) -> None:
        self.built, self.rank, self.row, self.on = build(row.model, rank), rank, row, on
        self.caller = megatron.as_called(self.built)
        self.made: list[tuple[Tensor | None, ...]] = []
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator).to(rank.device)
        self.upstream = torch.randn(2, BATCH, SEQUENCE, generator=generator).to(rank.device)
        self.numbers = torch.rand(2, BATCH, SEQUENCE, generator=generator).to(rank.device)
        self.where = megatron.positions_and_mask(rank)
        with (
            storages(rank) as self.shards,
            storages(rank, VOCAB) as self.gathered,
            Collectives({rank.group: "tp"}) as issued,
        ):
            row.door(self)
        self.calls: list[Collective] = issued.calls
        self.gradients = megatron.gradients_of(self.built)

    def total(self, made: Any, upstream: Tensor) -> Tensor:
        """Of log-probabilities and entropy."""
        total = (made[0] * upstream[0]).sum()
        return total + (made[1] * upstream[1]).sum() if self.row.entropy == "differentiable" else total


# --- doors -----------------------------------------------------------------------------------------


def by_processor(seen: Seen) -> None:
    """Against the log-softmax of the model's logits."""
    from megatron_fused_ce import output_processor

    ddp = megatron.ddp(seen.caller)
    temperature, active = seen.numbers[0] + 0.5, seen.numbers[1] < 0.7
    upstream, labels = seen.upstream.masked_fill(~active, 0.0), seen.ids.roll(-1, 1)
    if seen.row.num_labels:
        labels = torch.stack([seen.ids.roll(-1 - k, 1) for k in range(seen.row.num_labels)], -1)
        upstream = upstream.unsqueeze(-1)
    if seen.on:
        config = None if seen.row.flag else FusedCEConfig(**seen.row.options)
        context = {"temperature": temperature, "entropy": seen.row.entropy, "config": config}
        context["active_mask"] = active
        given = {"output_processor": output_processor, "labels": labels}
        with patch.object(head_tokens, "ROUND_TO", 1):
            made = ddp(seen.ids, *seen.where, output_processor_context=context, **given)
    else:
        logits = ddp(seen.ids, *seen.where, labels=None).float() / temperature[..., None]
        log_prob, entropy = definition(logits, labels, seen.row.entropy)
        log_prob = log_prob.view(BATCH, SEQUENCE, -1).masked_fill(~active.unsqueeze(-1), 0.0)
        made = log_prob.view(labels.shape), entropy.masked_fill(~active, 0.0)
    seen.made.append(tuple(made))
    seen.total(made, upstream).backward()
    ddp.finish_grad_sync()


def definition(logits: Tensor, tokens: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
    """Of real logits ``[b, n, V / R]``, and tokens ``[b, n]`` or ``[b, n, K]``."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    log_p = gather_from_tensor_model_parallel_region(logits.contiguous()).log_softmax(-1)
    log_prob = log_p.gather(-1, tokens if tokens.dim() == 3 else tokens[..., None]).view(tokens.shape)
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


def by_logits(log_probs: Any) -> Any:
    """A pass without gradients, then a training step, both by Megatron's schedule."""

    def door(seen: Seen) -> None:
        ids, upstream = seen.ids[:1], seen.upstream[:, 0]

        def loss(logits: Any, non_loss_data: bool = False) -> Any:
            made = log_probs(logits, ids[0], seen.row.entropy, seen.row.real)
            seen.made.append(made)
            if non_loss_data:
                return made
            total = seen.total(made, upstream[:, : len(made[0])])
            return total, torch.ones((), dtype=torch.int, device=logits.device), {}

        def step(data: Any, model: Any) -> Any:
            return model(ids, seen.where[0][:1], seen.where[1], labels=None), loss

        for forward in ({"forward_only": True, "collect_non_loss_data": True}, {}):
            megatron.scheduled(step, [seen.caller], [None], micro_batch_size=1, **forward)

    return door


def by_get_logprobs(seen: Seen) -> None:
    """A training step, and two passes as train_rl.py asks for them and as upstream's tests do: no gradient
    either way."""
    given = seen.ids, seen.where[0][:, : seen.row.positions]
    trained = rl_utils.get_logprobs(seen.caller.train(), *given)
    trained.backward(seen.upstream[0, :, : trained.shape[1]].to(trained.dtype))
    seen.caller.eval()
    with torch.no_grad():
        old = rl_utils.get_logprobs(seen.caller, *given, no_grad=True)
    reference = rl_utils.get_logprobs(seen.caller, *given, no_grad=True)
    seen.made += [(x,) for x in (trained, old, reference)]


# --- off against on --------------------------------------------------------------------------------

HALF_SP: dict[str, Any] = {"dtype": torch.bfloat16, "sequence_parallel": True}


@dataclass(frozen=True)
class Row:
    door: Any
    model: Model = field(default_factory=Model)
    entropy: str = "none"
    flag: bool = True  # else the processor alone
    real: bool = False  # the caller takes real logits all the same
    num_labels: int = 0  # of a token; 0 for ``[b, s]``
    positions: int = SEQUENCE  # of get_logprobs; less: a part of the context

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads fused, made real, stock; over several ranks MTP's loss takes its gathered logits."""
        if self.door is by_get_logprobs:
            return 3, 3 * self.model.mtp, 0
        return (0, 2, 0) if self.real else (1 if self.door is by_processor else 2, 0, 0)

    @property
    def options(self) -> dict[str, Any]:
        half, of_rl = self.model.dtype != torch.float32, self.door is by_get_logprobs
        precision = "activations" if half or of_rl else "auto"
        options = {"strategy": self.model.strategy, "num_chunks": CHUNKS, "logit_precision": precision}
        # The scaled-exp GEMM gathers more rows of a sample than there are tokens.
        return {**options, "logits_backend": "gemm_rows"}


SP: dict[str, Any] = {"sequence_parallel": True}
MUP: dict[str, Any] = {"extra": megatron.MUP}
AT_ONCE, BY_SAMPLES = by_logits(at_once), by_logits(by_samples)
DETACHED, DIFFERENTIABLE = {"entropy": "detached"}, {"entropy": "differentiable"}
ROWS = {
    "processor tied sp": Row(by_processor, Model(tied=True, **SP), **DETACHED, flag=False),
    "processor mup fused wgrad": Row(by_processor, Model(**MUP, fused_wgrad=True), **DIFFERENTIABLE),
    "processor fused wgrad sp, two labels": Row(
        by_processor, Model(fused_wgrad=True, **SP), **DETACHED, num_labels=2
    ),
    "processor bf16 sp": Row(by_processor, Model(**HALF_SP), **DETACHED),
    "at once": Row(AT_ONCE),
    "at once, tied sp": Row(AT_ONCE, Model(tied=True, **SP), **DIFFERENTIABLE),
    "at once, hybrid bf16 sp": Row(AT_ONCE, Model(family="hybrid", **HALF_SP), **DETACHED),
    "at once, real": Row(AT_ONCE, Model(**SP), **DETACHED, real=True),
    "samples": Row(BY_SAMPLES),
    "samples, tied sp": Row(BY_SAMPLES, Model(tied=True, **SP), **DIFFERENTIABLE),
    "samples, hybrid sp": Row(BY_SAMPLES, Model(family="hybrid", **SP), **DETACHED),
    "samples, real": Row(BY_SAMPLES, Model(**SP), **DETACHED, real=True),
    "get_logprobs": Row(by_get_logprobs, Model(strategy="store")),
    "get_logprobs grad_in_forward tied sp": Row(
        by_get_logprobs, Model(strategy="grad_in_forward", tied=True, **SP)
    ),
    "get_logprobs bf16 sp": Row(by_get_logprobs, Model(**HALF_SP)),
    "get_logprobs hybrid tied sp": Row(by_get_logprobs, Model(family="hybrid", tied=True, **SP)),
    "get_logprobs mup mtp 1": Row(by_get_logprobs, Model(**MUP, mtp=1)),
    # The local attention refuses context parallelism: here a part attends to itself, off and on.
    "get_logprobs, a part of the context": Row(by_get_logprobs, positions=SEQUENCE // 2),
}


@on_ranks(*CORES)
@pytest.mark.parametrize("name", ROWS)
def test_off_against_on(rank: Rank, name):
    row = ROWS[name]
    model, of_rl = row.model, row.door is by_get_logprobs
    have_groups(rank.size)
    off = Seen(row, rank, on=False)
    deferred = row.door in (AT_ONCE, BY_SAMPLES)
    turn = flag(row.flag, deferred_logits=deferred, **row.options)
    with patched_caller() if of_rl else contextlib.nullcontext(), turn as seen:
        on = Seen(row, rank, on=True)
    expected = (6, 0, 0) if model.mtp and rank.size == 1 else row.counts
    assert seen.counts == expected
    half = model.dtype != torch.float32
    for got, right in zip(on.made, off.made, strict=True):
        for mine, theirs in zip(got, right, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert mine.requires_grad == theirs.requires_grad
                assert_same(mine, theirs, half)
    assert on.made[-1][0].requires_grad != of_rl, "the last pass of get_logprobs has no gradient"
    megatron.assert_same(
        on.gradients, off.gradients, megatron.HALF_BOUND if half else megatron.GRADIENT_BOUND
    )
    if model.mtp or row.real:
        return
    # Neither all tokens' logits nor the whole vocabulary's of any: some of six chunks (entropy: a third one).
    tokens = (1 if deferred else BATCH) * row.positions
    everything = (2 if of_rl and half else 4) * tokens * VOCAB // rank.size
    assert off.shards.peak_bytes >= everything
    if model.strategy == "recompute" and row.entropy != "differentiable" and not (of_rl and half):
        assert 0 < on.shards.peak_bytes <= everything * 4 / CHUNKS
    if of_rl and rank.size > 1:
        assert off.gathered.num_storages > 0 and on.gathered.num_storages == 0
        assert largest(off.calls) == tokens * VOCAB
        assert 0 < largest(on.calls) <= tokens * megatron.HIDDEN


def assert_same(got: Tensor, expected: Tensor, in_half: bool = False) -> None:
    """Within rounding, on a CPU of 2e-7; ``in_half``: of logits that were rounded to bf16. bf16 itself within
    one ulp."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.dtype == torch.bfloat16:
        torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=0.0)  # never two ulps
    else:
        bound = 1e-2 if in_half else 2e-7 if got.device.type == "cpu" else megatron.LOSS_BOUND
        error = relative_error(got, expected)
        assert error <= bound, f"differs by {error:.1e}"


def largest(calls: list[Collective]) -> int:
    """Elements of the largest tensor that these collectives moved."""
    return max((torch.Size(shape).numel() for call in calls for shape in call.shapes), default=0)


# --- output_processor ------------------------------------------------------------------------------


@on_ranks(CORES[0])
def test_multi_token_prediction_beside_it(rank: Rank):
    """Its loss goes the model's way, into the same main_grad: as a loss of minus the log-probability."""
    import megatron_fused_ce

    def gradients(**processor: Any) -> dict[str, Tensor]:
        (ddp,) = megatron.in_ddp(Model(mtp=1, fused_wgrad=True), rank)
        made = megatron.losses_of(ddp, megatron.draw(rank), rank, **processor)
        (-made[0] if processor else made).mean().backward()
        ddp.finish_grad_sync()
        return megatron.gradients_of(ddp.module)

    have_groups(rank.size)
    right = gradients()
    for turn in (contextlib.nullcontext(), flag()):
        with turn:
            got = gradients(output_processor=megatron_fused_ce.output_processor)
        megatron.assert_same(got, right)


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize("on", [False, True], ids=["", "flag"])
def test_the_weight_is_read_inside_the_layers_call(rank: Rank, on):
    """DDP and FSDP gather it in a hook before the layer's forward; afterwards the layer is as it was."""
    import megatron_fused_ce

    have_groups(1)
    with flag() if on else contextlib.nullcontext():
        built = build(Model(), rank)
    call = functools.partial(
        megatron.forward, built, rank, True, output_processor=megatron_fused_ce.output_processor
    )
    right = call()
    weight, layer = built.output_layer.weight, built.output_layer
    gathered, before = weight.detach().clone(), dict(vars(layer))
    weight.data.fill_(torch.nan)

    def gather(module: Any, inputs: Any) -> None:
        weight.data.copy_(gathered)

    hook = layer.register_forward_pre_hook(gather)
    assert torch.equal(call().log_prob, right.log_prob)
    hook.remove()
    assert vars(layer).keys() == before.keys()


BIAS = torch.nn.Parameter(torch.zeros(VOCAB))
REFUSED = {
    "a bias": (lambda layer: setattr(layer, "bias", BIAS), "layer has a bias"),
    "a hook": (lambda layer: layer.register_forward_hook(print), "a forward hook .builtins.print. may read"),
    "a forward": (lambda layer: setattr(layer, "forward", print), "its forward is builtins.print"),
    "a class": (
        lambda layer: setattr(layer, "__class__", type("Head", (type(layer),), {"forward": print})),
        "output layer is .*Head",
    ),
}


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize("what", REFUSED)
def test_a_head_that_may_do_more_is_refused(rank: Rank, what):
    import megatron_fused_ce

    have_groups(1)
    built = build(Model(), rank)
    change, words = REFUSED[what]
    change(built.output_layer)
    with pytest.raises(ValueError, match=f"output_processor cannot serve this head: .*({words})"):
        megatron.forward(built, rank, True, output_processor=megatron_fused_ce.output_processor)


@on_ranks(of_core(1, megatron.INSTALLED))
def test_what_it_is_given_is_checked(rank: Rank):
    from megatron_fused_ce import output_processor

    have_groups(1)
    megatron.needs_core(0, 16)
    layer = build(Model(dtype=torch.bfloat16), rank).output_layer
    layer.output_dtype = torch.float32
    hidden = 9 * torch.randn(4, 1, megatron.HIDDEN, generator=torch.Generator().manual_seed(3))
    hidden = hidden.to(rank.device, torch.bfloat16)
    given = {"hidden_states": hidden, "output_layer": layer, "output_weight": None}
    given["labels"] = torch.zeros(1, 4, dtype=torch.int64, device=rank.device)
    contradicts = FusedCEConfig(logit_precision="activations")
    for context, words in (
        ({"chunk": 4}, "output_processor_context has chunk; expected some of temperature"),
        ({"config": contradicts}, "logit_precision. contradict each other"),
        ({"active_mask": "loss_mask"}, "'loss_mask' and the model's call had no loss_mask"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            output_processor(**given, context=context)
    with pytest.raises(ValueError, match="expected a product with one number"):
        output_processor(**given, scale_logits=torch.tanh)
    logits = hidden.double() @ layer.weight.double().T
    for scale in (1.0, 0.5):
        made = output_processor(**given, scale_logits=lambda logits, by=scale: logits * by).log_prob
        expected = (scale * logits).log_softmax(-1)[..., 0].T
        assert (made - expected).abs().max() < 2e-6, "fp32 logits of bf16 hidden states are not rounded"
    mask = torch.tensor([[0.0, 2.0, 0.0, 1.0]], device=rank.device)
    for context in ({}, {"active_mask": "loss_mask"}):
        made = output_processor(**given, loss_mask=mask, context=context)
        assert torch.equal(made.log_prob != 0, mask != 0) == ("active_mask" in context)
    layer.output_dtype = torch.float16
    with pytest.raises(ValueError, match=r"asks for .*float16 logits"):
        output_processor(**given)


# --- get_logprobs ----------------------------------------------------------------------------------


@on_ranks(of_core(2, NEWEST))
def test_gathered_logits_of_a_shard(rank: Rank):
    """Their argmax is of the whole vocabulary; options of the loss are refused before any collective."""
    from megatron_fused_ce.adapter import caller

    have_groups(rank.size)
    tokens, labels, _ = megatron.draw(rank)
    given = tokens, megatron.positions_and_mask(rank)[0], None
    expected = build(Model(), rank)(*given, runtime_gather_output=True)
    with flag(z_loss=1e-4), patched_caller(), Collectives({rank.group: "tp"}) as issued:
        on = build(Model(), rank)
        with caller.returned_to_caller():
            logits = on(*given, runtime_gather_output=True)
        before = len(issued.calls)
        with pytest.raises(ValueError, match="z_loss: the caller's log-probabilities are those of the plain"):
            logits.log_probs(labels)
        assert len(issued.calls) == before > 0
    # Half of the tokens or so have it on the other rank.
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.max(dim=-1).values, expected.max(dim=-1).values)
    assert logits.shape == expected.shape


@on_ranks(*megatron.both_cores(4))
def test_a_pipeline_in_bf16(rank: Rank):
    """As compute_logprobs_batch: what the last stage has fits the buffer that the first receives into."""
    from megatron.core import parallel_state

    have_groups(2, 2)
    tokens, _, upstream = megatron.draw(rank)
    positions, _ = megatron.positions_and_mask(rank)

    def run(stage: Any, no_grad: bool) -> Any:
        def step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            log_probs = rl_utils.get_logprobs(model, tokens, positions, no_grad=no_grad)
            return log_probs, None if no_grad else lambda made: ((made.float() * upstream[:, 1:]).sum(), {})

        return megatron.scheduled(step, [stage], [None], forward_only=no_grad)

    def seen() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (stage,) = megatron.in_ddp(Model(sequence_parallel=True, dtype=torch.bfloat16), rank)
        stage.eval()
        outputs = run(stage, no_grad=True)
        received = torch.empty(BATCH, SEQUENCE - 1, dtype=torch.bfloat16, device=rank.device)
        if outputs:
            assert outputs[0].dtype == received.dtype
            received = outputs[0].detach()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(received, src=last, group=group)
        run(stage.train(), no_grad=False)
        return received, megatron.gradients_of(stage.module)

    off = seen()
    with patched_caller(), flag(strategy="recompute", num_chunks=3, logit_precision="activations") as counted:
        on = seen()
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert counted.counts == (2 * is_last, 0, 0)
    assert_same(on[0], off[0])
    megatron.assert_same(on[1], off[1], megatron.HALF_BOUND)


# --- deferred logits -------------------------------------------------------------------------------


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
        with storages(rank) as held:
            logits = ddp(ids, positions[:1], causal, labels=None)
            again = how == "checkpoint"  # --recompute-loss-function
            loss = checkpoint(loss_of, logits, use_reentrant=False) if again else loss_of(logits)
            with gemm_flops() as flops:
                loss.backward(torch.full_like(loss, torch.nan) if how == "nan upstream" else None)
        ddp.finish_grad_sync()
        return loss.detach(), megatron.gradients_of(ddp.module), held.peak_bytes, flops.get_total_flops()

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
    with flag(deferred_logits=True), torch.no_grad():
        model = build(Model(), rank)
        logits = megatron.forward(model, rank, labels=False)
        model.output_layer.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="changed in place between its call"):
            at_once(logits[:1].float(), torch.zeros(SEQUENCE).long().to(rank.device), "none", False)


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
        logits = megatron.forward(build(Model(dtype=torch.bfloat16), rank), rank, labels=False)
        assert early.float16_to_fp32(logits).dtype == torch.float32
        assert not logits.is_real
