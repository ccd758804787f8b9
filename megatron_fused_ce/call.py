"""A call of the head: its arguments, and what follows from their kind alone, made once and then looked up.

In a training run shapes, dtypes and options never change, so that all of :class:`CallSpec` is a dictionary's
entry from the second call on: validation, the agreement of the ranks, the logits backend, the plan with its
chunks and the form of the loss. Tensors are in no spec but the loss form's constants: weights and activations
move from call to call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import autocast, logits_backend, planner
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.config import FusedCEConfig, why_no_config
from megatron_fused_ce.grad_weight import OpenGradWeight, ReturnedGradWeight, kind_of
from megatron_fused_ce.host_copy import HostCopy
from megatron_fused_ce.logits_backend import LogitsBackend, RequestedOutputs
from megatron_fused_ce.loss_form import LossForm, TeacherTargets
from megatron_fused_ce.promise import UNNAMED, Head, broken_promise
from megatron_fused_ce.validation import check_call, check_requested, check_temperature
from megatron_fused_ce.vocab_parallel import (
    GroupHistory,
    HeadOfGroup,
    Settled,
    Shard,
    VocabParallel,
    check_group,
    check_true_vocab_size,
    compare,
    history_of,
)

DEFAULT_CONFIG = FusedCEConfig()

#: Specs that a group remembers: the kinds of call of a training run, or as many lengths of dynamic batches.
MAX_SPECS = 512


class Arguments(NamedTuple):
    """Arguments of one call: those of :func:`.op.fused_linear_cross_entropy`, and what the rest needs."""

    hidden: Tensor  # [s, b, H] or [T, H]; this rank's part with sequence parallelism
    weight: Tensor  # [V, H]
    labels: Tensor  # [b, s] or [T]
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    token_weights: Tensor | None = None  # the labels' shape
    vocab_start: int | None = None
    config: FusedCEConfig = DEFAULT_CONFIG
    #: see :func:`.op.fused_linear_token_outputs`
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()  # which of the outputs carry gradients
    #: see :func:`.op.fused_linear_distillation`; the labels are then outside the vocabulary
    teacher: TeacherTargets | None = None
    #: see :func:`.rl.token_log_probs`, also for the next two; a tensor is in the labels' shape
    temperature: float | Tensor = 1.0
    zero_unknown: bool = False
    reduce_grad_hidden: bool = True
    #: what the caller found wrong with its own arguments, to be raised on every rank
    caller_error: Exception | None = None
    #: also give each token's largest logit in this shard and its row
    with_argmax: bool = False
    #: with ``config.skip_masked``: what :func:`.masked_tokens.count` started earlier for these token weights;
    #: else it is counted here, and the host waits
    unmasked: HostCopy | None = None
    #: makes the wgrad accumulator (:mod:`.grad_weight`)
    open_grad_weight: OpenGradWeight = ReturnedGradWeight
    #: calls that wait for their backward together, for plans of memory
    uses_in_flight: int = 1
    #: whose calls these are; heads of different weights, or of different losses, are best told apart
    head: Head = UNNAMED

    def completed(self) -> Arguments:
        """With a config, in autocast's dtype, and without ``differentiable`` outputs under ``no_grad``."""
        args = self
        if not isinstance(args.config, FusedCEConfig):
            wrong = args.caller_error or why_no_config(args.config)
            args = args._replace(config=DEFAULT_CONFIG, caller_error=wrong)
        if args.differentiable and not torch.is_grad_enabled():
            args = args._replace(differentiable=())
        hidden, weight = args.hidden, args.weight
        on_device = isinstance(hidden, Tensor) and not hidden.is_meta
        if on_device and torch.is_autocast_enabled(hidden.device.type):
            if isinstance(weight, Tensor):
                hidden, weight = autocast.cast(hidden, weight)
            args = args._replace(hidden=hidden, weight=weight)
        return args


class CallSpec(NamedTuple):
    """Everything that depends on the kind of a call, not on its values."""

    comm: VocabParallel
    num_tokens: int  # of this rank's part
    plan: planner.Plan
    chunks: tuple[Chunk, ...]
    logits: LogitsBackend
    why_not_scaled_exp: str
    #: whether the logits backend cannot load hidden states or weight as they lie, and copies them
    copies: tuple[bool, bool]
    form: LossForm
    logit_scale: float
    with_argmax: bool
    vocab_start: int
    needs_grad: tuple[bool, bool]  # of hidden, of weight
    head: Head
    #: the head in the history of its group, the same on all ranks
    key: HeadOfGroup
    history: GroupHistory

    def promise_was_broken(self) -> None:
        """Let later calls of this head plan without token weights, and tell the user, once."""
        if self.key not in self.history.broken:
            self.history.broken.add(self.key)
            self.history.forget_specs()  # they were made with the promise
            self.head.say(broken_promise(self.head, self.key))

    @property
    def wgrad_at_once(self) -> bool:
        """Whether one GEMM over all tokens makes ``grad_weight``; ``E`` is then saved in one buffer."""
        return self.plan.wgrad_at_once and self.needs_grad[1]

    @property
    def needs_argmax(self) -> bool:
        return self.with_argmax or "predicted" in self.form.outputs


