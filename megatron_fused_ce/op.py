"""The op: per-token cross-entropy of ``hidden @ weight.T`` without the logits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_fused_ce import autocast, logits_backend, masked_tokens, planner
from megatron_fused_ce.chunking import first_tokens, plan_chunks
from megatron_fused_ce.config import (
    LOGIT_PRECISION_CHOICES,
    LOGITS_BACKEND_CHOICES,
    MERGE_CHOICES,
    SMOOTHING_FORM_CHOICES,
    STRATEGY_CHOICES,
    FusedCEConfig,
    check_config,
    takes_config,
)
from megatron_fused_ce.grad_weight import (
    OpenedAccumulators,
    OpenGradWeight,
    ReturnedGradWeight,
    kind_of,
)
from megatron_fused_ce.logits_backend import LogitsBackend
from megatron_fused_ce.loss_form import LossForm, SoftTargets, merge_duplicates
from megatron_fused_ce.phases import UNTIMED, Phases
from megatron_fused_ce.pipeline import Head
from megatron_fused_ce.strategies import (
    RECOMPUTE,
    KeptChunk,
    Needs,
    Strategy,
    Targets,
    Waiting,
    strategy_of,
)
from megatron_fused_ce.token_outputs import (
    DIFFERENTIABLE,
    OUTPUT_CHOICES,
    TokenOutputs,
    Upstream,
)
from megatron_fused_ce.upstream_guard import WITHOUT_MODEL, Guard
from megatron_fused_ce.validation import check_asked, check_call
from megatron_fused_ce.vocab_parallel import (
    VocabParallel,
    agree,
    check_true_vocab_size,
    compares,
    largest_shard,
    settled,
)


class TeacherTargets(NamedTuple):
    """The ``k`` classes a teacher found likely, of each token: ``[b, s, k]`` or ``[T, k]``."""

    ids: Tensor  # int64 or int32, global ids; those outside the vocabulary count for nothing
    log_probs: Tensor  # float


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`."""

    outputs: TokenOutputs  # the labels' shape
    local_max: Tensor | None  # fp32 [T] in token order (s-major): this shard's largest logit
    local_argmax: Tensor | None  # int64 [T]: its row in this shard
    plan: planner.Plan  # what was chosen for this call
    logits_backend: str  # that served
    why_not_scaled_exp: str  # empty where it served

    @property
    def loss(self) -> Tensor:
        return self.outputs.loss


