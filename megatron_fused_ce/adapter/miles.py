"""miles' log-probabilities and entropy, made by this head.

    --custom-megatron-init-path megatron_fused_ce.adapter.miles.serve_miles

As :mod:`.slime`, but miles cuts its logits into samples first and takes the log-softmax of each. Two of its
functions are replaced. The cut gives samples that stand for their part of the micro-batch; the log-softmax of
the first evaluates all of it, and every sample takes its part of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import deferred_logits, switch
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.rl_stacks import entropy_of, function_of
from megatron_fused_ce.config import FusedCEConfig

MODULE = "miles.backends.training_utils.loss_hub.logit_processors"
CUT = "get_responses"
CUT_PARAMETERS = ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "max_seq_lens")
FUNCTION = "calculate_log_probs_and_entropy"
PARAMETERS = (
    *("logits", "tokens", "tp_group", "with_entropy", "entropy_requires_grad", "chunk_size"),
    *("true_on_policy", "vocab_size"),
)


class _MicroBatch:
    """Log-probabilities of all samples, made when the first is asked for.

    Args:
        logits: ``[b, s, V]``, divided by the temperature.
        positions: of each sample's tokens in ``[b * s]``.
        tokens: of each sample, as many.
    """

    def __init__(self, logits: DeferredLogits, positions: list[Tensor], tokens: list[Tensor]) -> None:
        self._logits = logits
        self._positions = positions
        self._labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        self._labels.view(-1)[torch.cat(positions)] = torch.cat(tokens)
        self._made: dict[str, list[tuple[Tensor, ...] | None]] = {}

    def outputs(self, entropy: str) -> list[tuple[Tensor, ...] | None]:
        """Log-probabilities and, if asked for, entropies: one tensor a sample."""
        if entropy not in self._made:
            made = self._logits.log_probs(self._labels, entropy)
            assert made is not None
            everywhere, sizes = torch.cat(self._positions), [len(each) for each in self._positions]
            self._made[entropy] = [
                None if values is None else values.flatten()[everywhere].split(sizes) for values in made
            ]
        return self._made[entropy]


@dataclass(frozen=True)
class _Sample:
    """Stands for the logits of a micro-batch's sample."""

    micro_batch: _MicroBatch
    number: int


def serve_miles(args: Any = None, config: FusedCEConfig | None = None) -> None:
    """Let log-probabilities and entropy of models built from now on be this head's, with ``config``.

    miles' chunk length is then not used. In its true-on-policy mode logits are computed, and miles' own
    functions take them; the same for any other use of them.

    Args:
        args: miles'.

    Raises:
        ImportError: there is no miles; or as :func:`.switch.enable`.
        RuntimeError: its functions take other parameters than those that this was written for, or it is to
            recompute the loss.
    """
    module = import_module(MODULE)
    way_out = "leave serve_miles out, miles then makes its log-probabilities itself"
    cut = function_of(module, CUT, CUT_PARAMETERS, False, way_out)
    found = function_of(module, FUNCTION, PARAMETERS, False, way_out)
    if getattr(args, "recompute_loss_function", False):
        raise RuntimeError(
            "--recompute-loss-function gives no gradient to deferred logits, and none are kept that it could "
            "save: leave it out, or serve_miles"
        )

    @functools.wraps(cut)
    def get_responses(logits: Any, *, args: Any, **samples: Any) -> Iterator[tuple[Any, Tensor]]:
        if not isinstance(logits, DeferredLogits) or args.true_on_policy_mode:
            yield from cut(deferred_logits.real(logits), args=args, **samples)
            return
        if args.rollout_temperature > 0:
            logits = logits / args.rollout_temperature
        # miles' own cut, of each position's number; what has a last dimension of 1 it does not divide.
        numbers = torch.arange(logits.shape[:-1].numel(), dtype=torch.float32, device=logits.device)
        parts = list(cut(numbers.view(*logits.shape[:-1], 1), args=args, **samples))
        positions = [part.flatten().long() for part, _ in parts]
        micro_batch = _MicroBatch(logits, positions, [tokens for _, tokens in parts])
        for number, (_, tokens) in enumerate(parts):
            yield _Sample(micro_batch, number), tokens

    @functools.wraps(found)
    def calculate(
        logits: Any,
        tokens: Tensor,
        tp_group: Any,
        with_entropy: bool = False,
        entropy_requires_grad: bool = True,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(logits, _Sample):
            made = logits.micro_batch.outputs(entropy_of(with_entropy, entropy_requires_grad))
            log_prob, entropy = (None if each is None else each[logits.number] for each in made)
            assert log_prob is not None
            return log_prob.unsqueeze(-1), entropy
        return found(  # type: ignore[no-any-return]
            logits,
            tokens,
            tp_group,
            with_entropy=with_entropy,
            entropy_requires_grad=entropy_requires_grad,
            **others,
        )

    switch.enable(config)
    setattr(module, CUT, get_responses)
    setattr(module, FUNCTION, calculate)
    deferred_logits.caller_takes_shards()