def spec_of(args: Arguments) -> CallSpec:
    """The spec of this kind of call, looked up or made.

    Whether the ranks compare a call depends on what its group has seen, never on whether a spec was there:
    one rank may have dropped it, or have a tensor at another alignment.

    Collectives: those of :func:`.vocab_parallel.compare`, where :meth:`.GroupHistory.compares` says so.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank where the call is compared.
    """
    check_group(args.tp_group)
    history = history_of(args.tp_group)
    key, num_broken = _key(args), len(history.broken)
    if key is None or history.unequal or args.config.debug_checks:
        return _make(args, history)
    try:
        spec: CallSpec | None = history.specs.get(key)
    except TypeError:  # an argument that cannot be hashed: what is wrong with it, the checks will say
        return _make(args, history)
    if spec is None:
        spec = _make(args, history)
        if len(history.broken) == num_broken:  # else another thread's backward has changed the plans
            history.keep(key, spec, MAX_SPECS)
    return spec


#: Fields that no spec depends on, or that have a kind of their own in :func:`_key`.
_NOT_IN_KEY = {"tp_group", "open_grad_weight", "caller_error", "unmasked"}
_in_key = attrgetter(*(name for name in Arguments._fields if name not in _NOT_IN_KEY))


def _key(args: Arguments) -> Hashable | None:
    """All that a spec depends on; None for arguments that no spec can be kept for.

    Every field, but for the numbers in tensors, and what surrounds the call. Under a CUDA graph's capture no
    spec is kept: the loss form's constants would be the graph's.
    """
    if args.caller_error is not None:
        return None
    hidden, weight = args.hidden, args.weight
    try:
        key = (
            tuple(map(_kind, _in_key(args))),
            kind_of(args.open_grad_weight),
            torch.is_grad_enabled(),
            # Where TMA may load them.
            hidden.data_ptr() % 16,
            weight.data_ptr() % 16,
        )
    except (AttributeError, TypeError, RuntimeError):
        return None  # what is wrong, the checks will say
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return key


def _kind(value: Any) -> Hashable:
    """A value and its type (True and 1 are equal), of a tensor all but its numbers."""
    kind = type(value)
    if isinstance(value, Tensor):
        return kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return tuple(map(_kind, value)) if kind is TeacherTargets else (kind, value)


def _make(args: Arguments, history: GroupHistory) -> CallSpec:
    reduces = args.reduce_grad_hidden
    comm = VocabParallel.of(args.tp_group, args.sequence_parallel, args.config.merge, reduces)
    local = _LocalView.of(args, comm, history)
    if comm.group is not None and history.compares(local.head, args.config.debug_checks):
        settled = compared(args, comm, local.error, local.facts)
        history.remember(local.head, settled)
    elif local.error is not None:
        raise local.error
    else:
        settled = local.settled or Settled(local.facts, (args.weight.shape[0],))
        if comm.size == 1:
            check_true_vocab_size(args.config.true_vocab_size, args.weight.shape[0])
    assert local.choice is not None
    logits, why_not = local.choice
    if settled.facts["without_scaled_exp"] and not local.facts["without_scaled_exp"]:
        logits, why_not = _choose(args, logits_backend.NOT_ON_EVERY_RANK)
    # Not this rank's view of the head: another head of the group may have as many rows here.
    head = HeadOfGroup(args.head.number, settled.shard_sizes, args.weight.shape[1])
    plan = _plan(args, comm, settled, logits, head in history.broken)
    num_tokens = args.hidden.shape[:-1].numel()
    needs_grad = torch.is_grad_enabled()
    vocab_start = _vocab_start(args, comm, settled)
    logit_scale, softcap = at_temperature(args)
    return CallSpec(
        comm=replace(comm, beside=plan.count > 1),
        num_tokens=num_tokens,
        plan=plan,
        chunks=plan.cut.chunks,
        logits=logits,
        why_not_scaled_exp=why_not,
        copies=logits_backend.must_copy(logits, args.hidden, args.weight),
        form=LossForm.of(
            replace(args.config, logit_softcap=softcap),
            num_rows=args.weight.shape[0],
            vocab_size=_vocab_size(args, comm, settled),
            vocab_start=vocab_start,
            device=args.hidden.device,
            outputs=args.outputs,
            saves_logits=logits.saves_logits,
            differentiable=args.differentiable,
            soft=args.teacher is not None,
            zero_unknown=args.zero_unknown,
        ),
        logit_scale=logit_scale,
        with_argmax=args.with_argmax,
        vocab_start=vocab_start,
        needs_grad=(
            needs_grad and args.hidden.requires_grad,
            needs_grad and args.weight.requires_grad,
        ),
        head=args.head,
        key=head,
        history=history,
    )


