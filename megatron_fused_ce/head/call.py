"""A call of the head: every argument that the caller gave, before anything is checked."""

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

from megatron_fused_ce.config import FusedCEConfig, changed, why_no_config
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
#: PyTorch's label of tokens that are ignored, and the config of a loss of one label a token.
IGNORED = -100
LOSS_CONFIG = FusedCEConfig(ignore_index=IGNORED)


def config_of_loss(config: FusedCEConfig | None) -> FusedCEConfig:
    """The config of a loss of one label a token: ``ignore_index`` ``auto`` is :data:`IGNORED`."""
    if config is None:
        return LOSS_CONFIG
    is_auto = isinstance(config, FusedCEConfig) and config.ignore_index == "auto"
    return changed(config, ignore_index=IGNORED) if is_auto else config


class OtherTargets:
    """Targets of a call beside one label per token: a teacher, or K labels. This base class has none.

    A subclass is a frozen dataclass, such as :class:`.SeveralLabels`. The head asks it for the loss, for its
    checks, and for the logits backend that can read it.
    """

    #: term of the loss, which for one label is cross-entropy
    loss: Term = CROSS_ENTROPY
    #: K, of K labels per token; 0 for one label
    num_labels = 0
    #: names of outputs that the logits backend makes, beside those of :data:`.OUTPUTS`
    outputs: tuple[str, ...] = ()
    #: names among them whose value is the loss itself
    equal_to_loss: tuple[str, ...] = ()
    #: what the epilogue of the scaled-exp GEMM would have to make and cannot, in words; or empty
    beyond_scaled_exp = ""
    #: a loss whose gradient is made from the logits of two heads, in words; or empty
    saves_logits_for = ""
    #: names among :attr:`arguments` of tensors with numbers for each token of the labels
    per_token: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name, for comparing ranks. A rank's own rows of a matrix are cut off."""
        return {}

    @property
    def kind(self) -> tuple[Any, ...]:
        """Values that the spec of a call depends on; of a tensor all but its numbers."""
        return ()

    def in_plan(self) -> dict[str, int]:
        """Fields of :class:`.PlanInputs` that these targets add."""
        return {}

    def in_autocast(self) -> OtherTargets:
        """A copy whose tensors have autocast's dtype."""
        return self

    def of_head(self) -> Hashable:
        """Key by which the ranks' agreement tells heads apart that differ in these targets alone."""
        return None

    def check(self, call: Call, num_ranks: int) -> None:
        """Check these targets; the other arguments of the call have been checked.

        Raises:
            TypeError, ValueError: something does not fit.
        """

    def why_not_here(self, config: FusedCEConfig) -> str:
        """Why the scaled-exp GEMM cannot serve these targets on this rank: :func:`.choose.why_not_here`."""
        return ""

    def check_shards(self, call: Call, vocab_start: int, comm: VocabParallel, compares: bool) -> None:
        """Check these targets against this rank's shard; ``compares``: the ranks compare this call.

        Raises:
            ValueError: on every rank, if they compare.
        """

    def backend(self, call: Call, base: LogitsBackend) -> LogitsBackend:
        """The logits backend that reads these targets, made from ``base``."""
        return base

    def in_order(
        self, call: Call, comm: VocabParallel, logits: LogitsBackend, vocab_start: int, remakes: bool
    ) -> OrderedTargets | None:
        """These targets in the order of the hidden states, where ``logits`` can read them.

        ``remakes``: the backward makes the logits of some chunk again, and reads the targets for it.
        """
        return None


NOTHING_ELSE = OtherTargets()


class Call(NamedTuple):
    """All arguments of one call: those of the public functions, in their order, and what the adapter adds."""

    hidden: Tensor  # [s, b, H] or [T, H]; this rank's part with sequence parallelism
    weight: Tensor  # [V, H]
    labels: Tensor  # [b, s] or [T]
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    token_weights: Tensor | None = None  # the labels' shape
    vocab_start: int | None = None
    config: FusedCEConfig = DEFAULT_CONFIG
    #: names of outputs beside the loss, and the names among them that carry gradients
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    #: the caller's own loss and outputs by name, from :func:`.fused_linear_loss`
    terms: tuple[tuple[str, Term], ...] = ()
    #: a teacher, or K labels a token; ``labels`` may then all be outside the vocabulary
    other_targets: OtherTargets = NOTHING_ELSE
    #: :func:`.rl.token_log_probs` describes these three; a tensor of temperatures has the labels' shape
    temperature: float | Tensor = 1.0
    zero_unknown: bool = False
    reduce_grad_hidden: bool = True
    #: whether ``auto`` may store the logits without token weights: :data:`.choose.STORED_BY_DEFAULT`
    may_store: bool = False
    #: also give each token's largest logit in this shard and its column
    with_argmax: bool = False
    #: error that a public function found in its arguments; it is raised on every rank
    caller_error: Exception | None = None
    #: number of unmasked tokens (``config.skip_masked``), if :func:`.tokens.count` started early to count
    #: them; None: the call counts, and the host waits
    unmasked: HostCopy | None = None
    #: opens the wgrad accumulator of the backward (:mod:`.grad_weight`)
    open_grad_weight: OpenGradWeight = ReturnedGradWeight
    #: number of calls whose backward is outstanding at one time, for the plan of memory
    uses_in_flight: int = 1
    #: the head that this is a call of; give each weight and each loss a head of its own
    head: Head = UNNAMED

    def completed(self) -> Call:
        """The call with a config, cast for autocast, and without ``differentiable`` under ``no_grad``."""
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
        """Make the device of ``hidden`` the current one, for Triton's launches and the collectives' streams.

        For a backward autograd does so itself.
        """
        hidden = self.hidden
        if getattr(hidden, "is_cuda", False) and hidden.get_device() != torch.cuda.current_device():
            return torch.cuda.device(hidden.device)
        return _NOTHING


_NOTHING = nullcontext()


def in_autocast_dtype(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to the dtype of autocast, which is on for the device of ``hidden``.

    The weight is cast as in ``F.linear``: all calls inside the outermost context share one copy.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type)
    cached = _cached(weight, dtype)
    return hidden.to(dtype), weight.to(dtype) if cached is None else cached


def _cached(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The copy of the weight in autocast's own cache, made if needed; None if autocast does not cache it.

    Only autograd gives access to that cache: a GEMM without rows saves the copy for its backward. A cache of
    this package would have to know when the context ends, and would miss writes through ``.data``.
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
    """Decorator of a function with a ``config``: says so where an option is given beside the config.

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
