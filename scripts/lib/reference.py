"""The truth: the plain definition in fp64, eager PyTorch's error beside it, and inputs that bite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.ops.cross_entropy import TokenOutputs

#: Norm-relative error that is always allowed, by dtype; otherwise twice eager PyTorch's own.
FLOOR = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


class HeadResult(NamedTuple):
    """Loss in the labels' shape and the two gradients, over the whole vocabulary and all tokens."""

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


@dataclass(frozen=True)
class HeadInputs:
    """One problem over the whole vocabulary: ``hidden [s, b, H]``, ``weight [V, H]`` (all rows),
    ``labels [b, s]``, upstream gradient ``grad_loss [b, s]`` in fp32."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad_loss: Tensor
    logit_scale: float = 1.0
    #: whose options of the loss count here: the softcap and all that follows it
    config: FusedCEConfig = field(default_factory=FusedCEConfig)
    #: ``[b, s]`` fp32: what divides the logits of a token, after the softcap; None for 1
    temperature: Tensor | None = None
    #: GEMMs that make the logits: the order in which one sums depends on its shape
    gemms: int = 1


def _terms(roundings: Any) -> Callable[[Tensor], Tensor]:
    """What is done to logits that enter a term of a loss."""
    return roundings.of_term if roundings else lambda z: z


def plain_head(inputs: HeadInputs, dtype: torch.dtype, roundings: Any = None) -> HeadResult:
    """The definition, evaluated by autograd in ``dtype`` (the loss in fp32 or wider, as Megatron's).

    ``roundings``: tests move numbers on the way by it.

    ``loss = logsumexp(z) - z_y`` with ``z = logit_scale * hidden @ weight.T``; for a label outside the
    vocabulary ``logsumexp(z) - max(z)``. The options of ``inputs.config`` as their textbooks have them, one
    after the other, on log-probabilities of the columns that take part.
    """
    options = inputs.config
    hidden, weight, z = logits_of(inputs, dtype, roundings)
    num_classes = z.shape[-1]
    labels = inputs.labels.t()
    known = (labels >= 0) & (labels < num_classes)
    log_of_sum = (~known).to(z.dtype)
    term = _terms(roundings)
    first = term(z)
    picked = first.gather(-1, labels.where(known, 0).unsqueeze(-1)).squeeze(-1)
    # The maximum is a reference point, not a function of the logits: Megatron's takes no gradient.
    largest = z.detach().amax(-1)
    loss = first.logsumexp(-1) - torch.where(known, picked, largest)
    if dtype == torch.float64:
        # The truth of logits of 1e19, too: nothing cancels relative to the maximum.
        relative = (first - largest.unsqueeze(-1)).logsumexp(-1)
        loss = relative - torch.where(known, picked - largest, 0.0)
        loss = _of_sure_tokens(first, picked, labels, known, loss)
    if options.label_smoothing:
        smoothing = options.label_smoothing
        if options.label_smoothing_form == "megatron":
            smoothing = smoothing * num_classes / (num_classes - 1)
        log_of_sum = log_of_sum + smoothing
        loss = (1 - smoothing) * loss - smoothing * (term(z).mean(-1) - term(z).logsumexp(-1))
    if options.z_loss:
        loss = loss + options.z_loss * term(z).logsumexp(-1) ** 2
    label = -100 if options.ignore_index == "auto" else options.ignored_label
    if label is not None:
        loss = loss.masked_fill(labels == label, 0.0)
    return _result(inputs, loss, hidden, weight, roundings, log_of_sum)


def _of_sure_tokens(
    z: Tensor,  # [s, b, K]
    picked: Tensor,  # [s, b]
    labels: Tensor,
    known: Tensor,
    loss: Tensor,
) -> Tensor:
    """``loss``, for tokens sure of their label as ``log(1 + sum of exp(z_j - z_y))`` over the others.

    Where ``1 - p_y`` is below 1e-16 the difference of the two has no digit in fp64 either, and its gradient,
    ``p_y - 1`` at the label, is 0.
    """
    is_label = torch.arange(z.shape[-1], device=z.device) == labels.unsqueeze(-1)
    others = z.masked_fill(is_label, -torch.inf)
    sure = known & (loss.detach() < 1e-3) & others.detach().amax(-1).isfinite()
    others = torch.where(sure.unsqueeze(-1), others - picked.unsqueeze(-1), 0.0)
    odds = others.logsumexp(-1)
    return torch.where(sure, torch.logaddexp(torch.zeros_like(odds), odds), loss)


def _result(
    inputs: HeadInputs,
    loss: Tensor,  # [s, b]
    hidden: Tensor,
    weight: Tensor,
    roundings: Any,
    log_of_sum: Tensor,  # [s, b]
) -> HeadResult:
    loss.backward(inputs.grad_loss.t().to(loss.dtype))
    assert hidden.grad is not None and weight.grad is not None
    made = HeadResult(loss.detach().t(), hidden.grad, weight.grad)
    if roundings is None:
        return made
    return HeadResult(
        roundings.of_loss(made.loss, log_of_sum.t()),
        roundings.of_gradient(made.grad_hidden, weight.shape[0]),
        roundings.of_gradient(made.grad_weight, inputs.labels.numel()),
    )


def logits_of(inputs: HeadInputs, dtype: torch.dtype, roundings: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves for hidden states and weight, and the logits ``[s, b, K]`` of the columns that take part."""
    options = inputs.config
    hidden = inputs.hidden.detach().to(dtype).requires_grad_()
    weight = inputs.weight.detach().to(dtype).requires_grad_()
    if roundings is None:
        logits = torch.cat([part @ weight.t() for part in hidden.chunk(inputs.gemms)])
    else:
        logits = roundings.of_logits(hidden, weight)
    wide = logits if dtype == torch.float64 else logits.float()
    z = wide * inputs.logit_scale
    if options.logit_softcap is not None:
        z = options.logit_softcap * torch.tanh(z / options.logit_softcap)
    if inputs.temperature is not None:
        z = z / inputs.temperature.t().unsqueeze(-1).to(z.dtype)
    return hidden, weight, z[..., : options.true_vocab_size]


def plain_outputs(
    inputs: HeadInputs, upstreams: dict[str, Tensor], dtype: torch.dtype, roundings: Any = None
) -> tuple[TokenOutputs, Tensor, Tensor]:
    """Every output of :class:`.TokenOutputs` but the loss ``[b, s]``, and the gradients of both operands for
    ``upstreams`` (by name, ``[b, s]``), by autograd in ``dtype``. For a label outside the vocabulary the
    largest logit stands, without a gradient.
    """
    hidden, weight, z = logits_of(inputs, dtype, roundings)
    term = _terms(roundings)
    log_p = term(z).log_softmax(-1)
    in_fp32 = log_p if roundings is None else roundings.of_log(log_p)
    labels = inputs.labels.t().unsqueeze(-1)
    known = (labels >= 0) & (labels < z.shape[-1])
    labels = labels.where(known, 0)
    of_largest = z.detach().amax(-1, keepdim=True) - term(z).logsumexp(-1, keepdim=True)
    of_label = term(z).log_softmax(-1).gather(-1, labels)
    log_prob = torch.where(known, of_label, of_largest).squeeze(-1)
    if dtype == torch.float64:
        first = term(z)
        picked = first.gather(-1, labels).squeeze(-1)
        log_prob = -_of_sure_tokens(first, picked, labels.squeeze(-1), known.squeeze(-1), -log_prob)
    made = {
        "log_prob": log_prob,
        "lse": term(z).logsumexp(-1),
        "entropy": -(log_p.exp() * in_fp32.masked_fill(log_p == -torch.inf, 0.0)).sum(-1),
    }
    by_name = {name: upstream.t().to(log_p.dtype) for name, upstream in upstreams.items()}
    torch.autograd.backward([made[name] for name in by_name], list(by_name.values()))
    assert hidden.grad is not None and weight.grad is not None
    label_logit = z.gather(-1, labels)
    outputs = TokenOutputs(
        torch.zeros(()),
        **made,
        predicted=z.argmax(-1),
        correct=(known & (label_logit >= z.amax(-1, keepdim=True))).squeeze(-1),
    )
    in_layout = {name: given.detach().t() for name, given in outputs._asdict().items() if given is not None}
    return TokenOutputs(**in_layout), hidden.grad, weight.grad


def plain_distillation(
    inputs: HeadInputs, ids: Tensor, log_probs: Tensor, dtype: torch.dtype, roundings: Any = None
) -> HeadResult:
    """``-sum q log p`` over entries ``[b, s, k]`` with an id in the vocabulary, by autograd in ``dtype``."""
    hidden, weight, z = logits_of(inputs, dtype, roundings)
    term = _terms(roundings)
    ids = ids.transpose(0, 1)
    inside = (ids >= 0) & (ids < z.shape[-1])
    shares = (log_probs.transpose(0, 1).to(z.dtype).exp() * inside).detach()
    at = ids.where(inside, 0)
    if roundings is None:
        # As eager PyTorch has it. logsumexp of logits of 300 has lost digits of the probabilities that
        # log_softmax keeps: its error is 2.8 times as large (median of 120 random problems).
        losses = -z.log_softmax(-1).gather(-1, at)
    else:
        losses = term(z).logsumexp(-1, keepdim=True) - term(z).gather(-1, at)
    loss = (shares * losses).sum(-1)
    if inputs.config.z_loss:
        loss = loss + inputs.config.z_loss * term(z).logsumexp(-1) ** 2
    return _result(inputs, loss, hidden, weight, roundings, shares.sum(-1))


def plain_several(
    inputs: HeadInputs,
    labels: Tensor,  # [b, s, K]
    upstream: Tensor,  # [b, s, K]
    dtype: torch.dtype,
    of_entropy: Tensor | None = None,  # [b, s]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities ``[b, s, K]``, the entropy ``[b, s]`` and the gradients of both operands, by autograd
    in ``dtype``.

    -1 has log-probability -inf without a gradient, another id outside the vocabulary that of the largest
    logit, which counts as a constant.
    """
    hidden, weight, z = logits_of(inputs, dtype)
    log_p = z.log_softmax(-1)
    ids = labels.transpose(0, 1)
    known = (ids >= 0) & (ids < z.shape[-1])
    of_largest = (z.detach().amax(-1) - z.logsumexp(-1)).unsqueeze(-1)
    made = torch.where(known, log_p.gather(-1, ids.where(known, 0)), of_largest)
    made = made.masked_fill(ids == -1, -torch.inf)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    outputs, grads = [made], [upstream.transpose(0, 1).to(z.dtype)]
    if of_entropy is not None:
        outputs, grads = [*outputs, entropy], [*grads, of_entropy.t().to(z.dtype)]
    torch.autograd.backward(outputs, grads)
    assert hidden.grad is not None and weight.grad is not None
    return made.detach().transpose(0, 1), entropy.detach().t(), hidden.grad, weight.grad


def relative_error(value: Tensor, true: Tensor) -> float:
    """``||value - true|| / ||true||`` (fp64); NaN or Inf in the value is an infinite error."""
    value, true = value.double(), true.double()
    if not torch.isfinite(value).all():
        return float("inf")
    norm = float(true.norm())
    difference = float((value - true).norm())
    return difference / norm if norm > 0 else difference


def make_teacher(inputs: HeadInputs, k: int) -> tuple[Tensor, Tensor]:
    """``k`` entries of each token ``[b, s, k]``: ids and log-probabilities of mass 0.2 to 1.

    Some ids come twice, some are outside the vocabulary (-1, and its size and beyond).
    """
    generator = torch.Generator().manual_seed(11)
    vocab = inputs.weight.shape[0]
    b, s = inputs.labels.shape
    ids = torch.randint(0, vocab, (b, s, k), generator=generator)
    log_probs = torch.randn(b, s, k, generator=generator).log_softmax(-1)
    log_probs += (0.2 + 0.8 * torch.rand(b, s, 1, generator=generator)).log()
    if k > 1:
        ids[:, ::3, 1] = ids[:, ::3, 0]
        ids[:, 1::4, 1] = torch.tensor([-1, vocab, vocab + 5, -100])[torch.arange(b) % 4, None]
    return ids.to(inputs.labels.device), log_probs.to(inputs.labels.device)


KINDS = ("plain", "peaked", "high", "low", "wide", "equal", "odd-labels")


def make_inputs(
    kind: str,
    *,
    s: int,
    b: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | str = "cpu",
    logit_scale: float = 1.0,
) -> HeadInputs:
    """A problem of one of :data:`KINDS`, with a random upstream gradient per token.

    ``plain`` logits of about 1; ``peaked`` tokens sure of their label to 1 - 1e-5; all logits near
    ``high`` 40 or ``low`` -80; ``wide`` spread over +-300; ``equal`` logits; ``odd-labels`` with ids
    below 0 (-100), at and beyond the end of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = normal(s, b, hidden_size)
    weight = normal(vocab, hidden_size) / hidden_size**0.5
    labels = torch.randint(0, vocab, (b, s), generator=generator)
    if kind == "peaked":
        rows = weight[labels.t()]
        hidden = hidden * 0.1 + 12 * rows / rows.norm(dim=-1, keepdim=True) ** 2
    elif kind in ("high", "low"):
        hidden[..., 0], weight[:, 0] = 8.0, {"high": 5.0, "low": -10.0}[kind]
    elif kind == "wide":
        weight = weight * 100
    elif kind == "equal":
        half = hidden_size // 2
        hidden[..., half:], weight[:, :half] = 0.0, weight[:1, :half]
    elif kind == "odd-labels":
        odd = torch.tensor([-100, -1, vocab, vocab + 7, 2**40])
        flat = labels.view(-1)
        where = torch.arange(0, flat.numel(), 3)
        flat[where] = odd[torch.arange(where.numel()) % odd.numel()]
    elif kind != "plain":
        raise ValueError(f"no such kind of inputs: {kind}")
    return HeadInputs(
        hidden.to(device, dtype),
        weight.to(device, dtype),
        labels.to(device),
        normal(b, s).to(device),
        logit_scale,
    )
