"""A call of the head: what the caller gave, before anything is checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig, why_no_config
from megatron_fused_ce.head.grad_weight import OpenGradWeight, ReturnedGradWeight
from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.head.promise import UNNAMED, Head
from megatron_fused_ce.logits import LogitsBackend, OrderedTargets
from megatron_fused_ce.losses.label import CROSS_ENTROPY
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ranks.collectives import VocabParallel

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_CONFIG = FusedCEConfig()


class OtherTargets:
    """What tokens are compared with beside one label each. This one: nothing.

    A subclass is a frozen dataclass, such as :class:`.SeveralLabels`.
    """

    #: the loss in the place of a label's
    loss: Term = CROSS_ENTROPY
    #: K, of several labels a token; 0 for one
    num_labels = 0
    #: outputs that the logits backend makes, beside those of :data:`.OUTPUTS`
    outputs: tuple[str, ...] = ()
    #: those of them that are the loss
    equal_to_loss: tuple[str, ...] = ()
    #: why the scaled-exp GEMM cannot serve, as a thing that its epilogue would have to make; or empty
    beyond_scaled_exp = ""
    #: a loss whose gradient is made from logits of both dtypes, in words; or empty
    saves_logits_for = ""
    #: arguments among :attr:`arguments` with numbers for each of the labels' tokens
    per_token: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The caller's, by their names; of a tensor whose rows may differ between ranks none of them."""
        return {}

    @property
    def kind(self) -> tuple[Any, ...]:
        """All that a spec depends on; of tensors the numbers do not count."""
        return ()

    def in_plan(self) -> dict[str, int]:
        """Fields of :class:`.PlanInputs`."""
        return {}

    def in_autocast(self) -> OtherTargets:
        """With tensors in autocast's dtype."""
        return self

    def of_head(self) -> Hashable:
        """What makes another head of it to the ranks' agreement."""
        return None

    def check(self, call: Call, num_ranks: int) -> None:
        """Check it beside a call's other arguments, which are checked.

        Raises:
            TypeError, ValueError: something does not fit.
        """

    def why_not_here(self, config: FusedCEConfig) -> str:
        """As :func:`.choose.why_not_here`."""
        return ""

    def check_shards(self, call: Call, vocab_start: int, comm: VocabParallel, compares: bool) -> None:
        """Check it against this rank's shard, once the ranks have compared theirs, if they do.

        Raises:
            ValueError: on every rank, where they compare.
        """

    def backend(self, call: Call, base: LogitsBackend) -> LogitsBackend:
        """That of these targets, over ``base``."""
        return base

    def in_order(
        self, call: Call, comm: VocabParallel, vocab_start: int, remakes: bool
    ) -> OrderedTargets | None:
        """In the order of the hidden states; ``remakes``: the backward makes logits of some chunk again."""
        return None


NOTHING_ELSE = OtherTargets()


