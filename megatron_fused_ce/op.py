"""The op: per-token cross-entropy of ``hidden @ weight.T`` without the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import planner
from megatron_fused_ce.autograd import FusedLinearCrossEntropy
from megatron_fused_ce.call import DEFAULT_CONFIG, Call, Context, spec_of
from megatron_fused_ce.chunking import first_tokens
from megatron_fused_ce.config import FusedCEConfig, takes_config
from megatron_fused_ce.distillation import Distillation
from megatron_fused_ce.loss import TokenOutputs
from megatron_fused_ce.losses import Term
from megatron_fused_ce.losses.outputs import OUTPUTS, differentiable_of
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.several_labels import SeveralLabels, has_several_labels, with_several_labels
from megatron_fused_ce.targets import Targets
from megatron_fused_ce.words import temperature_of, why_wrong_entropy

P = ParamSpec("P")
R = TypeVar("R")


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`."""

    outputs: dict[str, Tensor]  # the labels' shape
    local_max: Tensor | None  # fp32 [T] in token order (s-major): this shard's largest logit
    local_argmax: Tensor | None  # int64 [T]: its row in this shard
    plan: planner.Plan  # strategy and chunks of this call
    logits_backend: str  # the one that was used
    why_not_scaled_exp: str  # empty if it was used

    @property
    def loss(self) -> Tensor:
        return self.outputs["loss"]


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` with the function's types."""
    return cast(Callable[P, R], torch.compiler.disable(function))


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
    backward. Differentiable in ``hidden`` and ``weight``, once, for any upstream gradient per token, the same
    on every rank of the group.

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
        ``config.debug_checks`` or after unequal shards. With ``skip_masked`` in every call, on every rank:
        ranks that leave out different tokens.

    Collectives, all over ``tp_group`` (R > 1). Once per call: the agreement check (a head's first call
    only; every call once shards of unequal sizes were seen), the MAX all-reduce of two bytes a token
    (``skip_masked``), the all-gather of sampled rows of the weight (where the scaled-exp GEMM serves). Per
    chunk of the forward: all-gather of hidden states (sequence parallelism); the merge of the statistics, one
    all-gather or a MAX and a SUM all-reduce (``config.merge``). Per chunk of the backward: all-gather of
    hidden states (sequence parallelism, if a GEMM needs them; the first chunk's are still there), one
    reduce-scatter of ``grad_hidden`` (sequence parallelism) or one all-reduce. With ``grad_in_forward`` this
    reduction is in the forward; the backward begins with a MAX all-reduce of one int64 (of three with
    ``skip_masked``, which has it with every strategy), and has the rest where the promise is broken. Their
    order: :mod:`.forward`, :mod:`.backward`; the same on every rank.

    Source: vocab-parallel cross-entropy, Shoeybi et al. 2019 (arXiv:1909.08053); chunking and
    recomputation of the logits: docs/design.md.
    """
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
        )
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
        outputs: names among ``log_prob``, ``lse``, ``entropy``, ``predicted``, ``correct``;
            :class:`.TokenOutputs` defines them; in the labels' shape. A token labelled
            ``config.ignore_index`` has ``log_prob`` 0 without a gradient; its other outputs are as if it had
            another label.
        differentiable: whether ``log_prob``, ``lse`` and ``entropy`` carry gradients, each for any upstream
            of its own. Where one has an upstream gradient, ``grad_in_forward`` makes its gradients again in
            the backward, and ``auto`` never takes it.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; ``entropy``
    and ``predicted`` each add a float a token to the merge of the statistics (``predicted`` with
    ``merge="all_reduce"``: a MIN all-reduce ``[C]``).

    Returns:
        the loss and the requested outputs; None for the others.

    Raises:
        ValueError, beside those: an unknown name; ``predicted`` with ids of 2**24 or more.

    Source: d log p_y = [j = y] - p_j, d entropy = -p_j (log p_j + entropy): docs/math.md.
    """
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
            outputs=tuple(outputs),
            differentiable=differentiable_of(outputs) if differentiable else (),
            caller_error=_wrong_outputs(outputs),
        )
    )
    return TokenOutputs(**head.outputs)


@takes_config
def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    terms: Mapping[str, Term],
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> dict[str, Tensor]:
    """Losses and other outputs that are sums of terms, each for every token, without the logits.

    ::

        out = fused_linear_loss(
            hidden,
            weight,
            labels,
            {"loss": losses.CrossEntropy() + losses.ZLoss(1e-4), "entropy": losses.Entropy()},
        )
        (out["loss"] - 0.01 * out["entropy"]).mean().backward()

    Args:
        labels: also K of each token, ``[b, s, K]`` or ``[T, K]``, for terms that read
            :attr:`.Rows.log_probs`; others are of the first. As for :func:`.rl.token_log_probs`.
        terms: output's name -> :class:`.losses.Term`; :mod:`megatron_fused_ce.losses` has those of the
            package, docs/losses.md how to write another. Outputs whose term ``gives`` coefficients are
            differentiable, each for any upstream gradient of its own. The first one is what
            ``token_weights`` are promised of; where another has an upstream gradient too,
            ``grad_in_forward`` makes its gradients again in the backward, and ``auto`` never takes it.
        config: ``z_loss`` and ``label_smoothing`` are terms here, and refused. Outputs of the label are 0
            without a gradient for tokens labelled ``ignore_index``.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; each
    statistic that a term ``needs`` adds a float a token to the merge. With K labels a token a MAX all-reduce
    of fp32 ``[C, K]`` comes behind each chunk's first GEMM (R > 1).

    Returns:
        the outputs by their names, ``[b, s]`` or ``[T]``, with K more where a term is ``per_label``; fp32,
        but int64 ids of ``Predicted`` and bools of ``Correct``.

    Raises:
        TypeError, ValueError, beside those: what is no term, a term that cannot be hashed, statistics or
            coefficients that there are not, a first output without a gradient.

    Source: the row gradient of a sum of terms: docs/math.md.
    """
    config = DEFAULT_CONFIG if config is None else config
    wrong = _wrong_terms(terms, config)
    by_name = {} if wrong else _internal_names(terms)
    beside = tuple(name for name in by_name if name != "loss")
    call = Call(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_weights=token_weights,
        vocab_start=vocab_start,
        config=config,
        outputs=beside,
        differentiable=tuple(name for name in beside if by_name[name].gives),
        terms=tuple(by_name.items()),
        caller_error=wrong,
    )
    head = linear_cross_entropy(with_several_labels(call) if has_several_labels(hidden, labels) else call)
    return dict(zip(terms, map(head.outputs.__getitem__, by_name), strict=True))


def _internal_names(terms: Mapping[str, Term]) -> dict[str, Term]:
    """``loss`` for the first; the name of :data:`.OUTPUTS` for what is one of them, else one that is not."""
    of_package = {term: name for name, term in OUTPUTS.items()}
    named: dict[str, Term] = {}
    for name, term in terms.items():
        known = of_package.get(term, "")
        named["loss" if not named else known if known and known not in named else f"output {name}"] = term
    return named


def _wrong_terms(terms: object, config: object) -> TypeError | ValueError | None:
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
        elif isinstance(hidden, Tensor):
            wrong = ValueError(f"hidden has shape {tuple(hidden.shape)}; expected [s, b, H] or [T, H]")
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


def _wrong_outputs(outputs: Sequence[str]) -> TypeError | None:
    if not isinstance(outputs, str):
        return None
    return TypeError(f"outputs is the string {outputs!r}; expected a sequence of names, ({outputs!r},)")


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


@uncompiled
def linear_cross_entropy(call: Call) -> HeadOutputs:
    """Evaluate a call of the head: for the functions above and for the Megatron adapter.

    Returns:
        the outputs for each token, this shard's largest logits where asked for, the plan and the logits
        backend.

    Errors and collectives: those of :func:`fused_linear_cross_entropy`.
    """
    call = call.completed()
    with call.on_its_device():
        spec = spec_of(call)
        # From here on every rank runs the same collectives.
        targets, kept = Targets.of(call, spec)
        chunks = spec.chunks
        if kept is not None:
            # The plan and the buffers are those of all tokens: the same in every step.
            chunks = first_tokens(chunks, kept.tokens.shape[1])
        context = Context(spec, chunks, call.open_grad_weight)
        in_batch = tuple(call.labels.shape) if call.labels.dim() == 2 else None
        *per_token, local_max, local_argmax = FusedLinearCrossEntropy.apply(
            call.hidden, call.weight, targets, context, kept, in_batch
        )
    outputs = dict(zip(spec.form.outputs, per_token, strict=True))
    return HeadOutputs(outputs, local_max, local_argmax, spec.plan, spec.logits.name, spec.why_not_scaled_exp)
