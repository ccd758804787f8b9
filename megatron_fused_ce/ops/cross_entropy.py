"""Per-token cross-entropy of ``hidden @ weight.T``, and outputs beside it, without the logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call, config_of_loss, takes_config
from megatron_fused_ce.losses.outputs import differentiable_of
from megatron_fused_ce.ops.arguments import sequence_first


class TokenOutputs(NamedTuple):
    """Results for each token, in the labels' shape; None if not requested.

    ``s`` are the logits of the loss (scaled, softcapped, without masked padding), ``p = softmax(s)``.
    """

    loss: Tensor  # fp32
    log_prob: Tensor | None = None  # fp32: log p_y; max s - lse for a label outside the vocabulary
    lse: Tensor | None = None  # fp32: log sum exp s
    entropy: Tensor | None = None  # fp32: -sum p log p
    predicted: Tensor | None = None  # int64: argmax s over all shards, lowest on a tie; -1 with NaN
    correct: Tensor | None = None  # bool: no logit is larger than the label's


@takes_config
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    batch_first: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross-entropy of a vocabulary-parallel head, one sequence chunk at a time.

    It computes, chunk by chunk::

        logits = hidden @ weight.T                        # over all ranks' rows: [s, b, sum of V]
        loss = cross_entropy(logits.float().flatten(0, 1), labels.T.flatten(), reduction="none")
        loss = loss.view(s, b).T

    The strategy ``recompute`` holds one chunk ``[C, V]`` of logits at a time; ``store`` keeps all of them
    until the backward, and without token weights and a budget ``auto`` takes it up to 4 GiB. The loss is
    differentiable in ``hidden`` and ``weight``, once, for any upstream gradient per token; that must be the
    same on every rank of the group.

    Args:
        hidden: ``[s, b, H]`` or ``[T, H]``, float32, bfloat16 or float16; with sequence parallelism
            this rank's part, ``[s / R, b, H]`` or ``[T / R, H]``.
        weight: ``[V, H]``, this rank's vocabulary rows, the dtype of ``hidden``. The ranks' shards follow
            each other in rank order, and may differ in size. If the first call of a group had equal shards
            and a later head has unequal ones, that head needs ``config.debug_checks``.
        labels: ``[b, s]`` (for ``hidden`` of three dimensions) or ``[T]``, global token ids, the same
            on every rank. Tokens labelled ``config.ignore_index``, -100 if it is not given, have loss 0 and
            no gradient. Another id outside the vocabulary has the loss of Megatron's unfused path,
            ``lse - max``; so has -100 with ``FusedCEConfig(ignore_index=None)``.
        tp_group: the tensor-parallel group; None if this rank holds the whole vocabulary.
        sequence_parallel: each rank of the group holds its own part of the tokens.
        batch_first: ``hidden`` is ``[b, s, H]``, with sequence parallelism ``[b, s / R, H]``.
        token_weights: in the labels' shape. They promise that the upstream gradient will be a scalar times
            these weights, so that ``grad_in_forward`` can make the gradients in the forward. They never
            change the loss. For any other upstream gradient the backward makes the gradients again, with a
            warning, and later calls of a head of this shape do not rely on the promise. With
            ``config.skip_masked`` tokens of weight 0 are skipped: an upstream gradient for one raises.
        vocab_start: first global id of this rank's rows; None: the sum of the sizes of the shards before it.
        config: chunking, strategy and the rest; None for the defaults.

    Returns:
        fp32 loss in the labels' shape.

    Raises:
        TypeError, ValueError: an argument does not fit. It is raised on every rank if the ranks compare the
        call: at the first call of each head over a group (a head is identified by its model, shape, dtype
        and ``requires_grad`` of its weight, and ``logits_backend``), and at every call with
        ``config.debug_checks`` or after unequal shards. With ``skip_masked`` every call checks, on every
        rank, that the ranks skip the same tokens.

    Collectives, all over ``tp_group`` (R > 1). At most once per call: the agreement check (at a head's first
    call; at every call once shards of unequal sizes were seen), the MAX all-reduce of two bytes a token
    (``skip_masked``), the all-gather of sampled rows of the weight (where the scaled-exp GEMM serves). Per
    chunk of the forward: all-gather of hidden states (sequence parallelism); the merge of the statistics, one
    all-gather or a MAX and a SUM all-reduce (``config.merge``). Per chunk of the backward: all-gather of
    hidden states (sequence parallelism, if a GEMM needs them; the first chunk's are still there), one
    reduce-scatter of ``grad_hidden`` (sequence parallelism) or one all-reduce. With ``grad_in_forward`` this
    reduction is in the forward; the backward begins with a MAX all-reduce of three fp64 numbers (five with
    ``skip_masked``), and has the rest only if the promise is broken. With ``skip_masked`` every strategy's
    backward begins with that all-reduce, of three int64. The
    order is the same on every rank: :mod:`.head.loop`.

    Source: vocab-parallel cross-entropy, Shoeybi et al. 2019 (arXiv:1909.08053); chunking and
    recomputation of the logits: docs/design.md.
    """
    if batch_first:
        hidden = sequence_first(hidden, batch_first)
    call = Call(
        hidden, weight, labels, tp_group, sequence_parallel, token_weights, vocab_start,
        config_of_loss(config), may_store=True,
    )  # fmt: skip
    return linear_cross_entropy(call).loss


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
    batch_first: bool = False,
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
            gradient of its own. If one has an upstream gradient, ``grad_in_forward`` makes its gradients
            again in the backward; ``auto`` never takes it here.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; ``entropy``
    and ``predicted`` each add a float a token to the merge of the statistics (``predicted`` with
    ``merge="all_reduce"``: a MIN all-reduce ``[C]``).

    Returns:
        the loss and the requested outputs; None for the others.

    Raises:
        ValueError: also an unknown name, and ``predicted`` with ids of 2**24 or more.

    Source: d log p_y = [j = y] - p_j, d entropy = -p_j (log p_j + entropy): docs/math.md.
    """
    wrong = None
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        wrong, outputs = TypeError(f"outputs is {outputs!r}; expected a sequence of names, ('lse',)"), ()
    call = Call(
        sequence_first(hidden, batch_first), weight, labels, tp_group, sequence_parallel, token_weights,
        vocab_start, config_of_loss(config), tuple(outputs),
        differentiable_of(outputs) if differentiable else (), caller_error=wrong, may_store=True,
    )  # fmt: skip
    return TokenOutputs(**linear_cross_entropy(call).outputs)
