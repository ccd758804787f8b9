"""Distillation: the divergence of a student's probabilities from a frozen teacher's, without logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig, changed, why_no_config
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, takes_config
from megatron_fused_ce.ops.arguments import (
    sequence_first,
    temperature_of,
    why_no_layout,
    why_no_mask,
    why_wrong_entropy,
    widened,
)
from megatron_fused_ce.ranks.collectives import VocabParallel


class DistillationOutputs(NamedTuple):
    """Results for each token, fp32, in the labels' shape.

    The loss alone has a gradient, and without ``label_weights`` the divergence, which is then the same. A
    backward through another of the student's raises ``RuntimeError``: ``detach()`` it in a metric.
    """

    loss: Tensor  # divergence + label_weights * cross_entropy
    divergence: Tensor
    cross_entropy: Tensor | None  # the student's of the label, at temperature 1; with labels
    teacher_cross_entropy: Tensor | None  # the teacher's
    entropy: Tensor | None  # the student's at the temperature, if asked for


@takes_config
def fused_linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    labels: Tensor | None = None,
    label_weights: float | Tensor | None = None,
    entropy: str = "none",
    reduce_grad_hidden: bool = True,
    teacher_logit_scale: float = 1.0,
    teacher_logit_softcap: float | None = None,
    teacher_sequence_parallel: bool | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    batch_first: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> DistillationOutputs:
    """Divergence of the student's probabilities from a frozen teacher's, over the whole vocabulary.

    The same as::

        p_s = softmax(hidden @ weight.T / temperature)                   # over all ranks' rows
        p_t = softmax(teacher_hidden @ teacher_weight.T / temperature)
        forward_kl: sum p_t log(p_t / p_s)
        reverse_kl: sum p_s log(p_s / p_t)
        jsd:        beta * KL(p_t || m) + (1 - beta) * KL(p_s || m),  m = (1 - beta) * p_s + beta * p_t

    but in chunks: the teacher's logits live for one chunk and are never saved. No factor ``temperature**2``.
    Differentiable in ``hidden`` and ``weight``, once, for any upstream gradient per token. It takes four
    GEMMs (``store``, ``grad_in_forward``) or six (``recompute``). For a teacher's ``k`` likeliest classes
    alone: :func:`fused_linear_topk_distillation`.

    Args:
        teacher_hidden: ``[s, b, H_t]`` or ``[T, H_t]``, of the same tokens, float32, bfloat16 or float16,
            without a gradient. What a backward reads of them is copied (``recompute``, a broken promise).
        teacher_weight: ``[V_t, H_t]``, the dtype of ``teacher_hidden``: this rank's rows of the same cut of
            the vocabulary as ``weight``. Padding rows may differ in number, with ``config.true_vocab_size``.
            A change in place before the backward raises, but one that autograd does not see, such as a
            collective into it or one through ``.data``, makes the gradients wrong.
        divergence: ``forward_kl``, ``reverse_kl`` or ``jsd``.
        beta: of ``jsd``, between 0 and 1.
        temperature: a number, or a tensor without dimensions, of both sides, after scale and softcap.
        labels: ``[b, s]`` or ``[T]``, global ids, for the cross-entropies, which are at temperature 1; as for
            :func:`fused_linear_cross_entropy`. Tokens labelled ``config.ignore_index`` have a loss, a
            divergence and cross-entropies of 0 without a gradient; their entropy is as if they had another.
        label_weights: a number, or floats in the labels' shape without a gradient: the loss is
            ``divergence + label_weights * cross_entropy``, for no GEMM more.
        entropy: ``none``, or ``detached`` for the student's beside the loss, without a gradient.
        reduce_grad_hidden: as for :func:`.rl.token_log_probs`.
        teacher_logit_scale, teacher_logit_softcap: the teacher's; ``config`` has the student's.
        teacher_sequence_parallel: whether each rank holds its own part of the teacher's tokens; None: as for
            the student's.

    The other arguments are those of :func:`fused_linear_cross_entropy`; label smoothing and z-loss are
    refused.

    Returns:
        :class:`DistillationOutputs`.

    Raises:
        TypeError, ValueError, beside those: a teacher that does not fit, requires a gradient, or holds other
        classes on a rank.

    Collectives: those of :func:`fused_linear_cross_entropy`, whose statistics are both sides' (with labels at
    a temperature other than 1 twice as many), each at the end of its chunk; with sequence parallelism the
    all-gather of a chunk of ``teacher_hidden`` wherever its logits are made (``[T, H_t]`` at once where the
    student's tokens are not split); per chunk of ``reverse_kl`` and ``jsd`` with a gradient a SUM all-reduce
    ``[C]``; after the last chunk one of ``[T]``. At a head's first call a MAX all-reduce of an int64 more.

    Source: generalized Jensen-Shannon divergence and on-policy distillation, Agarwal et al. 2024
    (arXiv:2306.13649); gradients and how the sums are kept from cancelling: docs/math.md.
    """
    hidden, teacher_hidden = (sequence_first(of_side, batch_first) for of_side in (hidden, teacher_hidden))
    wrong: Exception | None = why_wrong_entropy(entropy, ("none", "detached"))
    with_entropy = entropy == "detached"
    given_labels = labels
    if labels is None:
        labels = hidden  # for the error alone
        if isinstance(hidden, Tensor) and hidden.dim() in (2, 3):
            group = tp_group if isinstance(tp_group, dist.ProcessGroup) else None
            parts = VocabParallel.of(group, sequence_parallel).num_parts
            tokens = (hidden.shape[0] * parts, *hidden.shape[1:-1])
            none = -2 if getattr(config, "ignore_index", None) == -1 else -1
            labels = torch.full(tokens[::-1], none, dtype=torch.int64, device=hidden.device)
    if isinstance(label_weights, (int, float)):
        label_weights = float(label_weights)
    elif label_weights is not None and not isinstance(label_weights, Tensor):
        wrong = TypeError(f"label_weights is {label_weights!r:.60}; expected a number or a tensor")
        label_weights = None
    if getattr(config, "skip_masked", False) and token_weights is None:
        wrong = ValueError(
            "skip_masked leaves out the tokens whose token_weights are 0, and none are given: give them, 0 "
            "for tokens that need nothing, or leave skip_masked out"
        )
    of_labels = () if given_labels is None else ("log_prob", "teacher_log_prob")
    split = sequence_parallel if teacher_sequence_parallel is None else teacher_sequence_parallel
    outputs = linear_cross_entropy(
        Call(
            hidden,
            weight,
            labels,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            token_weights=token_weights,
            vocab_start=vocab_start,
            config=DEFAULT_CONFIG if config is None else config,
            outputs=("divergence", *of_labels, *(("entropy",) if with_entropy else ())),
            other_targets=Distillation(
                teacher_hidden,
                teacher_weight,
                label_weights,
                divergence,
                beta,
                teacher_logit_scale,
                teacher_logit_softcap,
                split and tp_group is not None,
                given_labels is not None,
            ),
            temperature=temperature_of(temperature, ()),
            reduce_grad_hidden=reduce_grad_hidden,
            caller_error=wrong,
        )
    ).outputs
    loss, made = outputs["loss"], outputs["divergence"]
    return DistillationOutputs(
        loss,
        made if label_weights is None else _Constant.apply(loss, "divergence", made),
        _Constant.apply(loss, "cross_entropy", -outputs["log_prob"]) if of_labels else None,
        -outputs["teacher_log_prob"] if of_labels else None,
        _Constant.apply(loss, "entropy", outputs["entropy"]) if with_entropy else None,
    )


class _Constant(torch.autograd.Function):
    """A result without a gradient, whose backward raises: a sum with the loss would lose it without a word.

    An upstream gradient of 0 it takes: a reentrant checkpoint asks for the gradients of all its results.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, name: str, result: Tensor) -> Tensor:
        ctx.name = name
        return result.data  # not a view, which nobody could change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if grad.any():
            raise RuntimeError(
                f"{ctx.name} of fused_linear_distillation has no gradient"
                + (" beside label_weights" if ctx.name == "divergence" else "")
                + ": differentiate loss, which is divergence + label_weights * cross_entropy, and detach() "
                "the others"
            )
        return None, None, None


