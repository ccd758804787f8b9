"""The spec of a call: everything that follows from its shapes, dtypes, options and group.

The first call of a kind is checked and compared over the ranks; then the logits backend is chosen, and the
planner cuts the tokens into chunks. The resulting :class:`Spec` is cached, and later calls of that kind look
it up. It holds no tensors but constants of the outputs: weights and activations move from call to call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.agree import compared
from megatron_fused_ce.head.call import NOTHING_ELSE, Call
from megatron_fused_ce.head.promise import HeadOfGroup
from megatron_fused_ce.head.tokens import Tokens
from megatron_fused_ce.head.validation import check_arguments
from megatron_fused_ce.logits import LogitsBackend, choose
from megatron_fused_ce.logits.choose import Requested
from megatron_fused_ce.losses.label import loss_of
from megatron_fused_ce.losses.outputs import OF_SHARD, Outputs
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.planner import choose as planner
from megatron_fused_ce.planner import memory
from megatron_fused_ce.ranks.agreement import GroupHistory, Settled, check_true_vocab_size, history_of
from megatron_fused_ce.ranks.collectives import VocabParallel

#: Specs that a group keeps. A training run has a few kinds of call; dynamic batches have one for each length.
MAX_SPECS = 512

#: Fields of a call that its spec depends on: of tensors shape, stride, dtype, device and requires_grad, of
#: options the value.
_tensors_of = attrgetter("hidden", "weight", "labels", "token_weights", "temperature")
_options_of = attrgetter(
    *("sequence_parallel", "vocab_start", "config", "outputs", "differentiable", "terms", "zero_unknown"),
    *("reduce_grad_hidden", "with_argmax", "uses_in_flight", "may_store", "head"),
)


class Spec(NamedTuple):
    """Everything that depends on the kind of a call, not on its numbers."""

    comm: VocabParallel
    plan: planner.Plan
    tokens: Tokens  # all tokens of the call, before any is skipped
    logits: LogitsBackend  # with outputs and scale of this kind of call
    why_not_scaled_exp: str
    copies: tuple[bool, bool]  # whether the backend must copy hidden states or weight to load them
    vocab_start: int
    grad_hidden: bool  # whether the hidden states get a gradient
    grad_weight: bool  # whether the weight does
    needs_grad: bool  # whether one of them does
    #: the strategy: the first ``num_stored`` chunks keep their logits; gradients are made in the forward; one
    #: GEMM over all tokens makes grad_weight
    num_stored: int
    in_forward: bool
    wgrad_at_once: bool
    #: whether the hidden states gathered last are kept for the backward
    keeps_last: bool
    #: whether the backward makes logits of some chunk again, from labels and statistics
    remakes: bool
    head: HeadOfGroup
    history: GroupHistory

    def promise_was_broken(self) -> None:
        """Plan later calls of this head without token weights, and tell the user once."""
        if self.head not in self.history.broken:
            self.history.broken.add(self.head)
            self.history.forget_specs()  # they rely on the promise
            self.head.tell_broken()


def spec_of(call: Call) -> Spec:
    """Look the spec of a call up, or make it.

    Whether the ranks compare a call depends on what its group has seen, never on whether a spec was found:
    one rank may have dropped its spec, or have a tensor at another alignment.

    Collectives: those of :func:`.agreement.compare`, if :meth:`.GroupHistory.compares` says so.

    Raises:
        TypeError, ValueError: an argument does not fit; on every rank where the call is compared.
    """
    history = history_of(call.tp_group)
    key, num_broken = _key(call), len(history.broken)
    if key is None or history.unequal or call.config.debug_checks:
        return _make(call, history)
    try:
        spec: Spec | None = history.specs.get(key)
    except TypeError:  # an argument cannot be hashed: the checks will say what is wrong with it
        return _make(call, history)
    if spec is None:
        spec = _make(call, history)
        if len(history.broken) == num_broken:  # else the backward of another thread has changed the plans
            history.keep(key, spec, MAX_SPECS)
    return spec


def _key(call: Call) -> Hashable | None:
    """Cache key of a call's spec; None if the spec is not to be cached.

    It is not while a CUDA graph is captured: constants of the outputs would belong to the graph.
    """
    if call.caller_error is not None:
        return None
    hidden, weight, others = call.hidden, call.weight, call.other_targets
    try:
        options = _options_of(call)
        key = (
            *[given if given is None else _kind(given) for given in _tensors_of(call)],
            others if others is NOTHING_ELSE else (type(others), *map(_kind, others.kind)),
            options,
            tuple(map(type, options)),  # True and 1 are equal
            getattr(call.open_grad_weight, "kind", "returned"),
            torch.is_grad_enabled(),
            # The alignment decides whether TMA can load them.
            hidden.data_ptr() % 16,
            weight.data_ptr() % 16,
        )
    except (AttributeError, TypeError, RuntimeError):
        return None  # the checks will say what is wrong
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return key


def _kind(value: Any) -> Hashable:
    """Cache key of one argument; for tensors shape, stride, dtype, device and requires_grad."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def _make(call: Call, history: GroupHistory) -> Spec:
    """Check a call, compare it over the ranks if they must, and make its spec."""
    reduces = call.reduce_grad_hidden
    comm = VocabParallel.of(call.tp_group, call.sequence_parallel, call.config.merge, reduces)
    key = _head_of(call)
    compares = comm.group is not None and history.compares(key, call.config.debug_checks)
    # What the ranks settled at an earlier call of this head, if they do not compare this one.
    earlier = None if compares or comm.group is None else history.heads.get(key)
    error: Exception | None = None
    logits: LogitsBackend | None = None
    try:
        check_arguments(call, comm)
        facts, why_not = _found_here(call) if earlier is None else (earlier.facts, "")
        if facts["without_scaled_exp"] and earlier is not None:
            why_not = choose.NOT_ON_EVERY_RANK
        logits, why_not = _choose(call, why_not)
    except (TypeError, ValueError, ImportError) as wrong:
        error, facts = wrong, _NO_FACTS
    if compares:
        settled = compared(call, comm, error, facts)
    elif error is not None:
        raise error
    else:
        settled = earlier or Settled(facts, (call.weight.shape[0],))
        if comm.size == 1:
            check_true_vocab_size(call.config.true_vocab_size, call.weight.shape[0])
    others, vocab_start = call.other_targets, call.vocab_start or 0
    if call.vocab_start is None and comm.size > 1:
        vocab_start = sum(_all_sizes(comm, settled, "vocab_start")[: comm.rank])
    others.check_shards(call, vocab_start, comm, compares)
    if compares:
        history.remember(key, settled)
    assert logits is not None
    if settled.facts["without_scaled_exp"] and not facts["without_scaled_exp"]:
        logits, why_not = _choose(call, choose.NOT_ON_EVERY_RANK)
    # The shard sizes of all ranks identify a head: another one may have as many rows on this rank.
    head = HeadOfGroup(call.head, settled.shard_sizes, call.weight.shape[1])
    plan = _plan(call, comm, settled, logits, head in history.broken)
    comm = replace(comm, overlap=plan.count > 1)
    logit_scale, softcap = call.config.logit_scale, call.config.logit_softcap
    if not isinstance(call.temperature, Tensor):
        # A temperature that all tokens share divides logits after the softcap, and cap * tanh(z / cap) / t is
        # z / t with the softcap cap / t.
        logit_scale = logit_scale / call.temperature
        softcap = None if softcap is None else softcap / call.temperature
    outputs = _outputs(call, comm, settled, vocab_start, softcap, logits.saves_logits)
    logits = others.backend(call, replace(logits, outputs=outputs, logit_scale=logit_scale, comm=comm))
    grad_hidden = torch.is_grad_enabled() and call.hidden.requires_grad
    grad_weight = torch.is_grad_enabled() and call.weight.requires_grad
    needs_grad = grad_hidden or grad_weight
    remakes = needs_grad and plan.remakes
    return Spec(
        comm=comm,
        plan=plan,
        tokens=Tokens(plan.cut.chunks, comm.num_parts, comm.part, plan.capacity),
        logits=logits,
        why_not_scaled_exp=why_not,
        copies=choose.must_copy(logits, call.hidden, call.weight),
        vocab_start=vocab_start,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        needs_grad=needs_grad,
        num_stored=plan.stored_chunks if needs_grad else 0,
        in_forward=plan.in_forward and needs_grad,
        wgrad_at_once=plan.wgrad_at_once and grad_weight,
        keeps_last=not plan.inputs.promise_broken and (grad_weight or remakes),
        remakes=remakes,
        head=head,
        history=history,
    )


