"""A call's fields, their checks, and :class:`CallSpec`: everything derived from shapes, dtypes and options.

A spec is made at the first call of its kind and cached: validation, the agreement of the ranks, the logits
backend, the plan with its chunks and the form of the loss. In a training run it is a dictionary's entry from
the second call on. It holds no tensors but the loss form's constants: weights and activations move from call
to call.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import autocast, head_bytes, planner
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.config import FusedCEConfig, why_no_config
from megatron_fused_ce.host_copy import HostCopy
from megatron_fused_ce.logits import ChunkTargets, LogitsBackend, OrderedTargets, choose
from megatron_fused_ce.logits.choose import Requested
from megatron_fused_ce.losses import Term
from megatron_fused_ce.losses.form import LossForm
from megatron_fused_ce.losses.label import CROSS_ENTROPY, loss_of
from megatron_fused_ce.parallel import (
    GroupHistory,
    HeadOfGroup,
    Settled,
    Shard,
    VocabParallel,
    check_group,
    check_true_vocab_size,
    compare,
    compare_numbers,
    history_of,
)
from megatron_fused_ce.promise import UNNAMED, Head, broken_promise
from megatron_fused_ce.validation import check_call, check_requested, check_temperature
from megatron_fused_ce.wgrad import Later, OpenGradWeight, ReturnedGradWeight, kind_of
from megatron_fused_ce.words import in_words

DEFAULT_CONFIG = FusedCEConfig()

#: Specs that a group remembers: the kinds of call of a training run, or as many lengths of dynamic batches.
MAX_SPECS = 512


class OtherTargets:
    """What tokens are compared with beside one label each. This one: nothing.

    A subclass is a frozen dataclass: :class:`.SeveralLabels`, :class:`.Distillation`.
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
        """What makes another head of it, in :func:`_head_of`."""
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
        self, labels: Tensor, num_rows: int, config: FusedCEConfig, spec: CallSpec
    ) -> OrderedTargets | None:
        """In the order of the hidden states; ``num_rows``: of the weight."""
        return None


NOTHING_ELSE = OtherTargets()


class Call(NamedTuple):
    """Everything one head call is given: the arguments of :mod:`.op`'s and :mod:`.rl`'s functions."""

    hidden: Tensor  # [s, b, H] or [T, H]; this rank's part with sequence parallelism
    weight: Tensor  # [V, H]
    labels: Tensor  # [b, s] or [T]
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    token_weights: Tensor | None = None  # the labels' shape
    #: whether they are those that :func:`.rl.token_log_probs` works on, for errors
    active_mask: bool = False
    vocab_start: int | None = None
    config: FusedCEConfig = DEFAULT_CONFIG
    #: see :func:`.op.fused_linear_token_outputs`
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()  # which of the outputs carry gradients
    #: see :func:`.op.fused_linear_loss`: of ``loss`` and of outputs, by their names
    terms: tuple[tuple[str, Term], ...] = ()
    #: with which labels may be outside the vocabulary, for none
    other_targets: OtherTargets = NOTHING_ELSE
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
    #: makes the wgrad accumulator (:mod:`.wgrad`)
    open_grad_weight: OpenGradWeight = ReturnedGradWeight
    #: where a backward leaves ``grad_weight`` to be made; with accumulators that add to a ``main_grad``
    later: Later | None = None
    #: calls that wait for their backward together, and those that wait in ``later``, for plans of memory
    uses_in_flight: int = 1
    uses_later: int = 0
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
                hidden, weight = autocast.cast(hidden, weight)
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
#: Fields that no spec depends on, or that have a kind of their own in :func:`_key`.
_NOT_IN_KEY = {"tp_group", "open_grad_weight", "caller_error", "unmasked"}
#: Fields that may differ between ranks: their tensors' rows, what each finds by itself (:data:`_NO_FACTS`),
#: and what changes no collective. All others, and the config's, must agree.
_OF_RANK = {"tp_group", "vocab_start", "open_grad_weight", "head", "caller_error", "unmasked"}
_TENSORS = [name for name, of in Call.__annotations__.items() if re.search("Tensor|OtherTargets", str(of))]
_tensors_in_key = attrgetter(*(name for name in _TENSORS if name not in _NOT_IN_KEY))
_others_in_key = attrgetter(*(name for name in Call._fields if name not in {*_NOT_IN_KEY, *_TENSORS}))
_AGREED = tuple(name for name in Call._fields if name not in {*_OF_RANK, "config"})


