"""Losses and other outputs that are sums of terms, a user's own among them, without the logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, config_of_loss, takes_config
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ops.arguments import sequence_first
from megatron_fused_ce.ops.labels import has_several_labels, with_several_labels


@takes_config
def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    terms: Mapping[str, Term],
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    batch_first: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> dict[str, Tensor]:
    """Per-token outputs that are sums of terms, the loss first, one sequence chunk at a time.

    ::

        out = fused_linear_loss(
            hidden,
            weight,
            labels,
            {"loss": losses.CrossEntropy() + losses.ZLoss(1e-4), "entropy": losses.Entropy()},
        )
        (out["loss"] - 0.01 * out["entropy"]).mean().backward()

    Args:
        labels: also K labels per token, ``[b, s, K]`` or ``[T, K]``, for terms that read
            :attr:`.Rows.log_probs`; other terms read the first label. See :func:`.rl.token_log_probs`.
        terms: name of an output -> :class:`.losses.Term`. :mod:`megatron_fused_ce.losses` has the package's
            terms; docs/losses.md says how to write one. Outputs whose term ``gives`` coefficients are
            differentiable, each for any upstream gradient of its own. The first output is the loss, whose
            upstream gradient ``token_weights`` promise. If another has an upstream gradient too,
            ``grad_in_forward`` makes its gradients again in the backward; ``auto`` never takes it here.
        config: refuses ``z_loss`` and ``label_smoothing``, which are terms here. For tokens labelled
            ``ignore_index`` outputs of the label are 0 without a gradient.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; each
    statistic that a term ``needs`` adds a float a token to the merge. With K labels per token a MAX
    all-reduce of fp32 ``[C, K]`` follows the first GEMM of each chunk (R > 1).

    Returns:
        the outputs by name, ``[b, s]`` or ``[T]``, with K at the end if a term is ``per_label``; fp32, but
        ``Predicted`` gives int64 ids and ``Correct`` bools.

    Raises:
        TypeError, ValueError: also something that is no term, a term that cannot be hashed, an unknown
            statistic or coefficient, a first output without a gradient.

    Source: the row gradient of a sum of terms: docs/math.md.
    """
    several = has_several_labels(hidden, labels)
    config = config_of_loss(config) if not several else DEFAULT_CONFIG if config is None else config
    wrong = _wrong_terms(terms, config)
    by_name = {} if wrong else _internal_names(terms)
    beside = tuple(name for name in by_name if name != "loss")
    call = Call(
        sequence_first(hidden, batch_first), weight, labels, tp_group, sequence_parallel, token_weights,
        vocab_start, config, beside, tuple(name for name in beside if by_name[name].gives),
        tuple(by_name.items()), caller_error=wrong, may_store=True,
    )  # fmt: skip
    head = linear_cross_entropy(with_several_labels(call) if several else call)
    return dict(zip(terms, map(head.outputs.__getitem__, by_name), strict=True))


def _internal_names(terms: Mapping[str, Term]) -> dict[str, Term]:
    """Rename the outputs: ``loss`` is the first; a term of :data:`.OUTPUTS` has its name there, once."""
    of_package = {term: name for name, term in OUTPUTS.items()}
    named: dict[str, Term] = {}
    for name, term in terms.items():
        known = of_package.get(term, "")
        named["loss" if not named else known if known and known not in named else f"output {name}"] = term
    return named


def _wrong_terms(terms: object, config: object) -> TypeError | ValueError | None:
    """The error for terms that no head can compute; None for good ones."""
    if not isinstance(terms, Mapping) or not terms:
        return TypeError(f"terms is {terms!r:.80}; expected a dict of an output's name and its term")
    for name, term in terms.items():
        if not isinstance(name, str) or not isinstance(term, Term):
            kinds = type(name).__name__, type(term).__name__
            return TypeError(
                f"terms has a {kinds[0]} and a {kinds[1]}; expected names and losses.Term objects"
            )
        if wrong := term.why_wrong():
            return TypeError(f"the term of {name!r}, {term!r:.80}, {wrong}")
    first = next(iter(terms.values()))
    if not first.gives or first.per_label:
        why = "has no gradient: its gives is empty"
        if first.gives:
            why = "is one number for each of several labels"
        return ValueError(f"the first output is the loss, and {first} {why}: put it behind another")
    if options := getattr(config, "loss_terms", ""):
        return ValueError(
            f"config has {options.replace(', ', ' and ')}, which are terms here: add losses.ZLoss(weight), "
            "or (1 - share) * losses.CrossEntropy() + share * losses.Uniform()"
        )
    return None