def _outputs(
    call: Call,
    comm: VocabParallel,
    settled: Settled,
    vocab_start: int,
    softcap: float | None,
    saves_logits: bool,  # whether the scaled-exp GEMM saves rounded logits, which its statistics must fit
) -> Outputs:
    """The terms that a call computes for each token, with the options of its logits."""
    config, num_rows, valid_columns = call.config, call.weight.shape[0], None
    if config.true_vocab_size is not None:
        real_columns = min(max(config.true_vocab_size - vocab_start, 0), num_rows)
        valid_columns = torch.full((1,), real_columns, dtype=torch.int64, device=call.hidden.device)
    loss, num_classes = _loss_of(call), config.true_vocab_size or 0
    if not num_classes and (call.terms or "logit_sum" in loss.needs):
        num_classes = sum(_all_sizes(comm, settled, "config.true_vocab_size"))
    return Outputs.of(
        loss,
        (*call.outputs, *(OF_SHARD if call.with_argmax else ())),
        dict(call.terms),
        call.zero_unknown,
        call.other_targets.num_labels,
        softcap=softcap,
        valid_columns=valid_columns,
        rounded=config.logit_precision == "activations" or saves_logits,
        differentiable=call.differentiable,
        equal_to_loss=call.other_targets.equal_to_loss,
        num_classes=num_classes,
    )