class NeedsGrad(NamedTuple):
    """Which operands get a gradient."""

    hidden: bool
    weight: bool


class CallSpec(NamedTuple):
    """Everything that depends on the kind of a call, not on its values."""

    comm: VocabParallel
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
    needs_grad: NeedsGrad
    #: see :class:`Call`
    active_mask: bool
    skip_zero_upstream: bool  # the config's
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
    def remakes_logits(self) -> bool:
        """Whether a backward, or what it leaves for later, may read labels and statistics for them."""
        return self.plan.strategy != "store" or not self.plan.keeps_logits

    @property
    def wgrad_at_once(self) -> bool:
        """Whether one GEMM over all tokens makes ``grad_weight``; ``E`` is then saved in one buffer."""
        return self.plan.wgrad_at_once and self.needs_grad.weight

    @property
    def gradients_in_forward(self) -> bool:
        return self.plan.strategy == "grad_in_forward" and any(self.needs_grad)

    def stores(self, chunk: Chunk) -> bool:
        """Whether the forward saves the chunk's logits, or ``E``."""
        return chunk.index < self.plan.stored_chunks and any(self.needs_grad)

    def backward_reads_hidden(self, chunk: Chunk, needs_grad: NeedsGrad) -> bool:
        return needs_grad.weight or (needs_grad.hidden and not self.stores(chunk))


class Context(NamedTuple):
    """A call's spec, and its own chunks."""

    spec: CallSpec
    #: the spec's, or fewer where masked tokens are skipped
    chunks: tuple[Chunk, ...]
    open_grad_weight: OpenGradWeight
    later: Later | None

    @property
    def num_tokens(self) -> int:
        """``n``: this rank's tokens that are worked on."""
        return self.chunks[-1].stop if self.chunks else 0

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank, contiguous."""
        if len(self.chunks) > 1:
            per_token = per_token[..., chunk.start : chunk.stop]
        # Of one token a rank, flatten gives a strided view.
        return per_token.flatten(-2).contiguous()

    def rows(self, of_rank: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's rows of this rank's ``[n, ...]``."""
        return of_rank if len(self.chunks) == 1 else of_rank[chunk.start : chunk.stop]

    def chunk_of_all(self, of_all: Tensor, chunk: Chunk) -> Tensor:
        """Rows ``[C, ...]`` of one chunk in a tensor ``[T, ...]`` ordered chunk after chunk."""
        if len(self.chunks) == 1:
            return of_all
        parts = self.spec.comm.num_parts
        return of_all[parts * chunk.start : parts * chunk.stop]

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries ``[n]`` of a chunk's ``[C]``."""
        comm = self.spec.comm
        if comm.num_parts == 1:
            return per_token
        return per_token.view(comm.num_parts, -1)[comm.part]

    def targets(
        self,
        chunk: Chunk,
        labels: Tensor | None,  # [C]; None where a backward does not read them
        others: OrderedTargets | None,  # of all tokens
        inv_temperature: Tensor | None,  # [parts, n]
    ) -> ChunkTargets:
        """What the logits backend takes of one chunk beside hidden states and weight."""
        spec = self.spec
        if inv_temperature is not None:
            inv_temperature = self.split(inv_temperature, chunk)
        if others is not None:
            others = others.of_chunk(chunk, partial(self.split, chunk=chunk))
        return ChunkTargets(labels, spec.logit_scale, spec.form, inv_temperature, others, spec.comm)


def spec_of(call: Call) -> CallSpec:
    """The spec of this kind of call, looked up or made.

    Whether the ranks compare a call depends on what its group has seen, never on whether a spec was there:
    one rank may have dropped it, or have a tensor at another alignment.

    Collectives: those of :func:`.parallel.compare`, where :meth:`.GroupHistory.compares` says so.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank where the call is compared.
    """
    check_group(call.tp_group)
    history = history_of(call.tp_group)
    key, num_broken = _key(call), len(history.broken)
    if key is None or history.unequal or call.config.debug_checks:
        return _make(call, history)
    try:
        spec: CallSpec | None = history.specs.get(key)
    except TypeError:  # an argument that cannot be hashed: what is wrong with it, the checks will say
        return _make(call, history)
    if spec is None:
        spec = _make(call, history)
        if len(history.broken) == num_broken:  # else another thread's backward has changed the plans
            history.keep(key, spec, MAX_SPECS)
    return spec


