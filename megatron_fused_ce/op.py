"""The op: per-token cross-entropy of ``hidden @ weight.T`` without the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import masked_tokens, planner
from megatron_fused_ce.autograd import FusedLinearCrossEntropy
from megatron_fused_ce.call import Arguments, CallSpec, spec_of
from megatron_fused_ce.chunking import first_tokens
from megatron_fused_ce.config import FusedCEConfig, takes_config
from megatron_fused_ce.kernels.records import SoftTargets
from megatron_fused_ce.loop import Targets
from megatron_fused_ce.loss_form import TeacherTargets, merge_duplicates
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.pipeline import Context
from megatron_fused_ce.token_outputs import TokenOutputs, differentiable_of
from megatron_fused_ce.vocab_parallel import VocabParallel, raise_if_any


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`."""

    outputs: TokenOutputs  # the labels' shape
    local_max: Tensor | None  # fp32 [T] in token order (s-major): this shard's largest logit
    local_argmax: Tensor | None  # int64 [T]: its row in this shard
    plan: planner.Plan  # strategy and chunks of this call
    logits_backend: str  # the one that was used
    why_not_scaled_exp: str  # empty if it was used

    @property
    def loss(self) -> Tensor:
        return self.outputs.loss


Result = TypeVar("Result")


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
        loss = cross_entropy(logits.float().flatten(0, 1), labels.T.flatten(), reduction="none")
        loss = loss.view(s, b).T

    but in chunks: ``recompute`` holds one chunk ``[C, V]`` of logits, ``store`` keeps all of them until the
    backward. Differentiable in ``hidden`` and ``weight``, once, for any upstream gradient per token.

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
        tp_group: the tensor-parallel group; None if this rank holds the whole vocabulary.
        sequence_parallel: each rank of the group holds its own part of the tokens.
        token_weights: in the labels' shape. A promise that the upstream gradient will be a scalar times
            these, which lets ``grad_in_forward`` make the gradients in the forward; never changes the loss.
            For any other upstream gradient the backward makes them again, with a warning, and later calls of
            a head of this shape do without the promise. Tokens of weight 0 that ``config.skip_masked``
            leaves out are another matter: an upstream gradient for one raises there.
        vocab_start: first global id of this rank's rows; None: the sum of the sizes of the shards before it.
        config: chunking, strategy and the rest; None for the defaults.

    Returns:
        fp32 loss in the labels' shape.

    Raises:
        TypeError, ValueError: an argument does not fit. Raised on every rank if the ranks compare the call:
        at the first call of each head over a group (a head is identified by its model, shape, dtype and
        ``requires_grad`` of its weight, and ``logits_backend``), and at every call with
        ``config.debug_checks`` or after unequal shards.

    Collectives, all over ``tp_group`` (R > 1). Once per call: the agreement check (a head's first call
    only; every call once shards of unequal sizes were seen), the MAX all-reduce of an int64
    (``skip_masked``), the all-gather of sampled rows of the weight (where the scaled-exp GEMM serves). Per
    chunk of the forward: all-gather of hidden states (sequence parallelism); the merge of the statistics, one
    all-gather or a MAX and a SUM all-reduce (``config.merge``). Per chunk of the backward: all-gather of
    hidden states (sequence parallelism, if a GEMM needs them; the first chunk's are still there), one
    reduce-scatter of ``grad_hidden`` (sequence parallelism) or one all-reduce. With ``grad_in_forward`` this
    reduction is in the forward; the backward begins with a MAX all-reduce of one int64 (of three with
    ``skip_masked``, which has it with every strategy), and has the rest where the promise is broken. Their
    order: :mod:`.loop`; the same on every rank.

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
    """:func:`fused_linear_cross_entropy` with more outputs for each token, without the logits.

    Args:
        outputs: names among ``log_prob``, ``lse``, ``entropy``, ``predicted``, ``correct``,
            ``sum_p_squared``; :class:`.TokenOutputs` defines them; in the labels' shape. A token labelled
            ``config.ignore_index`` has ``log_prob`` 0 without a gradient; its other outputs are as if it had
            another label.
        differentiable: whether ``log_prob``, ``lse`` and ``entropy`` carry gradients, each for any upstream
            of its own. They then need a strategy other than ``grad_in_forward``, which cannot know those
            upstreams.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; ``entropy``,
    ``sum_p_squared`` and ``predicted`` each add a float a token to the merge of the statistics
    (``predicted`` with ``merge="all_reduce"``: a MIN all-reduce ``[C]``).

    Returns:
        the loss and the requested outputs; None for the others.

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
        differentiable=differentiable_of(outputs) if differentiable else (),
        caller_error=_wrong_outputs(outputs),
    )
    return head.outputs


def _wrong_outputs(outputs: Sequence[str]) -> TypeError | None:
    if not isinstance(outputs, str):
        return None
    return TypeError(f"outputs is the string {outputs!r}; expected a sequence of names, ({outputs!r},)")


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
    Entries with one id add up. The mass missing from ``q`` (``1 - sum q``, and entries of ids outside the
    vocabulary) is ignored: the loss is ``(sum q) * lse - sum q s``, 0 for a token without any entry. For the
    mean over the teacher's own top k hand in log-probabilities that sum up to 1.

    Args:
        teacher_ids: ``[b, s, k]`` (for ``hidden`` of three dimensions) or ``[T, k]``, int64 or int32, global
            ids, the same on every rank. ``-1`` marks an empty entry.
        teacher_log_probs: the same shape, float; no gradient flows into it.
        config: as for :func:`fused_linear_cross_entropy`; label smoothing and ``ignore_index`` do not apply
            and are refused.

    The other arguments, errors and collectives: as there; the merge has two floats a token more.

    Returns:
        fp32 loss ``[b, s]`` or ``[T]``; differentiable in ``hidden`` and ``weight``.

    Source: d loss / d s_j = (sum q) p_j - q_j; docs/math.md.
    """
    wrong: Exception | None = None
    labels = teacher_ids  # for the error alone
    if isinstance(teacher_ids, Tensor) and isinstance(teacher_log_probs, Tensor):
        if isinstance(hidden, Tensor) and teacher_ids.dim() != hidden.dim():
            wrong = ValueError(
                f"teacher_ids are {tuple(teacher_ids.shape)} for hidden {tuple(hidden.shape)}; expected "
                "[b, s, k] for hidden [s, b, H], or [T, k] for [T, H]"
            )
        labels = teacher_ids.new_full(teacher_ids.shape[:-1], -1, dtype=torch.int64)  # none
    else:
        kinds = type(teacher_ids).__name__, type(teacher_log_probs).__name__
        wrong = TypeError(f"teacher_ids and teacher_log_probs must be tensors, got {' and '.join(kinds)}")
    head: HeadOutputs = linear_cross_entropy(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
        teacher=TeacherTargets(teacher_ids, teacher_log_probs),
        caller_error=wrong,
    )
    return head.loss


@torch.compiler.disable
def linear_cross_entropy(*args: Any, **kwargs: Any) -> HeadOutputs:
    """The functions above and the Megatron adapter's calls: evaluates a head.

    Args:
        args, kwargs: the fields of :class:`.call.Arguments`.

    Returns:
        the outputs for each token, this shard's largest logits where asked for, the plan and the logits
        backend.

    Errors and collectives: those of :func:`fused_linear_cross_entropy`.
    """
    return on_its_device(Arguments(*args, **kwargs).completed(), _evaluate)


def on_its_device(args: Arguments, evaluate: Callable[[Arguments], Result]) -> Result:
    """``evaluate(args)`` with the device of ``args.hidden`` as the current one.

    Triton's launches and the collectives' streams are the current device's. Autograd's thread for a backward
    sees to it by itself.
    """
    if getattr(args.hidden, "is_cuda", False) and args.hidden.get_device() != torch.cuda.current_device():
        with torch.cuda.device(args.hidden.device):
            return evaluate(args)
    return evaluate(args)


def _evaluate(args: Arguments) -> HeadOutputs:
    spec = spec_of(args)
    # From here on every rank runs the same collectives.
    if args.config.debug_checks:
        _check_numbers(args, spec.comm)
    inv_temperature = inv_temperature_of(args, spec.comm)
    kept, chunks = _kept(args, spec), spec.chunks
    if kept is not None:
        # The plan and the buffers are those of all tokens: the same in every step.
        chunks = first_tokens(chunks, kept.tokens.shape[1])
    context = Context(spec, chunks, args.open_grad_weight)
    targets = _targets(args, spec, kept, inv_temperature)
    in_batch = tuple(args.labels.shape) if args.labels.dim() == 2 else None
    local_max, local_argmax, *per_token = FusedLinearCrossEntropy.apply(
        args.hidden, args.weight, targets, context, kept, in_batch
    )
    return HeadOutputs(
        *(TokenOutputs(*per_token), local_max, local_argmax, spec.plan, spec.logits.name),
        spec.why_not_scaled_exp,
    )


def _check_numbers(args: Arguments, comm: VocabParallel) -> None:
    """Raise on every rank for numbers that make no loss anybody means; the host waits.

    Collectives: those of :func:`.vocab_parallel.raise_if_any`, with token weights and with a teacher.
    """
    if args.token_weights is not None:
        raise_if_any(args.token_weights.isnan().any(), "token_weights have a NaN; give 0 or more", comm.group)
    if args.teacher is not None:
        ids, log_probs = args.teacher
        words = "teacher_log_probs are above 0: expected logarithms of probabilities"
        raise_if_any(((ids >= 0) & (log_probs > 0)).any(), words, comm.group)


def inv_temperature_of(args: Arguments, comm: VocabParallel) -> Tensor | None:
    """The inverse of a temperature per token, ``[parts, n]`` fp32; None for a single temperature.

    Collectives: those of :func:`.vocab_parallel.raise_if_any`, with a temperature per token.
    """
    if not isinstance(args.temperature, Tensor):
        return None
    inverse = args.temperature.detach().double().reciprocal().float()
    wrong = ~(torch.isfinite(inverse) & (inverse > 0)).all()
    words = "temperatures are not all above 0 and finite; give a token that does not count the temperature 1"
    raise_if_any(wrong, words, comm.group)
    return in_token_order(inverse, args, comm.num_parts)


def _kept(args: Arguments, spec: CallSpec) -> Kept | None:
    """The tokens to work on, where those of weight 0 are skipped; else None.

    Collectives: :func:`.masked_tokens.count`'s, here or earlier if ``args.unmasked`` was given.
    """
    if not args.config.skip_masked or args.token_weights is None:
        return None
    weights = in_token_order(args.token_weights.detach(), args, spec.comm.num_parts)
    unmasked = args.unmasked or masked_tokens.count(weights, spec.comm.group)
    num_kept = spec.num_tokens
    if unmasked is not None:
        num_kept = masked_tokens.num_kept(unmasked.read()[0], spec.num_tokens)
    return Kept.of(weights, num_kept)


def _targets(args: Arguments, spec: CallSpec, kept: Kept | None, inv_temperature: Tensor | None) -> Targets:
    """Columns of this shard for the labels or the teacher's targets, in token order."""
    config, parts = args.config, spec.comm.num_parts
    ids = in_token_order(args.labels, args, parts).to(torch.int64)
    labels = _local(ids, spec, config)
    ignored = None
    if config.ignore_index is not None:
        ignored = ids == config.ignore_index
        labels = labels.masked_fill(ignored, -1)
    elif any(spec.needs_grad) and labels.data_ptr() == args.labels.data_ptr():
        labels = labels.clone()  # whose caller may refill its buffer before the backward
    weights = None
    if args.token_weights is not None and spec.plan.strategy == "grad_in_forward":
        weights = in_token_order(args.token_weights.detach(), args, parts).float()
        if ignored is not None:
            weights = weights.masked_fill(ignored, 0.0)
    soft = None if args.teacher is None else _soft_targets(args, args.teacher, spec)
    targets = Targets(labels, soft, ignored, weights, inv_temperature)
    return targets if kept is None else targets.of(kept)


def _soft_targets(args: Arguments, teacher: TeacherTargets, spec: CallSpec) -> SoftTargets:
    k, parts = teacher.ids.shape[-1], spec.comm.num_parts
    ids, log_probs = (
        (part if part.dim() == 2 else part.transpose(0, 1)).reshape(-1, k).t()
        for part in (teacher.ids.to(torch.int64), teacher.log_probs.detach().float())
    )
    once = merge_duplicates(ids, log_probs)
    local = _local(once.ids, spec, args.config).view(k, parts, -1)
    return SoftTargets(local, once.probs.view(k, parts, -1))


def in_token_order(per_token: Tensor, args: Arguments, num_parts: int) -> Tensor:
    """``[parts, n]``, s-major, of a tensor in the labels' shape."""
    if args.labels.dim() == 2 and per_token.shape[0] > 1:
        per_token = per_token.t()
    return per_token.reshape(num_parts, -1)


def _local(ids: Tensor, spec: CallSpec, config: FusedCEConfig) -> Tensor:
    """Columns of this shard for global ids. No shard has one in the padding that is masked."""
    # Of several ranks the first subtracts too: all run the same operators.
    whole = spec.comm.size == 1 and spec.vocab_start == 0
    local = ids.contiguous() if whole else ids - spec.vocab_start
    if config.true_vocab_size is not None:
        local = local.masked_fill(ids >= config.true_vocab_size, -1)
    return local