@takes_config
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
            differ in size; they follow each other in rank order. Where a group's first call had equal
            shards and a later head has unequal ones, that one needs ``config.debug_checks``.
        labels: ``[b, s]`` (for ``hidden`` of three dimensions) or ``[T]``, global token ids, the same
            on every rank. An id outside the vocabulary, -100 too, has the loss of Megatron's unfused path,
            ``lse - max``. ``config=FusedCEConfig(ignore_index=-100)`` gives PyTorch's convention: loss 0 and
            no gradient for tokens labelled -100.
        tp_group: the tensor-parallel group; None for a vocabulary held whole.
        sequence_parallel: each rank of the group holds its own part of the tokens.
        token_weights: in the labels' shape. A promise that the upstream gradient will be a scalar times
            these, which lets ``grad_in_forward`` make the gradients in the forward; never changes the loss. A
            broken promise raises :class:`.upstream_guard.UpstreamMismatch` at the next optimizer step,
            before a parameter changes. The other strategies are exact without it.
        vocab_start: first global id of this rank's rows. None finds it on the device.
        config: chunking, strategy and the rest; None for the defaults.

    Returns:
        fp32 loss in the labels' shape.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank when the call is compared: the
            first of each head over a group (a head: its model, shape, dtype and ``requires_grad`` of its
            weight), every one with ``config.debug_checks`` or after unequal shards.

    Collectives, all over ``tp_group`` (R > 1). Once per call: the agreement check (a head's first call
    only; every call once shards of unequal sizes were seen), the MAX all-reduce of an int64
    (``skip_masked``), the all-gather of shard sizes (without ``vocab_start``), the all-reduce of one float
    (label smoothing without ``true_vocab_size``), the all-gather of sampled rows of the weight (where the
    scaled-exp GEMM serves). Per chunk of the forward: all-gather of hidden states (sequence parallelism);
    the merge of the statistics, one all-gather or a MAX and a SUM all-reduce (``config.merge``). Per chunk of
    the backward: all-gather of hidden states (sequence parallelism, but the first, unless neither product
    needs them), one reduce-scatter of ``grad_hidden`` (sequence parallelism) or one all-reduce; with
    ``grad_in_forward`` this reduction is in the forward, and the backward has none. Their order:
    :mod:`.strategies`; the same on every rank.

    Source: vocab-parallel cross-entropy, Shoeybi et al. 2019 (arXiv:1909.08053); chunking and
    recomputation of the logits: docs/design.md.
    """
    head: HeadOutputs = linear_cross_entropy(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
    )
    return head.loss


@takes_config
def fused_linear_token_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    outputs: Sequence[str],
    *,
    differentiable: bool = True,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> TokenOutputs:
    """:func:`fused_linear_cross_entropy` and more about each token, without the logits.

    Args:
        outputs: names out of ``log_prob``, ``lse``, ``entropy``, ``predicted``, ``correct``; see
            :class:`.TokenOutputs` for what they are, in the labels' shape.
        differentiable: whether ``log_prob``, ``lse`` and ``entropy`` carry gradients, each for any upstream
            of its own. They then need the row kernels and a strategy other than ``grad_in_forward``, which
            cannot know those upstreams; without, every strategy and pass serves (``entropy`` needs the rows).

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; ``entropy``
    and ``predicted`` add a float a token to the merge of the statistics (``predicted`` with
    ``merge="all_reduce"``: a MIN all-reduce ``[C]``).

    Returns:
        the loss and what was asked for; None for the rest.

    Raises:
        ValueError, beside those: an unknown name; ``predicted`` with ids of 2**24 or more;
            ``grad_in_forward`` by name with differentiable outputs.

    Source: d log p_y = [j = y] - p_j, d entropy = -p_j (log p_j + entropy): docs/math.md.
    """
    head: HeadOutputs = linear_cross_entropy(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
        outputs=tuple(outputs),
        differentiable=differentiable,
    )
    return head.outputs


@takes_config
def fused_linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross entropy ``-sum q log p`` against a teacher's ``k`` likeliest classes.

    ``q = exp(teacher_log_probs)`` as given, ``p`` the student's probabilities over the whole vocabulary.
    Entries with one id add up. Mass that ``q`` leaves over (``1 - sum q``, and entries of ids outside the
    vocabulary) takes no part: the loss is ``(sum q) * lse - sum q s``, 0 for a token without any entry.
    For the mean over the teacher's own top k hand in log-probabilities that sum up to 1.

    Args:
        teacher_ids: ``[b, s, k]`` (for ``hidden`` of three dimensions) or ``[T, k]``, int64 or int32, global
            ids, the same on every rank. ``-1`` for entries that are not there.
        teacher_log_probs: the same shape, float; no gradient flows into it.
        config: as for :func:`fused_linear_cross_entropy`; label smoothing and ``ignore_index`` do not apply
            and are refused.

    The other arguments, errors and collectives: as there; the merge has two floats a token more.

    Returns:
        fp32 loss ``[b, s]`` or ``[T]``; differentiable in ``hidden`` and ``weight``.

    Source: d loss / d s_j = (sum q) p_j - q_j; docs/math.md.
    """
    head: HeadOutputs = linear_cross_entropy(
        hidden,
        weight,
        # No label is anywhere.
        teacher_ids.new_full(teacher_ids.shape[:-1], -1, dtype=torch.int64),
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
        teacher=TeacherTargets(teacher_ids, teacher_log_probs),
    )
    return head.loss


def _on_device_of_hidden(call: Callable[..., HeadOutputs]) -> Callable[..., HeadOutputs]:
    """Triton's launches and the collectives' streams are the current device's: make it that of ``hidden``.

    Autograd's thread for a backward does so by itself.
    """

    @wraps(call)
    def on_device(hidden: Tensor, *args: Any, **kwargs: Any) -> HeadOutputs:
        if (
            not getattr(hidden, "is_cuda", False)
            or hidden.get_device() == torch.cuda.current_device()
        ):
            return call(hidden, *args, **kwargs)
        with torch.cuda.device(hidden.device):
            return call(hidden, *args, **kwargs)

    return on_device


