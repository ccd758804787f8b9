"""Log-probabilities and entropy of given tokens, for reinforcement learning."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig, changed, why_no_config
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, takes_config
from megatron_fused_ce.ops.arguments import (
    sequence_first,
    temperature_of,
    why_no_mask,
    why_wrong_entropy,
    widened,
)
from megatron_fused_ce.ops.labels import has_several_labels, with_several_labels


class TokenLogProbs(NamedTuple):
    """Results for each token, fp32, in the labels' shape."""

    log_prob: Tensor
    entropy: Tensor | None = None  # None if not requested


class LogProbOptions(TypedDict, total=False):
    """Arguments of :func:`token_log_probs` that say what to compute; absent ones have its defaults."""

    temperature: float | Tensor
    entropy: str
    zero_unknown: bool
    active_mask: Tensor | Literal["loss_mask"] | None
    config: FusedCEConfig | None


@takes_config
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: str = "none",
    zero_unknown: bool = False,
    active_mask: Tensor | None = None,
    batch_first: bool | None = None,
    reduce_grad_hidden: bool = True,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> TokenLogProbs:
    """Log-probability and entropy of each token, one sequence chunk at a time.

    It computes, chunk by chunk::

        logits = hidden @ weight.T / temperature          # over all ranks' rows: [s, b, sum of V]
        log_p = logits.float().log_softmax(-1)
        log_prob = log_p.gather(-1, labels.T[..., None])[..., 0].T
        entropy = -(log_p.exp() * log_p).sum(-1).T

    If gradients are enabled, the results are differentiable in ``hidden`` and ``weight``, for any upstream
    gradient per token; under ``torch.no_grad`` the forward runs alone and saves nothing.

    Labels may be K per token, ``[b, s, K]`` or ``[T, K]``: a rollout's candidates, or a teacher's likeliest
    classes. ``log_prob`` then has their shape, and each entry takes any upstream gradient. A loss
    ``-(q * log_prob).sum(-1)`` must leave out entries of -inf, whose product with ``q = 0`` is NaN.

    Args:
        hidden, weight, labels, tp_group, sequence_parallel, vocab_start, config: as for
            :func:`.fused_linear_cross_entropy`; the caller has shifted the labels. Hidden states in bf16 or
            fp16 with an fp32 weight are cast to fp32 (``4 * H`` bytes a token; GEMMs, gathers and sums of
            ``grad_hidden`` are then fp32); no other pair of dtypes is served. ``config.skip_masked`` skips
            tokens labelled ``config.ignore_index``, as ``active_mask`` does.
            Of K labels (at most 32768) -1 is an empty entry, with log-probability ``-inf`` and no gradient;
            any other id outside the vocabulary is treated as a single label is. Upstream gradients of an id
            given twice add up. The row kernels serve, and logits are fp32 (``4 * V`` bytes a token that
            ``store`` keeps) unless ``config.logit_precision`` is ``activations``. ``ignore_index`` is
            refused, and so is ``skip_masked`` without an ``active_mask``.
        temperature: a number, a tensor without dimensions (the host waits), one per sequence, ``[b]``
            beside labels ``[b, s]``, or one per token, in the labels' shape; the same on every rank. It
            divides the logits in fp32, after ``config``'s scale and softcap, never the hidden states. No
            gradient flows into a tensor.
        entropy: ``none``, ``detached`` (without a gradient) or ``differentiable``; for the last the strategy
            ``auto`` is ``recompute`` (:func:`unrounded`).
        zero_unknown: whether a label outside the vocabulary has log-probability 0, as in SkyRL and NeMo-RL;
            if not, it has that of the largest logit. Its gradient is ``-softmax`` either way. A token
            labelled ``config.ignore_index`` has log-probability 0 without a gradient, and its own entropy.
        active_mask: bool, ``[b, s]`` or ``[T]``, the same on every rank. Tokens outside it (prompts, tool
            output, padding) take part in no GEMM of either pass: their results are all 0, without a gradient.
            The host waits for the number of tokens inside (:mod:`.head.tokens`).
        batch_first: True if hidden states of three dimensions are ``[b, s, H]``; None and False say that they
            are ``[s, b, H]``. Labels are ``[b, s]`` in both cases.
        reduce_grad_hidden: whether the backward sums ``grad_hidden`` over ``tp_group``. False leaves this
            rank's part, for a caller who gathered the hidden states and whose backward sums them; not with
            ``sequence_parallel``.

    Returns:
        fp32 log-probability and, where asked for, entropy.

    Raises:
        TypeError, ValueError: an argument does not fit; raised on every rank as for
            :func:`.fused_linear_cross_entropy`. Every call checks, on every rank, the values of a temperature
            per token, for which the host waits, and that the ranks' active masks are equal.
        RuntimeError: in the backward, on every rank: a token outside ``active_mask`` has an upstream gradient
            that is finite and not 0. If it is inf or NaN, so are the gradients.

    Collectives: those of :func:`.fused_linear_cross_entropy`; with a temperature per token a MAX all-reduce
    of an int64 before them, once per call; with entropy the merge has a float a token more; no reduction of
    ``grad_hidden`` if the caller sums it. With K labels a MAX all-reduce of fp32 ``[C, K]`` follows the
    first GEMM of each chunk.

    Source: d log p_y = ([j = y] - p_j) / t, d entropy = -p_j (log p_j + entropy) / t: docs/math.md.
    """
    return log_probs_of_head(
        sequence_first(hidden, batch_first), weight, labels, temperature=temperature, entropy=entropy,
        zero_unknown=zero_unknown, active_mask=active_mask, config=config, tp_group=tp_group,
        reduce_grad_hidden=reduce_grad_hidden, sequence_parallel=sequence_parallel, vocab_start=vocab_start,
    )  # fmt: skip