def _key(call: Call) -> Hashable | None:
    """All that a spec depends on; None for arguments that no spec can be kept for.

    Every field, but for the numbers in tensors, and what surrounds the call. Under a CUDA graph's capture no
    spec is kept: the loss form's constants would be the graph's.
    """
    if call.caller_error is not None:
        return None
    hidden, weight = call.hidden, call.weight
    try:
        others = _others_in_key(call)
        key = (
            *[given if given is None else _kind(given) for given in _tensors_in_key(call)],
            others,
            tuple(map(type, others)),  # True and 1 are equal
            kind_of(call.open_grad_weight),
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
    """A value and its type, of a tensor all but its numbers."""
    kind = type(value)
    if isinstance(value, Tensor):
        return kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return (kind, *map(_kind, value.kind)) if isinstance(value, OtherTargets) else (kind, value)


def _make(call: Call, history: GroupHistory) -> CallSpec:
    reduces = call.reduce_grad_hidden
    comm = VocabParallel.of(call.tp_group, call.sequence_parallel, call.config.merge, reduces)
    local = _LocalView.of(call, comm, history)
    compares = comm.group is not None and history.compares(local.head, call.config.debug_checks)
    if compares:
        settled = compared(call, comm, local.error, local.facts)
    elif local.error is not None:
        raise local.error
    else:
        settled = local.settled or Settled(local.facts, (call.weight.shape[0],))
        if comm.size == 1:
            check_true_vocab_size(call.config.true_vocab_size, call.weight.shape[0])
    others, vocab_start = call.other_targets, _vocab_start(call, comm, settled)
    others.check_shards(call, vocab_start, comm, compares)
    if compares:
        history.remember(local.head, settled)
    assert local.choice is not None
    logits, why_not = local.choice
    if settled.facts["without_scaled_exp"] and not local.facts["without_scaled_exp"]:
        logits, why_not = _choose(call, choose.NOT_ON_EVERY_RANK)
    # Not this rank's view of the head: another head of the group may have as many rows here.
    head = HeadOfGroup(call.head.number, settled.shard_sizes, call.weight.shape[1])
    plan = _plan(call, comm, settled, logits, head in history.broken)
    logits = others.backend(call, logits)
    needs_grad = torch.is_grad_enabled()
    logit_scale, softcap = at_temperature(call)
    return CallSpec(
        comm=replace(comm, beside=plan.count > 1),
        plan=plan,
        chunks=plan.cut.chunks,
        logits=logits,
        why_not_scaled_exp=why_not,
        copies=choose.must_copy(logits, call.hidden, call.weight),
        form=LossForm.of_shard(
            replace(call.config, logit_softcap=softcap),
            num_rows=call.weight.shape[0],
            vocab_start=vocab_start,
            device=call.hidden.device,
            saves_logits=logits.saves_logits,
            loss=_loss_of(call),
            outputs=call.outputs,
            terms=dict(call.terms),
            differentiable=call.differentiable,
            equal_to_loss=others.equal_to_loss,
            num_classes=_num_classes(call, comm, settled),
            zero_unknown=call.zero_unknown,
            num_labels=others.num_labels,
        ),
        logit_scale=logit_scale,
        with_argmax=call.with_argmax,
        vocab_start=vocab_start,
        needs_grad=NeedsGrad(
            needs_grad and call.hidden.requires_grad, needs_grad and call.weight.requires_grad
        ),
        active_mask=call.active_mask,
        skip_zero_upstream=call.config.skip_zero_upstream,
        head=call.head,
        key=head,
        history=history,
    )


def at_temperature(call: Call) -> tuple[float, float | None]:
    """The scale of the logits and the softcap, divided by the temperature of all tokens.

    That divides what the softcap leaves: ``cap * tanh(z / cap) / t`` is the softcap ``cap / t`` of ``z / t``.
    """
    scale, cap = call.config.logit_scale, call.config.logit_softcap
    if isinstance(call.temperature, Tensor):
        return scale, cap
    return scale / call.temperature, None if cap is None else cap / call.temperature


class _LocalView(NamedTuple):
    """What this rank finds by itself."""

    error: Exception | None = None
    head: Hashable | None = None
    #: what the ranks settled before, where this call is not compared
    settled: Settled | None = None
    #: the logits backend, and why not ``scaled_exp``
    choice: tuple[LogitsBackend, str] | None = None
    #: this rank's (:data:`_NO_FACTS`), encoded so that the maximum over ranks is safe for all
    facts: dict[str, int] = {}  # noqa: RUF012 (never written to)

    @staticmethod
    def of(call: Call, comm: VocabParallel, history: GroupHistory) -> _LocalView:
        config, weight, head = call.config, call.weight, None
        try:
            head = _head_of(call)
            check_arguments(call, comm)
            settled = None
            if comm.group is not None and not history.compares(head, config.debug_checks):
                settled = history.heads.get(head)
            if settled is not None:
                without = settled.facts["without_scaled_exp"]
                choice = _choose(call, choose.NOT_ON_EVERY_RANK if without else "")
                return _LocalView(None, head, settled, choice, settled.facts)
            here = choose.why_not_here(config, call.hidden, weight)
            here = here or call.other_targets.why_not_here(config)
            choice = _choose(call, here)
        except (TypeError, ValueError, ImportError) as error:
            return _LocalView(error, head, facts=_NO_FACTS)
        accumulator = kind_of(call.open_grad_weight) if weight.requires_grad else "none"
        facts = {
            "device": _DEVICES.index(device_in_plans(call.hidden.device)),
            # Index, cheapest first, so that MAX over ranks is safe; "none" is so on all ranks or on none.
            "wgrad_accumulator": head_bytes.WGRAD_ACCUMULATORS.index(accumulator),
            "without_scaled_exp": int(bool(here)),
        }
        return _LocalView(None, head, None, choice, facts)


def _head_of(call: Call) -> Hashable | None:
    """What a head is to its group's history; None for a weight that is none.

    A rank whose other arguments are bad compares a head's first call with the others.
    """
    weight = call.weight
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return (
        call.head.number,
        weight.shape,
        weight.dtype,
        weight.requires_grad,
        call.config.logits_backend,
        call.other_targets.of_head(),
    )


def check_arguments(call: Call, comm: VocabParallel) -> None:
    """Check what this rank was called with, by itself.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if call.caller_error is not None:
        raise call.caller_error
    check_call(
        call.hidden,
        call.weight,
        call.labels,
        call.token_weights,
        call.vocab_start,
        comm.num_parts,
        comm.size,
    )
    check_requested(
        call.config,
        call.weight,
        comm.size,
        call.outputs,
        dict(call.terms),
        call.other_targets.outputs,
    )
    check_temperature(call.temperature, call.labels)
    call.other_targets.check(call, comm.size)
    if comm.sequence_parallel and not call.reduce_grad_hidden:
        raise ValueError(
            "sequence_parallel=True gives every rank the gradient of its own tokens, summed over the "
            "ranks; reduce_grad_hidden=False is for hidden states that the caller has gathered"
        )
    needs_grad = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    if call.config.strategy == "grad_in_forward" and call.token_weights is None and needs_grad:
        raise ValueError(
            "strategy 'grad_in_forward' makes the gradients in the forward and needs token_weights, the "
            "weights that the loss will be multiplied by; give them, or use 'store' or 'recompute'"
        )
    _must_agree(call)  # over one rank, too, where nothing is compared


def _choose(call: Call, why_not_here: str) -> tuple[LogitsBackend, str]:
    others = call.other_targets
    requested = Requested(
        _loss_of(call), call.differentiable, call.terms, others.beyond_scaled_exp, others.saves_logits_for
    )
    return choose.choose(call.config, call.hidden, call.weight, requested, why_not_here)


#: Devices that plans differ on; of ranks with several the last one counts.
_DEVICES = ("cpu", "Hopper", "other GPU")

#: What depends on this rank's machine and memory, and plans on it (see :func:`.parallel.compare`).
_NO_FACTS = {"device": 0, "wgrad_accumulator": 0, "without_scaled_exp": 0}


@lru_cache(maxsize=16)
def device_in_plans(device: torch.device) -> str:
    """:attr:`.PlanInputs.device`, one of three."""
    if device.type != "cuda":
        return "cpu"
    return "Hopper" if torch.cuda.get_device_capability(device)[0] == 9 else "other GPU"


def _plan(
    call: Call, comm: VocabParallel, settled: Settled, logits: LogitsBackend, promise_broken: bool
) -> planner.Plan:
    config = call.config
    bound = _loss_of(call).bound
    # Else how large fp16's gradients are is known after the forward.
    in_forward = call.hidden.dtype != torch.float16 or (bound is not None and bound <= 1 + 1e-6)
    if config.strategy == "grad_in_forward" and not in_forward:
        config = replace(config, strategy="auto")
    inputs = head_bytes.PlanInputs(
        config=config,
        num_tokens=call.hidden.shape[:-1].numel() * comm.num_parts,
        hidden_size=call.hidden.shape[-1],
        # Of the largest shard: ranks with unequal ones cut their tokens alike.
        num_rows=max(settled.shard_sizes),
        dtype=str(call.hidden.dtype).removeprefix("torch."),
        num_parts=comm.num_parts,
        tp_size=comm.size,
        wgrad_accumulator=head_bytes.WGRAD_ACCUMULATORS[settled.facts["wgrad_accumulator"]],
        token_weights_known=in_forward
        and call.token_weights is not None
        and not (call.differentiable or config.skip_zero_upstream or call.later is not None),
        promise_broken=promise_broken,
        logits_backend=logits.name,
        saves_logits=logits.saves_logits,
        device=_DEVICES[settled.facts["device"]],
        uses_in_flight=call.uses_in_flight,
        uses_later=0 if call.later is None else call.uses_later,
        **call.other_targets.in_plan(),
    )
    return planner.plan(inputs)


def _vocab_start(call: Call, comm: VocabParallel, settled: Settled) -> int:
    if call.vocab_start is not None or comm.size == 1:
        return call.vocab_start or 0
    return sum(_all_sizes(comm, settled, "vocab_start")[: comm.rank])


def _num_classes(call: Call, comm: VocabParallel, settled: Settled) -> int:
    """Classes of the whole vocabulary; 0 where nothing asks for them: the config's terms do by their sum."""
    if call.config.true_vocab_size is not None:
        return call.config.true_vocab_size
    if not (call.terms or "logit_sum" in _loss_of(call).needs):
        return 0
    return sum(_all_sizes(comm, settled, "config.true_vocab_size"))


def _loss_of(call: Call) -> Term:
    own = dict(call.terms)
    return own["loss"] if "loss" in own else loss_of(call.config, call.other_targets.loss)


def _all_sizes(comm: VocabParallel, settled: Settled, instead: str) -> tuple[int, ...]:
    if len(settled.shard_sizes) < comm.size:
        raise RuntimeError(
            "a head is called for the first time while a CUDA graph is captured, when the ranks cannot "
            f"compare their shards; run one step before the capture, as warm-up does, or give {instead}"
        )
    return settled.shard_sizes


def _must_agree(call: Call) -> dict[str, str]:
    """What must be equal on every rank, in words, by the name that an error gives it."""
    words = {"grad mode": _grad_mode(call)}
    words |= {name: _in_words(getattr(call, name)) for name in _AGREED}
    words["labels or teacher"] = words.pop("other_targets")
    words["terms"] = ", ".join(f"{name} {term.in_words()}" for name, term in call.terms)
    rows_differ = call.weight[:0] if isinstance(call.weight, Tensor) else None
    words["weight"] = _in_words(rows_differ)
    words["vocab_start given"] = str(call.vocab_start is not None)
    return words | {name: in_words(value) for name, value in vars(call.config).items()}


def _grad_mode(call: Call) -> str:
    if not (call.hidden.requires_grad or call.weight.requires_grad):
        return "no operand requires a gradient"
    return "on" if torch.is_grad_enabled() else "off"


def _in_words(value: Any) -> str:
    """Text that is compared across ranks, for tensors dtype, shape and requires_grad."""
    if isinstance(value, OtherTargets):
        return ", ".join(f"{name} {_in_words(given)}" for name, given in value.arguments.items())
    if not isinstance(value, Tensor):
        return in_words(value)
    grad = ", requires grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{grad}"


def compared(
    call: Call,
    comm: VocabParallel,
    error: Exception | None,
    of_rank: dict[str, int] | None = None,
    more: dict[str, int] | None = None,
) -> Settled:
    """This call's arguments compared over the ranks of its group; ``error``: what this rank found wrong.

    ``of_rank``, collectives and errors are those of :func:`.parallel.compare`; ``more`` must be equal
    on every rank, too. With ``config.debug_checks`` then those of :func:`.parallel.compare_numbers`, for all
    tensors with a number for each token.
    """
    assert comm.group is not None
    shard = Shard(None, 0)
    same: dict[str, str] = {}
    if error is None:
        shard = Shard(call.vocab_start, call.weight.shape[0])
        same = _must_agree(call) | {name: str(value) for name, value in (more or {}).items()}
    settled = compare(comm.group, same, of_rank or {}, shard, call.config.true_vocab_size, error)
    if call.config.debug_checks:
        others = call.other_targets
        per_token = {
            **{"labels": call.labels, "token_weights": call.token_weights, "temperature": call.temperature},
            **{name: others.arguments[name] for name in others.per_token},
        }
        compare_numbers(per_token, comm.group)
    return settled
