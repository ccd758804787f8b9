"""TODO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig, takes_config
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call
from megatron_fused_ce.ops.arguments import temperature_of
from megatron_fused_ce.ops.several_labels import SeveralLabels


@takes_config
def fused_linear_topk_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    loss: str = "cross_entropy",
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross entropy ``-sum q log p`` against a teacher's ``k`` likeliest classes, or their KL.

    ``q = exp(teacher_log_probs)`` as given, ``p`` the student's probabilities over the whole vocabulary, at
    ``temperature``.
    Entries with one id add up. The mass missing from ``q`` (``1 - sum q``, and entries of ids outside the
    vocabulary) is ignored: the loss is ``(sum q) * lse - sum q s``, 0 for a token without any entry. For the
    mean over the teacher's own top k hand in log-probabilities that sum up to 1.

    Args:
        teacher_ids: ``[b, s, k]`` (for ``hidden`` of three dimensions) or ``[T, k]``, int64 or int32, global
            ids, the same on every rank. ``-1`` marks an empty entry.
        teacher_log_probs: the same shape, float; no gradient flows into it.
        loss: ``cross_entropy``, or ``kl``: ``sum q (log q - log p)`` entry by entry, which has the same
            gradient. It is no divergence where ``sum q`` is below 1, and can be negative (verl clamps it at
            0).
        temperature: the student's; ``teacher_log_probs`` are those of the teacher's own. As for
            :func:`.rl.token_log_probs`; no factor ``temperature**2``.
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
        temperature = temperature_of(temperature, labels.shape)
    else:
        kinds = type(teacher_ids).__name__, type(teacher_log_probs).__name__
        wrong = TypeError(f"teacher_ids and teacher_log_probs must be tensors, got {' and '.join(kinds)}")
    if loss not in ("cross_entropy", "kl"):
        wrong = ValueError(f"loss is {loss!r}; choose cross_entropy or kl")
    head = linear_cross_entropy(
        Call(
            hidden,
            weight,
            labels,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            token_weights=token_weights,
            vocab_start=vocab_start,
            config=DEFAULT_CONFIG if config is None else config,
            temperature=temperature,
            other_targets=SeveralLabels(teacher_ids, teacher_log_probs, kl=loss == "kl"),
            caller_error=wrong,
        )
    )
    return head.loss