def log_probs_of_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    entropy: str = "none",
    active_mask: Tensor | None = None,
    config: FusedCEConfig | None = None,
    **of_call: Any,
) -> TokenLogProbs:
    """Evaluate :func:`token_log_probs` with more fields of :class:`.call.Call`, such as ``head``."""
    several = has_several_labels(hidden, labels)
    if isinstance(labels, Tensor):
        of_call["temperature"] = temperature_of(
            of_call.get("temperature", 1.0), labels.shape[: labels.dim() - several]
        )
    if entropy == "differentiable" and not several:
        config = unrounded(config)
    active, wrong = _active(labels, active_mask, config, several)
    if active is not None:
        config = changed(DEFAULT_CONFIG if config is None else config, skip_masked=True)
    if several and isinstance(config, FusedCEConfig) and (config.z_loss or config.label_smoothing):
        config = changed(config, z_loss=0.0, label_smoothing=0.0)  # options of the loss do not count
    call = Call(
        widened(hidden, weight), weight, labels, token_weights=active,
        config=DEFAULT_CONFIG if config is None else config,
        outputs=("log_prob",) if entropy == "none" else ("log_prob", "entropy"),
        differentiable=("log_prob", "entropy") if entropy == "differentiable" else ("log_prob",),
        caller_error=why_wrong_entropy(entropy) or wrong, **of_call,
    )  # fmt: skip
    if several:
        call = with_several_labels(call)
    made = linear_cross_entropy(call).outputs
    return TokenLogProbs(made["log_prob"], made.get("entropy"))


def _active(
    labels: Tensor, mask: Tensor | None, config: FusedCEConfig | None, several: bool = False
) -> tuple[Tensor | None, ValueError | None]:
    """Token weights by which ``skip_masked`` skips tokens, or None; and the error if something is wrong."""
    if not isinstance(labels, Tensor) or why_no_config(config) is not None:
        return None, None  # the head reports this
    if mask is not None:
        shape = labels.shape[: labels.dim() - several]
        if (wrong := why_no_mask(mask, shape)) is not None:
            return None, wrong
        mask = mask.to(labels.device)
    if config is not None and config.skip_masked and not several:
        if config.ignored_label is not None:
            known = labels.long().ne(config.ignored_label)
            mask = known if mask is None else mask & known
        elif mask is None:
            return None, ValueError(
                "skip_masked leaves out the tokens labelled ignore_index, and config has none: give "
                "active_mask, or FusedCEConfig(skip_masked=True, ignore_index=-100) and that label to tokens "
                "that need nothing"
            )
    return (None if mask is None else mask.float()), None


def unrounded(config: FusedCEConfig | None) -> FusedCEConfig:
    """``config`` for an entropy with a gradient: ``recompute``, unless it names strategy or precision.

    For such an entropy the other strategies save rounded logits with the scaled-exp GEMM. Log-probabilities
    would then differ from those of a pass without gradients, which rounds nothing.
    """
    config = DEFAULT_CONFIG if config is None else config
    if not isinstance(config, FusedCEConfig):
        return config  # the head reports this
    named = (config.strategy, config.logit_precision) != ("auto", "auto")
    return config if named else changed(config, strategy="recompute")
