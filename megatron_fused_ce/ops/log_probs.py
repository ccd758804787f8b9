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
    """Log-probabilities of given tokens, fp32, in the labels' shape; None if not requested."""

    log_prob: Tensor
    entropy: Tensor | None = None


class LogProbOptions(TypedDict, total=False):
    """The arguments of :func:`token_log_probs` that say what is computed; absent ones have its defaults."""

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

    The same as::

        logits = hidden @ weight.T / temperature          # over all ranks' rows: [s, b, sum of V]
        log_p = logits.float().log_softmax(-1)
        log_prob = log_p.gather(-1, labels.T[..., None])[..., 0].T
        entropy = -(log_p.exp() * log_p).sum(-1).T

    but in chunks. Differentiable in ``hidden`` and ``weight`` for any upstream gradient per token, where
    gradients are enabled; under ``torch.no_grad`` the forward runs alone and saves nothing.

    With K labels a token, ``[b, s, K]`` or ``[T, K]``, ``log_prob`` has their shape, and each of them any
    upstream gradient: a rollout's candidates, or a teacher's likeliest classes, whose loss is ``-(q *
    log_prob).sum(-1)`` (q 0 where ``log_prob`` is -inf: give 0, not the product).

    Args:
        hidden, weight, labels, tp_group, sequence_parallel, vocab_start, config: as for
            :func:`.fused_linear_cross_entropy`; labels are those of the tokens, shifted by the caller.
            Hidden states in bf16 or fp16 with an fp32 weight are cast to fp32 (``4 * H`` bytes a token;
            products, gathers and sums of ``grad_hidden`` are fp32 then); no other pair of dtypes is served.
            With ``config.skip_masked`` tokens labelled ``config.ignore_index`` are left out as by
            ``active_mask``.
            K labels (up to 32768): -1 is an empty entry, with log-probability ``-inf`` and no gradient;
            another id outside the vocabulary as one label's; upstream gradients of an id given twice add up.
            Logits are fp32 (``4 * V`` bytes a token that ``store`` keeps) unless ``config.logit_precision``
            is ``activations``, and the row kernels run. ``ignore_index``, and ``skip_masked`` without an
            ``active_mask``, are refused.
        temperature: a number, a tensor without dimensions (the host waits), one of each sequence, ``[b]``
            beside labels ``[b, s]``, or one per token, in their shape; the same on every rank. Logits are
            divided by it in fp32, after ``config``'s scale and softcap, never the hidden states. No gradient
            flows into a tensor.
        entropy: ``none``, ``detached`` (without a gradient) or ``differentiable``; the strategy ``auto`` is
            then ``recompute`` (:func:`unrounded`).
        zero_unknown: log-probability 0 for a label outside the vocabulary, as in SkyRL and NeMo-RL; else
            that of the largest logit. Its gradient is ``-softmax`` either way; ``config.ignore_index`` gives
            log-probability 0 without a gradient, and leaves the entropy as it is.
        active_mask: bool, ``[b, s]`` or ``[T]``, the same on every rank. Tokens outside it (prompts, tool
            output, padding) take part in no GEMM of either pass: their results are all 0, without a gradient.
            The host waits for the number of the others (:mod:`.head.tokens`).
        batch_first: True where hidden states of three dimensions are ``[b, s, H]``; None is False, ``[s, b,
            H]``. Labels are ``[b, s]`` with both.
        reduce_grad_hidden: sum ``grad_hidden`` over ``tp_group`` in the backward. False leaves this rank's
            part, for a caller who gathered the hidden states and whose backward sums them; not with
            ``sequence_parallel``.

    Returns:
        fp32 log-probability and, where asked for, entropy.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank as for
            :func:`.fused_linear_cross_entropy`. Values of a temperature per token are checked in every call,
            on every rank: the host waits for them. So are the ranks' active masks, which must be equal.
        RuntimeError: in the backward, on every rank: a token outside ``active_mask`` has an upstream gradient
            that is finite and not 0. Where it is inf or NaN, so are the gradients.

    Collectives: those of :func:`.fused_linear_cross_entropy`; with a temperature per token a MAX all-reduce
    of an int64 before them, once per call; the merge has a float a token more with entropy; no
    reduction of ``grad_hidden`` where it is left to the caller. With K labels a MAX all-reduce of fp32
    ``[C, K]`` behind each chunk's first GEMM.

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
    """:func:`token_log_probs` with fields of :class:`.call.Call`, such as those that say whose head it is."""
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
    call = Call(
        widened(hidden, weight), weight, labels, token_weights=active,
        config=DEFAULT_CONFIG if config is None else config, outputs=_outputs(entropy),
        differentiable=_with_grad(entropy), caller_error=why_wrong_entropy(entropy) or wrong, **of_call,
    )  # fmt: skip
    if several:  # options of the loss alone do not count
        config = call.config
        if isinstance(config, FusedCEConfig) and (config.z_loss or config.label_smoothing):
            call = call._replace(config=changed(config, z_loss=0.0, label_smoothing=0.0))
        call = with_several_labels(call)
    made = linear_cross_entropy(call).outputs
    return TokenLogProbs(made["log_prob"], made.get("entropy"))


def _active(
    labels: Tensor, mask: Tensor | None, config: FusedCEConfig | None, several: bool = False
) -> tuple[Tensor | None, ValueError | None]:
    """Token weights by which ``skip_masked`` leaves tokens out, None for none of them; or what is wrong."""
    if not isinstance(labels, Tensor) or why_no_config(config) is not None:
        return None, None  # the checks will report it
    if mask is not None:
        shape = labels.shape[: labels.dim() - several]
        if (wrong := why_no_mask(mask, shape)) is not None:
            return None, wrong
        mask = mask.to(labels.device)
    if config is not None and config.skip_masked and not several:
        if config.ignore_index is not None:
            known = labels.ne(config.ignore_index)
            mask = known if mask is None else mask & known
        elif mask is None:
            return None, ValueError(
                "skip_masked leaves out the tokens labelled ignore_index, and config has none: give "
                "active_mask, or FusedCEConfig(skip_masked=True, ignore_index=-100) and that label to tokens "
                "that need nothing"
            )
    return (None if mask is None else mask.float()), None


def unrounded(config: FusedCEConfig | None) -> FusedCEConfig:
    """``config`` for an entropy with a gradient: ``recompute`` where neither strategy nor precision is named.

    With the scaled-exp GEMM other strategies save rounded logits there, whose log-probabilities differ from
    those of a pass without gradients, which rounds nothing.
    """
    config = FusedCEConfig() if config is None else config
    if not isinstance(config, FusedCEConfig):
        return config  # the checks will say what is wrong
    named = (config.strategy, config.logit_precision) != ("auto", "auto")
    return config if named else changed(config, strategy="recompute")


def _outputs(entropy: str) -> tuple[str, ...]:
    return ("log_prob",) if entropy == "none" else ("log_prob", "entropy")


def _with_grad(entropy: str) -> tuple[str, ...]:
    return ("log_prob", "entropy") if entropy == "differentiable" else ("log_prob",)