def at_temperature(args: Arguments) -> tuple[float, float | None]:
    """The scale of the logits and the softcap, divided by the temperature of all tokens.

    That divides what the softcap leaves: ``cap * tanh(z / cap) / t`` is the softcap ``cap / t`` of ``z / t``.
    """
    scale, cap = args.config.logit_scale, args.config.logit_softcap
    if isinstance(args.temperature, Tensor):
        return scale, cap
    return scale / args.temperature, None if cap is None else cap / args.temperature


class _LocalView(NamedTuple):
    """What this rank finds by itself."""

    error: Exception | None = None
    head: Hashable | None = None
    #: what the ranks settled before, where this call is not compared
    settled: Settled | None = None
    #: the logits backend, and why not ``scaled_exp``
    choice: tuple[LogitsBackend, str] | None = None
    #: this rank's, as numbers of which the largest is right for all: see :data:`_NO_FACTS`
    facts: dict[str, int] = {}  # noqa: RUF012 (never written to)

    @staticmethod
    def of(args: Arguments, comm: VocabParallel, history: GroupHistory) -> _LocalView:
        config, weight, head = args.config, args.weight, None
        try:
            head = _head_of(args)
            check_arguments(args, comm)
            settled = None
            if comm.group is not None and not history.compares(head, config.debug_checks):
                settled = history.heads.get(head)
            if settled is not None:
                without = settled.facts["without_scaled_exp"]
                choice = _choose(args, logits_backend.NOT_ON_EVERY_RANK if without else "")
                return _LocalView(None, head, settled, choice, settled.facts)
            here = logits_backend.why_not_here(config, args.hidden, weight)
            choice = _choose(args, here)
        except (TypeError, ValueError, ImportError) as error:
            return _LocalView(error, head, facts=_NO_FACTS)
        accumulator = kind_of(args.open_grad_weight) if weight.requires_grad else "none"
        facts = {
            "device": _DEVICES.index(device_in_plans(args.hidden.device)),
            # In the order of what a plan sets aside for them; "none" is so on all ranks or on none.
            "wgrad_accumulator": planner.WGRAD_ACCUMULATORS.index(accumulator),
            "without_scaled_exp": int(bool(here)),
        }
        return _LocalView(None, head, None, choice, facts)


def _head_of(args: Arguments) -> Hashable | None:
    """What a head is to its group's history; None for a weight that is none.

    A rank whose other arguments are bad compares a head's first call with the others.
    """
    weight = args.weight
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return (
        *(args.head.number, weight.shape, weight.dtype, weight.requires_grad),
        args.config.logits_backend,
    )