class Call(NamedTuple):
    """Everything one call is given: the arguments of the public functions, and what the adapter adds."""

    hidden: Tensor  # [s, b, H] or [T, H]; this rank's part with sequence parallelism
    weight: Tensor  # [V, H]
    labels: Tensor  # [b, s] or [T]
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    token_weights: Tensor | None = None  # the labels' shape
    vocab_start: int | None = None
    config: FusedCEConfig = DEFAULT_CONFIG
    #: names of outputs beside the loss, and those of them that carry gradients
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    #: the caller's own loss and outputs, by their names: :func:`.fused_linear_loss`
    terms: tuple[tuple[str, Term], ...] = ()
    #: a teacher, or K labels a token; ``labels`` may then all be outside the vocabulary
    other_targets: OtherTargets = NOTHING_ELSE
    #: as for :func:`.rl.token_log_probs`, also the next two; a tensor is in the labels' shape
    temperature: float | Tensor = 1.0
    zero_unknown: bool = False
    reduce_grad_hidden: bool = True
    #: also give each token's largest logit in this shard and its column
    with_argmax: bool = False
    #: what the caller found wrong with its own arguments, to be raised on every rank
    caller_error: Exception | None = None
    #: with ``config.skip_masked``: what :func:`.tokens.count` started earlier for these token weights; else
    #: the call starts it, and the host waits
    unmasked: HostCopy | None = None
    #: opens the wgrad accumulator (:mod:`.grad_weight`)
    open_grad_weight: OpenGradWeight = ReturnedGradWeight
    #: calls that wait for their backward together, for the plan of memory
    uses_in_flight: int = 1
    #: whose calls these are; heads of different weights, or of different losses, are best told apart
    head: Head = UNNAMED

    def completed(self) -> Call:
        """With a config, in autocast's dtype, and without ``differentiable`` outputs under ``no_grad``."""
        call = self
        if not isinstance(call.config, FusedCEConfig):
            wrong = call.caller_error or why_no_config(call.config)
            call = call._replace(config=DEFAULT_CONFIG, caller_error=wrong)
        if call.differentiable and not torch.is_grad_enabled():
            call = call._replace(differentiable=())
        hidden, weight = call.hidden, call.weight
        on_device = isinstance(hidden, Tensor) and not hidden.is_meta
        if on_device and torch.is_autocast_enabled(hidden.device.type):
            if isinstance(weight, Tensor):
                hidden, weight = in_autocast_dtype(hidden, weight)
            others = call.other_targets.in_autocast()
            call = call._replace(hidden=hidden, weight=weight, other_targets=others)
        return call

    def on_its_device(self) -> AbstractContextManager[Any]:
        """The device of ``hidden`` as the current one, for Triton's launches and the collectives' streams.

        Autograd's thread for a backward sees to it by itself.
        """
        hidden = self.hidden
        if getattr(hidden, "is_cuda", False) and hidden.get_device() != torch.cuda.current_device():
            return torch.cuda.device(hidden.device)
        return _NOTHING


_NOTHING = nullcontext()


def in_autocast_dtype(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to autocast's dtype, which is on for the device of ``hidden``.

    The weight is cast as in ``F.linear``: one copy for all calls inside the outermost context.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type)
    cached = _cached(weight, dtype)
    return hidden.to(dtype), weight.to(dtype) if cached is None else cached


def _cached(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weight's copy in autocast's own cache, created if needed; None if autocast does not cache it.

    Only autograd gives access to it: a GEMM of no rows saves it for its backward. A cache of this package
    would have to know when the context ends, and would miss writes through ``.data``.
    """
    if (
        not torch.is_autocast_cache_enabled()
        or type(weight) not in (Tensor, torch.nn.Parameter)
        or weight.dtype != torch.float32
        or weight.dim() != 2
        or not (weight.requires_grad and weight.is_leaf)
        or weight.is_inference()
    ):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        no_rows = weight.new_empty(0, weight.shape[1], dtype=dtype).requires_grad_()
        transposed = getattr(F.linear(no_rows, weight).grad_fn, "_saved_mat2", None)
        if transposed is None or not transposed.requires_grad:  # cached under no_grad
            return None
        copy: Tensor = transposed.t()
        return copy if copy.dtype == dtype and copy.shape == weight.shape else None


def takes_config(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function with a ``config`` argument, for a clear error if an option is not in the config.

    The wrapped function raises ``TypeError`` for a keyword that is a field of :class:`FusedCEConfig`.
    """
    options = {option.name for option in fields(FusedCEConfig)}
    options -= inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def with_config(*args: P.args, **kwargs: P.kwargs) -> R:
        misplaced = [name for name in kwargs if name in options]
        if misplaced:
            given = ", ".join(f"{name}={kwargs[name]!r}" for name in misplaced)
            raise TypeError(
                f"{', '.join(misplaced)} belongs to the config: give config=FusedCEConfig({given}) to "
                f"{function.__name__}()"
            )
        return function(*args, **kwargs)

    return with_config