def _found_here(call: Call) -> tuple[dict[str, int], str]:
    """Numbers that depend on this rank's machine and memory, named as in :data:`_NO_FACTS`; and why the
    scaled-exp GEMM cannot serve here, empty if it can."""
    why_not = choose.why_not_here(call.config, call.hidden, call.weight)
    why_not = why_not or call.other_targets.why_not_here(call.config)
    trained = call.weight.requires_grad
    accumulator = getattr(call.open_grad_weight, "kind", "returned") if trained else "none"
    facts = {
        "device": _DEVICES.index(device_in_plans(call.hidden.device)),
        # An index, the cheapest first. "none" is so on all ranks or on no rank.
        "wgrad_accumulator": memory.WGRAD_ACCUMULATORS.index(accumulator),
        "without_scaled_exp": int(bool(why_not)),
    }
    return facts, why_not


def _head_of(call: Call) -> Hashable | None:
    """Key of a head in the history of its group; None if its weight is no matrix.

    It reads no other argument, so that a rank with bad ones still compares the head's first call.
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


def _choose(call: Call, why_not_here: str) -> tuple[LogitsBackend, str]:
    """The logits backend of a call, and why it is not ``scaled_exp``: :func:`.choose.choose`."""
    others = call.other_targets
    requested = Requested(
        _loss_of(call), call.differentiable, call.terms, others.beyond_scaled_exp, others.saves_logits_for
    )
    return choose.choose(call.config, call.hidden, call.weight, requested, why_not_here)


#: Devices that plans differ on. Ranks with different ones take the last of them.
_DEVICES = ("cpu", "Hopper", "other GPU")

#: Numbers that may differ between ranks and that plans depend on; all ranks take the largest
#: (:func:`.agreement.compare`), which is safe for each.
_NO_FACTS = {"device": 0, "wgrad_accumulator": 0, "without_scaled_exp": 0}


def device_in_plans(device: torch.device) -> str:
    """Name of a device for :attr:`.PlanInputs.device`, one of three."""
    if device.type != "cuda":
        return "cpu"
    return "Hopper" if torch.cuda.get_device_capability(device)[0] == 9 else "other GPU"


def _plan(
    call: Call, comm: VocabParallel, settled: Settled, logits: LogitsBackend, promise_broken: bool
) -> planner.Plan:
    """Let the planner choose strategy and chunks."""
    dtype = str(call.hidden.dtype).removeprefix("torch.")
    config, in_forward = planner.in_forward(call.config, dtype, _loss_of(call).bound)
    inputs = memory.PlanInputs(
        config=config,
        num_tokens=call.hidden.shape[:-1].numel() * comm.num_parts,
        hidden_size=call.hidden.shape[-1],
        # The largest shard: ranks with unequal shards must cut their tokens alike.
        num_rows=max(settled.shard_sizes),
        dtype=dtype,
        num_parts=comm.num_parts,
        tp_size=comm.size,
        wgrad_accumulator=memory.WGRAD_ACCUMULATORS[settled.facts["wgrad_accumulator"]],
        token_weights_known=in_forward and call.token_weights is not None and not call.differentiable,
        promise_broken=promise_broken,
        may_store=call.may_store and call.token_weights is None,
        logits_backend=logits.name,
        saves_logits=logits.saves_logits,
        device=_DEVICES[settled.facts["device"]],
        uses_in_flight=call.uses_in_flight,
        **call.other_targets.in_plan(),
    )
    return planner.plan(inputs)


def _loss_of(call: Call) -> Term:
    """The term of the loss: the caller's own, or that of config and targets."""
    own = dict(call.terms)
    return own["loss"] if "loss" in own else loss_of(call.config, call.other_targets.loss)


def _all_sizes(comm: VocabParallel, settled: Settled, instead: str) -> tuple[int, ...]:
    """Rows of every shard; ``instead`` is the argument that would make them needless.

    Raises:
        RuntimeError: the ranks have not compared them.
    """
    if len(settled.shard_sizes) < comm.size:
        raise RuntimeError(
            "a head is called for the first time while a CUDA graph is captured, when the ranks cannot "
            f"compare their shards; run one step before the capture, as warm-up does, or give {instead}"
        )
    return settled.shard_sizes