def check_arguments(args: Arguments, comm: VocabParallel) -> None:
    """Check what this rank was called with, by itself.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if args.caller_error is not None:
        raise args.caller_error
    check_call(
        args.hidden,
        args.weight,
        args.labels,
        args.token_weights,
        args.vocab_start,
        comm.num_parts,
        comm.size,
    )
    check_requested(
        args.config,
        args.weight,
        comm.size,
        args.outputs,
        args.differentiable,
        args.labels,
        args.teacher,
    )
    check_temperature(args.temperature, args.labels, args.teacher)
    if comm.sequence_parallel and not args.reduce_grad_hidden:
        raise ValueError(
            "sequence_parallel=True gives every rank the gradient of its own tokens, summed over the "
            "ranks; reduce_grad_hidden=False is for hidden states that the caller has gathered"
        )
    _check_token_weights(args)


def _choose(args: Arguments, why_not_here: str) -> tuple[LogitsBackend, str]:
    requested = RequestedOutputs(args.outputs, args.differentiable, soft=args.teacher is not None)
    return logits_backend.choose(args.config, args.hidden, args.weight, requested, why_not_here)


def _check_token_weights(args: Arguments) -> None:
    needs_grad = torch.is_grad_enabled() and (args.hidden.requires_grad or args.weight.requires_grad)
    if args.config.strategy == "grad_in_forward" and args.token_weights is None and needs_grad:
        raise ValueError(
            "strategy 'grad_in_forward' makes the gradients in the forward and needs token_weights, the "
            "weights that the loss will be multiplied by; give them, or use 'store' or 'recompute'"
        )


#: Devices that plans differ on; of ranks with several the last one counts.
_DEVICES = ("cpu", "Hopper", "other GPU")

#: What depends on this rank's machine and memory, and plans on it (see :func:`.vocab_parallel.compare`).
_NO_FACTS = {"device": 0, "wgrad_accumulator": 0, "without_scaled_exp": 0}


@lru_cache(maxsize=16)
def device_in_plans(device: torch.device) -> str:
    """:attr:`.PlanInputs.device`, one of three."""
    if device.type != "cuda":
        return "cpu"
    return "Hopper" if torch.cuda.get_device_capability(device)[0] == 9 else "other GPU"


def _plan(
    args: Arguments, comm: VocabParallel, settled: Settled, logits: LogitsBackend, promise_broken: bool
) -> planner.Plan:
    config = args.config
    # How large z-loss makes fp16's gradients is known after the forward.
    in_forward = not (config.z_loss and args.hidden.dtype == torch.float16)
    if config.strategy == "grad_in_forward" and not in_forward:
        config = replace(config, strategy="auto")
    inputs = planner.PlanInputs.of(
        config,
        num_tokens=args.hidden.shape[:-1].numel() * comm.num_parts,
        hidden_size=args.hidden.shape[-1],
        # Of the largest shard: ranks with unequal ones cut their tokens alike.
        num_rows=max(settled.shard_sizes),
        dtype=str(args.hidden.dtype).removeprefix("torch."),
        num_parts=comm.num_parts,
        tp_size=comm.size,
        wgrad_accumulator=planner.WGRAD_ACCUMULATORS[settled.facts["wgrad_accumulator"]],
        token_weights_known=in_forward and args.token_weights is not None and not args.differentiable,
        promise_broken=promise_broken,
        logits_backend=logits.name,
        saves_logits=logits.saves_logits,
        device=_DEVICES[settled.facts["device"]],
        uses_in_flight=args.uses_in_flight,
    )
    return planner.plan(inputs)


def _vocab_start(args: Arguments, comm: VocabParallel, settled: Settled) -> int:
    if args.vocab_start is not None or comm.size == 1:
        return args.vocab_start or 0
    return sum(_all_sizes(comm, settled, "vocab_start")[: comm.rank])


def _vocab_size(args: Arguments, comm: VocabParallel, settled: Settled) -> int | None:
    """Rows of all shards; None where nothing asks for them."""
    if not args.config.label_smoothing or args.config.true_vocab_size is not None:
        return args.config.true_vocab_size
    return sum(_all_sizes(comm, settled, "config.true_vocab_size"))


def _all_sizes(comm: VocabParallel, settled: Settled, instead: str) -> tuple[int, ...]:
    if len(settled.shard_sizes) < comm.size:
        raise RuntimeError(
            "a head is called for the first time while a CUDA graph is captured, when the ranks cannot "
            f"compare their shards; run one step before the capture, as warm-up does, or give {instead}"
        )
    return settled.shard_sizes


#: Fields of :class:`Arguments` that ranks may have each their own: their tensors' rows, what they find by
#: themselves (:data:`_NO_FACTS`), and what changes no collective. All others, and the config's, must agree.
_OF_RANK = {"tp_group", "vocab_start", "open_grad_weight", "head", "caller_error", "unmasked"}
_AGREED = tuple(name for name in Arguments._fields if name not in {*_OF_RANK, "config"})


def _must_agree(args: Arguments) -> dict[str, str]:
    """What must be equal on every rank, in words, by the name that an error gives it."""
    words = {name: _in_words(getattr(args, name)) for name in _AGREED}
    rows_differ = args.weight[:0] if isinstance(args.weight, Tensor) else None
    words["weight"] = _in_words(rows_differ)
    words["vocab_start given"] = str(args.vocab_start is not None)
    return words | {name: repr(value) for name, value in vars(args.config).items()}


def _in_words(value: Any) -> str:
    """All of a value, of a tensor what a collective may depend on."""
    if isinstance(value, TeacherTargets):
        return ", ".join(map(_in_words, value))
    if not isinstance(value, Tensor):
        return repr(value)
    grad = ", requires grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{grad}"


def compared(
    args: Arguments,
    comm: VocabParallel,
    error: Exception | None,
    of_rank: dict[str, int] | None = None,
    more: dict[str, int] | None = None,
) -> Settled:
    """This call's arguments compared over the ranks of its group; ``error``: what this rank found wrong.

    ``of_rank``, collectives and errors are those of :func:`.vocab_parallel.compare`; ``more`` must be equal
    on every rank, too.
    """
    assert comm.group is not None
    shard = Shard(None, 0)
    same: dict[str, str] = {}
    if error is None:
        shard = Shard(args.vocab_start, args.weight.shape[0])
        same = _must_agree(args) | {name: str(value) for name, value in (more or {}).items()}
    return compare(comm.group, same, of_rank or {}, shard, args.config.true_vocab_size, error)
