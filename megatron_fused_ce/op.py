"""The op: per-token cross-entropy of ``hidden @ weight.T`` without the logits."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_fused_ce import logit_pass, planner
from megatron_fused_ce.chunking import plan_chunks
from megatron_fused_ce.config import (
    MERGE_CHOICES,
    SMOOTHING_FORM_CHOICES,
    STRATEGY_CHOICES,
    FusedCEConfig,
)
from megatron_fused_ce.grad_weight import OpenGradWeight, ReturnedGradWeight, kind_of
from megatron_fused_ce.logit_pass import LogitPass
from megatron_fused_ce.loss_form import LossForm
from megatron_fused_ce.pipeline import Head
from megatron_fused_ce.strategies import (
    RECOMPUTE,
    KeptChunk,
    Needs,
    Strategy,
    Waiting,
    strategy_of,
)
from megatron_fused_ce.validation import check_call
from megatron_fused_ce.vocab_parallel import VocabParallel, agree, largest_shard


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`."""

    loss: Tensor  # fp32, the labels' shape
    local_max: Tensor | None  # fp32 [T] in token order (s-major): this shard's largest logit
    local_argmax: Tensor | None  # int64 [T]: its row in this shard
    plan: planner.Plan  # what was chosen for this call


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross-entropy of a vocabulary-parallel head, one sequence chunk at a time.

    The same as::

        logits = hidden @ weight.T                        # over all ranks' rows: [s, b, sum of V]
        loss = cross_entropy(logits.float(), labels.T, reduction="none").T

    but never holding more than one chunk ``[C, V]`` of logits (``recompute``). Differentiable in
    ``hidden`` and ``weight`` for any upstream gradient per token.

    Args:
        hidden: ``[s, b, H]`` or ``[T, H]``, float32, bfloat16 or float16; with sequence parallelism
            this rank's part, ``[s / R, b, H]`` or ``[T / R, H]``.
        weight: ``[V, H]``, this rank's vocabulary rows, the dtype of ``hidden``. The ranks' shards may
            differ in size; they follow each other in rank order.
        labels: ``[b, s]`` (for ``hidden`` of three dimensions) or ``[T]``, global token ids, the same
            on every rank. For ids outside the vocabulary (-100 too) the loss is ``lse - max``, what
            Megatron's unfused loss gives for them.
        tp_group: the tensor-parallel group; None for a vocabulary held whole.
        sequence_parallel: each rank of the group holds its own part of the tokens.
        token_weights: in the labels' shape. A promise that the upstream gradient will be a scalar times
            these, which lets ``eager`` make the gradients in the forward; never changes the loss. A
            broken promise raises :class:`.upstream_guard.UpstreamMismatch` at the next optimizer step,
            before a parameter changes. The other strategies are exact without it.
        vocab_start: first global id of this rank's rows. None finds it on the device.
        config: chunking, strategy and the rest; None for the defaults.

    Returns:
        fp32 loss in the labels' shape.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank when it is the group's first call
            (with ``config.debug_checks``, on every call).

    Collectives, all over ``tp_group`` (R > 1). Once per call: the agreement check (first call only), the
    all-gather of shard sizes (without ``vocab_start``), the all-reduce of one float (label smoothing without
    ``true_vocab_size``), the all-gather of sampled rows of the weight (where
    the exponentiating product serves). Per chunk of the forward: all-gather of hidden states (sequence
    parallelism); the merge of the statistics, one all-gather or a MAX and a SUM all-reduce
    (``config.merge``). Per chunk of the backward: all-gather of hidden states (sequence parallelism, but the
    first, unless neither product needs them), one reduce-scatter of ``grad_hidden`` (sequence parallelism)
    or one all-reduce; with ``eager`` this reduction is in the forward, and the backward has none. Their
    order: :mod:`.strategies`; the same on every rank.

    Source: vocab-parallel cross-entropy, Shoeybi et al. 2019 (arXiv:1909.08053); chunking and
    recomputation of the logits: docs/design.md.
    """
    outputs: HeadOutputs = linear_cross_entropy(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
    )
    return outputs.loss


@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
    with_argmax: bool = False,
    open_grad_weight: OpenGradWeight = ReturnedGradWeight,
    uses_in_flight: int = 1,
) -> HeadOutputs:
    """:func:`fused_linear_cross_entropy` with what the Megatron adapter needs beside it.

    Args:
        with_argmax: also give each token's largest logit in this shard and its row.
        open_grad_weight: where ``grad_weight`` ends (see :mod:`.grad_weight`).
        uses_in_flight: calls that wait for their backward together, for plans of memory.
    """
    config = config or FusedCEConfig()
    comm = VocabParallel.of(tp_group, sequence_parallel, config.merge)
    if isinstance(hidden, Tensor) and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    num_tokens, error = None, None
    try:
        num_tokens = check_call(hidden, weight, labels, token_weights, vocab_start, comm.num_parts)
    except (TypeError, ValueError) as bad:
        error = bad
    vocab_range = (
        None if vocab_start is None or num_tokens is None else (vocab_start, weight.shape[0])
    )
    logits = None
    if num_tokens is not None:
        try:
            flat = hidden.reshape(num_tokens, hidden.shape[-1])
            logits, _ = logit_pass.choose(
                config.logit_pass,
                config.row_backend,
                flat,
                weight,
                config.logit_scale,
                config.beyond_plain,
            )
            _check_token_weights(config, token_weights, hidden, weight)
        except ValueError as bad:
            num_tokens, error = None, bad
    facts = _facts(
        num_tokens, hidden, weight, config, comm, vocab_start, logits, token_weights, uses_in_flight
    )
    num_rows = 0 if num_tokens is None else weight.shape[0]
    agree(comm.group, facts, vocab_range, num_rows, error, config.debug_checks)
    assert num_tokens is not None and logits is not None
    plan = planner.plan(
        planner.PlanInputs.of(
            config,
            num_tokens=num_tokens * comm.num_parts,
            hidden_size=hidden.shape[-1],
            num_rows=largest_shard(comm.group, weight.shape[0]),
            dtype=str(hidden.dtype).removeprefix("torch."),
            num_parts=comm.num_parts,
            tp_size=comm.size,
            end_point=kind_of(open_grad_weight) if weight.requires_grad else "none",
            token_weights_known=token_weights is not None,
            logit_pass=logits.name,
            device=torch.cuda.get_device_name(hidden.device) if hidden.is_cuda else "cpu",
            uses_in_flight=uses_in_flight,
        )
    )

    # From here on every rank runs the same collectives.
    if vocab_start is None:
        first_id: int | Tensor = comm.vocab_start(weight.shape[0], hidden.device)
    else:
        first_id = vocab_start
    in_token_order = labels if labels.dim() == 1 else labels.t()
    ids = in_token_order.reshape(comm.num_parts, -1).to(torch.int64)
    local_labels = ids - first_id
    ignored = None
    if config.true_vocab_size is not None:
        # No shard has a label in the padding.
        local_labels.masked_fill_(ids >= config.true_vocab_size, -1)
    if config.ignore_index is not None:
        ignored = ids == config.ignore_index
        local_labels.masked_fill_(ignored, -1)
    weights = None
    if token_weights is not None and plan.strategy == "eager":
        in_order = token_weights if token_weights.dim() == 1 else token_weights.t()
        weights = in_order.detach().reshape(comm.num_parts, -1).to(torch.float32, copy=True)
        if ignored is not None:
            weights.masked_fill_(ignored, 0.0)
    head = Head(
        comm=comm,
        chunks=plan_chunks(
            num_tokens,
            comm.num_parts,
            replace(config, num_chunks=plan.num_chunks, chunk_tokens=plan.chunk_tokens),
        ),
        logit_scale=config.logit_scale,
        form=LossForm.of(config, comm, weight.shape[0], first_id, hidden.device),
        logits=logits,
        with_argmax=with_argmax,
        open_grad_weight=open_grad_weight,
        token_weights=weights,
    )
    needs_grad = torch.is_grad_enabled()
    needs = Needs(needs_grad and hidden.requires_grad, needs_grad and weight.requires_grad)
    strategy = strategy_of(plan.strategy, plan.stored_chunks) if any(needs) else RECOMPUTE
    loss, local_max, local_argmax = _FusedLinearCrossEntropy.apply(
        flat,
        weight,
        local_labels,
        head,
        strategy,
        needs,
    )
    if ignored is not None:
        # Autograd then hands the head an upstream gradient of 0 for them, whatever the caller's is.
        loss = loss.masked_fill(ignored.flatten(), 0.0)
    if labels.dim() == 2:
        loss = loss.view(labels.shape[1], labels.shape[0]).t().contiguous()
    return HeadOutputs(loss, local_max, local_argmax, plan)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Saves, calls the strategy, returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H]
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [parts, n]
        head: Head,
        strategy: Strategy,
        needs: Needs,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            out = strategy.forward(head, hidden, weight, labels, needs)
        loss = out.loss.flatten()
        row_max = None if out.row_max is None else out.row_max.flatten()
        argmax = None if out.argmax is None else out.argmax.flatten()
        if any(needs):
            # Tensors that wait go through autograd, which frees them with the graph; the gradients
            # that eager made are handed over by the first backward.
            kept = [out.last_tokens, *(tensor for chunk in out.kept for tensor in chunk)]
            ctx.head, ctx.strategy = head, strategy
            ctx.gradients = out.gradients
            ctx.save_for_backward(hidden, weight, labels, out.terms, *kept)
        ctx.set_materialize_grads(False)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max, argmax)
        return loss, row_max, argmax

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_loss is None:
            return (None,) * 6
        saved: Any = ctx
        hidden, weight, labels, terms, last_tokens, *kept = saved.saved_tensors
        chunks = [KeptChunk(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
        waited = Waiting(terms, chunks, last_tokens, saved.gradients)
        saved.gradients = None
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight = saved.strategy.backward(
                saved.head,
                hidden,
                weight,
                labels,
                waited,
                grad_loss.float().reshape(labels.shape),
                Needs(*saved.needs_input_grad[:2]),
            )
        return grad_hidden, grad_weight, None, None, None, None


def _check_token_weights(
    config: FusedCEConfig, token_weights: Tensor | None, hidden: Tensor, weight: Tensor
) -> None:
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if config.strategy == "eager" and token_weights is None and needs_grad:
        raise ValueError(
            "strategy 'eager' makes the gradients in the forward and needs token_weights, the weights "
            "that the loss will be multiplied by; give them, or use 'store' or 'recompute'"
        )


def _facts(
    num_tokens: int | None,
    hidden: Tensor,
    weight: Tensor,
    config: FusedCEConfig,
    comm: VocabParallel,
    vocab_start: int | None,
    logits: LogitPass | None,
    token_weights: Tensor | None,
    uses_in_flight: int,
) -> dict[str, int]:
    """What must be equal on every rank of the group; zeros where this rank's input is bad."""
    names = (
        "tokens in hidden",
        "hidden size",
        "dtype of hidden",
        "hidden.requires_grad",
        "sequence_parallel",
        "num_chunks",
        "chunk_tokens",
        "strategy",
        "logit_scale (bits)",
        "vocab_start given",
        "debug_checks",
        "memory_mb",
        "token_weights given",
        "weight.requires_grad",
        "the logit pass (shards of unequal alignment? then name logit_pass='rows')",
        "uses_in_flight",
        "merge",
        "logit_softcap (bits)",
        "z_loss (bits)",
        "label_smoothing (bits)",
        "label_smoothing_form",
        "ignore_index",
        "true_vocab_size",
    )
    if num_tokens is None or logits is None:
        return dict.fromkeys(names, 0)
    values = (
        num_tokens,
        hidden.shape[-1],
        hidden.element_size() + 100 * (hidden.dtype == torch.bfloat16),
        int(hidden.requires_grad),
        int(comm.sequence_parallel),
        config.num_chunks or 0,
        config.chunk_tokens or 0,
        STRATEGY_CHOICES.index(config.strategy),
        _bits(config.logit_scale),
        int(vocab_start is not None),
        int(config.debug_checks),
        config.memory_mb or 0,
        int(token_weights is not None),
        int(weight.requires_grad),
        int(logits.name == "exp"),
        uses_in_flight,
        MERGE_CHOICES.index(config.merge),
        _bits(config.logit_softcap or 0.0),
        _bits(config.z_loss),
        _bits(config.label_smoothing),
        SMOOTHING_FORM_CHOICES.index(config.label_smoothing_form),
        -(2**62) if config.ignore_index is None else config.ignore_index,
        config.true_vocab_size or 0,
    )
    return dict(zip(names, values, strict=True))


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")