@takes_config
def token_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    divergence: str = "reverse_kl",
    temperature: float | Tensor = 1.0,
    active_mask: Tensor | None = None,
    batch_first: bool | None = None,
    **options: Any,
) -> DistillationOutputs:
    """:func:`.fused_linear_distillation` by the names of on-policy distillation: the divergence of the
    student from its teacher at each token that the student has sampled, over the whole vocabulary.

    Args:
        student_hidden, student_weight: its ``hidden`` and ``weight``. Half-precision hidden states of either
            side with an fp32 weight are cast to fp32.
        divergence: ``reverse_kl`` (KL(p_s || p_t)), ``forward_kl`` or ``jsd``.
        active_mask: bool, ``[b, s]`` or ``[T]``, the same on every rank: tokens outside it take part in no
            GEMM of either side, and their results are 0. It goes to the head as token weights, so that with
            ``token_weights`` those tokens are left out too whose weight is 0.
        batch_first: whether hidden states of three dimensions are ``[b, s, H]``, not ``[s, b, H]``, on both
            sides, which must be said: no label would show a mistake. Labels and results are ``[b, s]``.
        options: the other arguments of :func:`.fused_linear_distillation`.

    Returns, raises, collectives: those of :func:`.fused_linear_distillation`.

    Source: on-policy distillation, Agarwal et al. 2024 (arXiv:2306.13649).
    """
    if (wrong := why_no_layout("student_hidden", student_hidden, batch_first)) is not None:
        raise wrong
    student, teacher = widened(student_hidden, student_weight), widened(teacher_hidden, teacher_weight)
    if active_mask is not None:
        weights = options.get("token_weights")
        shape = getattr(weights, "shape", getattr(active_mask, "shape", ()))
        if (wrong := why_no_mask(active_mask, shape)) is not None:
            raise wrong
        mask = active_mask.to(student.device).float()
        options["token_weights"] = mask if weights is None else mask * weights
        config = options.get("config")
        if why_no_config(config) is None:
            options["config"] = changed(DEFAULT_CONFIG if config is None else config, skip_masked=True)
    return fused_linear_distillation(
        student, student_weight, teacher, teacher_weight, divergence=divergence, temperature=temperature,
        batch_first=bool(batch_first), **options,
    )  # fmt: skip