@torch.compiler.disable
@_on_device_of_hidden
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
    outputs: tuple[str, ...] = (),
    differentiable: bool = False,
    teacher: TeacherTargets | None = None,
    with_argmax: bool = False,
    unmasked: masked_tokens.Count | None = None,
    open_grad_weight: OpenGradWeight = ReturnedGradWeight,
    uses_in_flight: int = 1,
    phases: Phases = UNTIMED,
    guard: Guard = WITHOUT_MODEL,
) -> HeadOutputs:
    """:func:`fused_linear_cross_entropy` with all that the other functions and the Megatron adapter need.

    Args:
        outputs, differentiable: see :func:`fused_linear_token_outputs`.
        teacher: see :func:`fused_linear_distillation`; the labels are then outside the vocabulary.
        with_argmax: also give each token's largest logit in this shard and its row.
        unmasked: with ``config.skip_masked``: what :func:`.masked_tokens.count` started earlier for these
            token weights; else it is counted here, and the host waits.
        open_grad_weight: where ``grad_weight`` ends (see :mod:`.grad_weight`).
        uses_in_flight: calls that wait for their backward together, for plans of memory.
        phases: a :class:`.PhaseTimes` to time the call's passes with.
        guard: of the model that holds the head: told of a mismatch, and says whether ``auto`` may take
            ``grad_in_forward``.
    """
    check_config(config)
    config = config or FusedCEConfig()
    comm = VocabParallel.of(tp_group, sequence_parallel, config.merge)
    if isinstance(hidden, Tensor) and isinstance(weight, Tensor):
        hidden, weight = autocast.cast(hidden, weight)
    num_tokens: int | None = None
    error: Exception | None = None
    differentiable = (
        differentiable
        and torch.is_grad_enabled()
        and any(name in DIFFERENTIABLE for name in outputs)
    )
    try:
        num_tokens = check_call(hidden, weight, labels, token_weights, vocab_start, comm.num_parts)
        check_asked(config, weight, comm.size, outputs, differentiable, labels, teacher)
        _check_token_weights(config, token_weights, hidden, weight)
    except (TypeError, ValueError) as bad:
        num_tokens, error = None, bad
    same_head = None
    if num_tokens is not None:
        same_head = (
            *(guard.number, weight.shape, weight.dtype, weight.requires_grad),
            config.logits_backend,
        )
    compared = compares(comm.group, same_head, config.debug_checks)
    of_rank = None if compared else settled(comm.group, same_head)
    logits: LogitsBackend | None = None
    if num_tokens is not None:
        flat = hidden.reshape(num_tokens, hidden.shape[-1])
        asked = logits_backend.Asked(outputs, differentiable, teacher is not None)
        try:
            if of_rank is None:
                here = logits_backend.why_not_here(config, flat, weight)
                of_rank = _facts_of_rank(here, flat, weight, open_grad_weight)
            else:
                here = logits_backend.NOT_ON_EVERY_RANK if of_rank["without_scaled_exp"] else ""
            logits, why_not = logits_backend.choose(config, flat, weight, asked, here)
        except (ValueError, ImportError) as bad:
            num_tokens, error = None, bad
    if compared and comm.group is not None:
        facts = _facts(
            num_tokens, hidden, weight, config, comm, vocab_start, token_weights, uses_in_flight
        )
        if num_tokens is not None:
            bits = sum(2**i for i, name in enumerate(OUTPUT_CHOICES) if name in outputs)
            facts["outputs beside the loss"] = 2 * bits + differentiable
            facts["teacher's classes"] = 0 if teacher is None else teacher.ids.shape[-1]
        vocab_range, num_rows = None, 0
        if num_tokens is not None:
            num_rows = weight.shape[0]
            vocab_range = None if vocab_start is None else (vocab_start, num_rows)
        of_rank = agree(
            comm.group, same_head, facts, of_rank or _NO_FACTS, vocab_range, num_rows, error
        )
        if of_rank["without_scaled_exp"]:
            here = here or logits_backend.NOT_ON_EVERY_RANK
            logits, why_not = logits_backend.choose(config, flat, weight, asked, here)
    elif error is not None:
        raise error
    elif comm.size == 1:
        check_true_vocab_size(config.true_vocab_size, weight.shape[0])
    assert num_tokens is not None and logits is not None and of_rank is not None
    flat, weight = logits_backend.loadable(logits, flat, weight)
    plan = planner.plan(
        planner.PlanInputs.of(
            config,
            num_tokens=num_tokens * comm.num_parts,
            hidden_size=hidden.shape[-1],
            num_rows=largest_shard(comm.group, weight.shape[0]),
            dtype=str(hidden.dtype).removeprefix("torch."),
            num_parts=comm.num_parts,
            tp_size=comm.size,
            wgrad_accumulator=planner.WGRAD_ACCUMULATORS[of_rank["wgrad_accumulator"]],
            token_weights_known=guard.allowed and token_weights is not None and not differentiable,
            logits_backend=logits.name,
            device=_DEVICES[of_rank["device"]],
            uses_in_flight=uses_in_flight,
        )
    )
    chunks = plan_chunks(
        num_tokens,
        comm.num_parts,
        replace(config, num_chunks=plan.num_chunks, chunk_tokens=plan.chunk_tokens),
    )
    weights = None
    if token_weights is not None:
        in_order = _in_token_order(token_weights, labels.dim())
        weights = in_order.detach().reshape(comm.num_parts, -1)
    kept: masked_tokens.Kept | None = None
    if config.skip_masked and weights is not None:
        unmasked = unmasked or masked_tokens.count(weights, comm.group)
        num_kept = num_tokens
        if unmasked is not None:
            num_kept = masked_tokens.num_kept(unmasked.wait(), num_tokens)
        # The plan and the buffers are those of all tokens: the same in every step.
        chunks = first_tokens(chunks, num_kept)
        kept = masked_tokens.Kept.of(weights, num_kept)
        flat, weights = kept.take(flat, comm.part), kept.of_tokens(weights)

    # From here on every rank runs the same collectives.
    if vocab_start is None:
        first_id: int | Tensor = comm.vocab_start(weight.shape[0], hidden.device)
    else:
        first_id = vocab_start
    ids = _in_token_order(labels, labels.dim()).reshape(comm.num_parts, -1).to(torch.int64)
    ids = ids if kept is None else kept.of_tokens(ids)
    local_labels = _local(ids, first_id, config)
    ignored = soft = None
    if teacher is not None:
        k = teacher.ids.shape[-1]
        once = merge_duplicates(
            _in_token_order(teacher.ids, labels.dim()).reshape(-1, k).t().to(torch.int64),
            _in_token_order(teacher.log_probs.detach(), labels.dim()).reshape(-1, k).t().float(),
        )
        shape = (k, comm.num_parts, -1)
        teacher_ids, probs = _local(once.ids, first_id, config).view(shape), once.probs.view(shape)
        if kept is not None:
            teacher_ids, probs = kept.of_tokens(teacher_ids), kept.of_tokens(probs)
        soft = SoftTargets(teacher_ids, probs)
    if config.ignore_index is not None:
        ignored = ids == config.ignore_index
        local_labels.masked_fill_(ignored, -1)
    if weights is not None and plan.strategy == "grad_in_forward":
        weights = weights.to(torch.float32, copy=True)
        if ignored is not None:
            weights.masked_fill_(ignored, 0.0)
    head = Head(
        comm=comm,
        chunks=chunks,
        chunk_capacity=plan.capacity,
        logit_scale=config.logit_scale,
        form=LossForm.of(
            config,
            comm,
            weight.shape[0],
            first_id,
            hidden.device,
            outputs=outputs,
            differentiable=differentiable,
            soft=soft is not None,
        ),
        logits=logits,
        with_argmax=with_argmax,
        vocab_start=first_id,
        open_grad_weight=open_grad_weight,
        token_weights=weights if plan.strategy == "grad_in_forward" else None,
        phases=phases,
        guard=guard,
    )
    needs_grad = torch.is_grad_enabled()
    needs = Needs(needs_grad and hidden.requires_grad, needs_grad and weight.requires_grad)
    strategy = strategy_of(plan.strategy, plan.stored_chunks) if any(needs) else RECOMPUTE
    local_max, local_argmax, *per_token = _FusedLinearCrossEntropy.apply(
        flat, weight, Targets(local_labels, soft), head, strategy, needs
    )
    made = TokenOutputs(*per_token)
    if ignored is not None:
        # Autograd then hands the head an upstream gradient of 0 for them, whatever the caller's is.
        loss, log_prob, *others = made
        at = ignored.flatten()
        loss = loss.masked_fill(at, 0.0)
        log_prob = None if log_prob is None else log_prob.masked_fill(at, 0.0)
        made = TokenOutputs(loss, log_prob, *others)
    if kept is not None:
        made = made.map(partial(kept.put_back, guard=guard))
        if local_max is not None and local_argmax is not None:
            local_max, local_argmax = kept.put_back(local_max), kept.put_back(local_argmax)
    if labels.dim() == 2:
        b, s = labels.shape
        made = made.map(lambda given: given.view(s, b).t().contiguous())
    return HeadOutputs(made, local_max, local_argmax, plan, logits.name, why_not)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Saves, calls the strategy, returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H]
        weight: Tensor,  # [V, H]
        targets: Targets,
        head: Head,
        strategy: Strategy,
        needs: Needs,
    ) -> tuple[Tensor | None, ...]:
        """This shard's largest logits and their columns, then :class:`.TokenOutputs`; each ``[T]``."""
        phases, device = head.phases, hidden.device
        try:
            with (
                torch.autocast(device.type, enabled=False),
                phases.of_pass("forward" if any(needs) else "evaluation", device),
            ):
                out = strategy.forward(head, hidden, weight, targets, needs)
                phases.waits(out.terms, *out.kept_tensors(), *(out.gradients or ()))
        except BaseException:
            head.comm.settle(hidden.device)
            raise
        made = out.outputs.map(torch.flatten)
        row_max = None if out.row_max is None else out.row_max.flatten()
        argmax = None if out.argmax is None else out.argmax.flatten()
        if any(needs):
            # Tensors that wait go through autograd, which frees them with the graph; the gradients
            # that grad_in_forward made are handed over by the first backward.
            kept = out.kept_tensors()
            ctx.head, ctx.strategy = head, strategy
            ctx.gradients = out.gradients
            soft = (None, None) if targets.soft is None else targets.soft
            entropy = out.outputs.entropy if head.form.differentiable else None
            ctx.save_for_backward(hidden, weight, targets.labels, *soft, out.terms, entropy, *kept)
        ctx.set_materialize_grads(False)
        apart = [row_max, argmax, made.predicted, made.correct]
        if not head.form.differentiable:
            apart += [made.log_prob, made.lse, made.entropy]
        ctx.mark_non_differentiable(*(tensor for tensor in apart if tensor is not None))
        return row_max, argmax, *made

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Any, ...]:
        _, _, *upstreams = grads
        upstreams = upstreams[:4]  # no gradient comes for predicted and correct
        if all(given is None for given in upstreams):
            return (None,) * 6
        saved: Any = ctx
        hidden, weight, labels, ids, probs, terms, entropy, last_tokens, *kept = saved.saved_tensors
        chunks = [KeptChunk(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
        waited = Waiting(terms, chunks, last_tokens, saved.gradients)
        saved.gradients = None
        loss, log_prob, lse, grad_entropy = upstreams
        if loss is None:
            loss = terms.new_zeros(labels.shape)
        upstream = Upstream(loss, log_prob, lse, grad_entropy, entropy)
        accumulators = OpenedAccumulators(saved.head.open_grad_weight)
        try:
            with (
                torch.autocast(hidden.device.type, enabled=False),
                saved.head.phases.of_pass("backward", hidden.device),
            ):
                grad_hidden, grad_weight = saved.strategy.backward(
                    replace(saved.head, open_grad_weight=accumulators),
                    hidden,
                    weight,
                    Targets(labels, None if ids is None else SoftTargets(ids, probs)),
                    waited,
                    upstream.map(lambda given: given.float().reshape(labels.shape)),
                    Needs(*saved.needs_input_grad[:2]),
                )
        except BaseException:
            accumulators.abandon()
            saved.head.comm.settle(hidden.device)
            raise
        return grad_hidden, grad_weight, None, None, None, None


def _in_token_order(per_token: Tensor, label_dims: int) -> Tensor:
    """``[s, b, ...]`` or ``[T, ...]`` of a tensor in the labels' shape."""
    return per_token if label_dims == 1 else per_token.transpose(0, 1)


def _local(ids: Tensor, first_id: int | Tensor, config: FusedCEConfig) -> Tensor:
    """Columns of this shard for global ids. No shard has one in the padding that is masked."""
    local = ids - first_id
    if config.true_vocab_size is not None:
        local.masked_fill_(ids >= config.true_vocab_size, -1)
    return local


def _check_token_weights(
    config: FusedCEConfig, token_weights: Tensor | None, hidden: Tensor, weight: Tensor
) -> None:
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if config.strategy == "grad_in_forward" and token_weights is None and needs_grad:
        raise ValueError(
            "strategy 'grad_in_forward' makes the gradients in the forward and needs token_weights, the "
            "weights that the loss will be multiplied by; give them, or use 'store' or 'recompute'"
        )


#: Devices that plans differ on; of ranks with several the last one counts, a GPU that is not in the table.
_DEVICES = ("cpu", *(row.name for row in planner.DEVICES), "")

#: What depends on this rank's machine and memory, and plans on it (see :func:`.vocab_parallel.agree`).
_NO_FACTS = {"device": 0, "wgrad_accumulator": 0, "without_scaled_exp": 0}


def _facts_of_rank(
    why_not_here: str,
    hidden: Tensor,
    weight: Tensor,
    open_grad_weight: OpenGradWeight,
) -> dict[str, int]:
    """This rank's, as numbers of which the largest is right for all: see :data:`_NO_FACTS`."""
    accumulator = kind_of(open_grad_weight) if weight.requires_grad else "none"
    return {
        "device": _DEVICES.index(_device_in_plans(hidden)),
        # In the order of what a plan sets aside for them; "none" is so on all ranks or on none.
        "wgrad_accumulator": planner.WGRAD_ACCUMULATORS.index(accumulator),
        "without_scaled_exp": int(bool(why_not_here)),
    }


def _device_in_plans(hidden: Tensor) -> str:
    if not hidden.is_cuda:
        return "cpu"
    words = torch.cuda.get_device_name(hidden.device).split()
    return next((name for name in _DEVICES[1:-1] if name in words), "")


def _facts(
    num_tokens: int | None,
    hidden: Tensor,
    weight: Tensor,
    config: FusedCEConfig,
    comm: VocabParallel,
    vocab_start: int | None,
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
        "logits_backend",
        "uses_in_flight",
        "merge",
        "logit_softcap (bits)",
        "z_loss (bits)",
        "label_smoothing (bits)",
        "label_smoothing_form",
        "ignore_index",
        "true_vocab_size",
        "logit_precision",
        "skip_masked",
        "outputs beside the loss",
        "teacher's classes",
    )
    if num_tokens is None:
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
        LOGITS_BACKEND_CHOICES.index(config.logits_backend),
        uses_in_flight,
        MERGE_CHOICES.index(config.merge),
        _bits(config.logit_softcap or 0.0),
        _bits(config.z_loss),
        _bits(config.label_smoothing),
        SMOOTHING_FORM_CHOICES.index(config.label_smoothing_form),
        -(2**62) if config.ignore_index is None else config.ignore_index,
        config.true_vocab_size or 0,
        LOGIT_PRECISION_CHOICES.index(config.logit_precision),
        int(config.skip_masked),
        0,
        0,
    )
    return dict(zip(names, values, strict=True))


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")
