"""Blocks the optimizer step when gradients are known to be wrong.

``grad_in_forward`` builds its gradients in the forward, for token weights ``w`` known there, and scales them
in the backward by one number ``c``. That is right only if the upstream gradient is ``g = c * w``, token by
token. :func:`fit_scalar` finds ``c`` and whether that holds, on the device; :meth:`Guard.record_mismatch`
sets a flag there, which outlives steps and CUDA graphs; :func:`raise_if_mismatch` reads it before a parameter
changes, where the host waits anyway. The host waits in neither forward nor backward.

A :class:`Guard` belongs to the model with the head and stops that model's optimizers alone. Heads called
without a model share :data:`WITHOUT_MODEL`, which stops every optimizer.

NaN gradients instead of a flag would go unnoticed: Megatron's NaN check is off in the first iteration, under
fp16's dynamic loss scale (which skips such steps silently, for ever) and in full-iteration CUDA graphs. Where
it is on, it blames the hardware.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

#: Largest relative difference of one token's ``g`` from ``c * w``. A multiplication in fp32 rounds by 2**-24;
#: Megatron's loss has one per token (scalars cancel in ``c``), another loss perhaps eight, in another order
#: than its weights': 2**-21, and ``c``, a mean of such ratios, as much again. Compared token by token, not in
#: norm, so that one wrong token in a million is seen.
RTOL = 2.0**-20

#: Gradients below fp32's smallest normal number may have been flushed to zero on their way.
ATOL = 2.0**-126

_FIX = (
    "use --fused-ce-strategy store or recompute (FusedCEConfig(strategy=...)), which are exact for any "
    "upstream gradient, or pass the weights that the loss uses"
)

#: Message of a CUDA graph's assertion; torch takes at most 254 characters there.
_ASSERTION = "fused-ce grad_in_forward: upstream gradient is not a scalar times the token weights; " + _FIX


class UpstreamMismatch(RuntimeError):
    """The loss's upstream gradient was not a scalar times the token weights given to ``grad_in_forward``."""


class AbandonedGradient(RuntimeError):
    """A gradient buffer holds a failed backward's partial sum and was not zeroed since."""


@dataclass
class _Flag:
    """The flags of one device. ``seen``, bool [2]: a fitting upstream gradient was seen, a mismatching one
    was."""

    seen: Tensor
    in_graph: bool = False  # a CUDA graph writes it: its replays do so without calling `record_mismatch`
    unread: bool = False


class Guard:
    """Remembers mismatches of one model's heads, for the optimizers of that model."""

    def __init__(self, heads: str, modules: Iterable[torch.nn.Module] = ()) -> None:
        """
        Args:
            heads: their name in the error.
            modules: with the model's parameters (held weakly); none: stop every optimizer.
        """
        self.heads = heads
        self.number = next(_numbers)  # unlike id(), never reused
        self.set_modules(modules)
        #: Whether a head may use ``grad_in_forward``: False once all ranks know that none does.
        self.allowed = True
        #: Whether a head will use it, even if none has so far.
        self.expected = False
        self._flags: dict[torch.device, _Flag] = {}
        _guards.add(self)

    def set_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]

    def modules(self) -> list[torch.nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def used(self) -> bool:
        """Whether a head of this rank has called :meth:`prepare`."""
        return bool(self._flags)

    @torch.no_grad()
    def prepare(self, device: torch.device) -> None:
        """Create the flag of ``device`` and hook the optimizers, unless that was done before.

        Raises:
            RuntimeError: a CUDA graph is being captured and there is no flag yet. A flag created in the graph
            would be reset by each replay.
        """
        _hook_optimizers()
        if device in self._flags:
            return
        if _captures(device):
            raise RuntimeError(
                "strategy grad_in_forward is used for the first time while a CUDA graph is captured; run one "
                "step before the capture, as torch's and Megatron's warm-up do, or use strategy store or "
                "recompute"
            )
        self._flags[device] = _Flag(torch.zeros(2, dtype=torch.bool, device=device))

    @torch.no_grad()
    def record_mismatch(self, mismatch: Tensor) -> None:
        """Remember ``mismatch`` (bool, one element, on any device) until :func:`raise_if_mismatch` reads it.

        The host does not wait. The call may be captured in a CUDA graph, after one call outside
        (:meth:`prepare`); each replay then records anew. From the first call on every ``torch.optim``
        optimizer calls :func:`raise_if_mismatch` before it steps, and so do apex's and Transformer Engine's.
        Other code that changes parameters must call it itself.

        Call it in the backward, on its stream, before the gradients are returned: the synchronization that
        orders them before an optimizer then orders the flag too.
        """
        device = mismatch.device
        self.prepare(device)
        flag = self._flags[device]
        flag.unread = True
        flag.in_graph = flag.in_graph or _captures(device)
        # A write without a read: two streams that write at once cannot lose a True.
        flag.seen.index_fill_(0, mismatch.reshape(1).long(), True)

    @torch.no_grad()
    def mismatch_on(self, device: torch.device) -> Tensor:
        """int32 [1] on ``device``: 1 after a mismatch. The host waits for none on the same device."""
        seen = [flag.seen[1:].to(device, torch.int32) for flag in self._flags.values()]
        return torch.cat(seen).amax(0, keepdim=True) if seen else _zero(device)

    def read(self) -> bool:
        """Whether a mismatch was recorded; the host waits if anything was recorded since the last call."""
        mismatch = False
        for flag in self._flags.values():
            if flag.unread or flag.in_graph:
                flag.unread = bool(flag.seen[1].item())
                mismatch = mismatch or flag.unread
        return mismatch

    def clear(self) -> None:
        for flag in self._flags.values():
            flag.seen.zero_()
            flag.unread = False

    def flag_on(self, device: torch.device) -> Tensor | None:
        """This device's mismatch flag, bool ``[]``; None before :meth:`prepare`."""
        flag = self._flags.get(device)
        return None if flag is None else flag.seen[1]

    def stops(self, stepped: list[Tensor] | None, complete: bool) -> bool:
        """Whether an optimizer of these parameters belongs to this guard's model.

        Args:
            stepped: the parameters; None if unknown. True if there are none (a frozen stage).
            complete: they are the models' own; else they may be copies that cannot be traced back.
        """
        if not self._modules or not stepped:
            return True
        if _any_in(stepped, self.modules()):
            return True
        if complete:
            return False
        others = [module for guard in _guards if guard is not self for module in guard.modules()]
        return not _all_in(stepped, others)


_numbers = itertools.count()
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()

#: Guard of heads that are called without a model.
WITHOUT_MODEL = Guard("a head without a model")

_poisoned: list[weakref.ref[Tensor]] = []
_hooked = False


class _Stepping(threading.local):
    """For this thread: the model parameters that an optimizer wrapped around torch's is stepping."""

    parameters: Callable[[], list[Tensor] | None] | None = None


_stepping = _Stepping()


@contextmanager
def stepping(parameters: Callable[[], list[Tensor] | None]) -> Iterator[None]:
    """Inside, :func:`raise_if_mismatch` calls ``parameters`` for the models' own parameters, of which torch's
    optimizer may hold copies; it returns None if it does not know them.
    """
    before, _stepping.parameters = _stepping.parameters, parameters
    try:
        yield
    finally:
        _stepping.parameters = before


@torch.no_grad()
def fit_scalar(grad_loss: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the scalar ``c`` of ``grad_loss = c * token_weights``, and tell whether it does not fit.

    ::

        c = sum(g * w) / sum(w * w)              # 0 where all weights are 0, which needs g = 0
        mismatch = any(|g - c * w| > RTOL * |c * w| + ATOL)

    in fp64, whose products of fp32 numbers are exact. An upstream gradient with an inf or NaN in it
    (fp16's loss scale has overflowed) is no mismatch: ``c`` is then NaN, for Megatron's own check to
    find in the gradients. Runs no collective; the host does not wait.

    Args:
        grad_loss: upstream gradient of the per-token loss, any shape, float.
        token_weights: the same shape, any float dtype, any values (not only 0 and 1).

    Returns:
        ``c``: fp32 []. ``mismatch``: [], bool or 0 and 1.

    Raises:
        ValueError: the shapes differ.
    """
    if grad_loss.shape != token_weights.shape:
        raise ValueError(
            f"grad_loss has shape {tuple(grad_loss.shape)} and token_weights "
            f"{tuple(token_weights.shape)}; expected one weight for each token's gradient"
        )
    if grad_loss.is_cuda and grad_loss.dtype == token_weights.dtype == torch.float32:
        from megatron_fused_ce.kernels import upstream_kernels

        return upstream_kernels.fit_scalar(grad_loss.contiguous(), token_weights.contiguous(), RTOL, ATOL)
    g, w = grad_loss.double(), token_weights.double()
    norm = (w * w).sum()
    c = torch.where(norm > 0, (g * w).sum() / norm, 0.0)
    expected = c * w
    # `<=` and not `>`: a NaN among the weights must not pass.
    fits = ((g - expected).abs() <= RTOL * expected.abs() + ATOL).all()
    finite = torch.isfinite(g).all()
    return torch.where(finite, c, torch.nan).float(), finite & ~fits


@torch.no_grad()
def poison(buffer: Tensor) -> None:
    """Fill a gradient buffer with NaN and let no optimizer step before it is zeroed.

    Every ``torch.optim`` optimizer calls :func:`raise_if_mismatch` from then on, as with
    :meth:`Guard.record_mismatch`.
    """
    _hook_optimizers()
    _poisoned.append(weakref.ref(buffer))
    buffer.fill_(torch.nan)


@torch.compiler.disable
def raise_if_mismatch(stepped: list[Tensor] | None = None) -> None:
    """Raise if a mismatch was remembered since the last call. The host waits for the device.

    Raise too as long as a poisoned buffer has not been zeroed.

    Returns at once where nothing was remembered. While a CUDA graph is captured (an optimizer step's,
    say) it captures a device-side assertion instead, which ends the process in a replay that meets a
    mismatch.

    Args:
        stepped: parameters about to change; None: any. Mismatches of other models are left for their own
        optimizers.

    Raises:
        UpstreamMismatch: names the head and the fix. The flag is cleared but the gradients are still wrong: a
        caller that goes on must zero them. AbandonedGradient: on each call until the buffer is zeroed.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        here = torch.device("cuda", torch.cuda.current_device())
        for guard in _stopping(list(_guards), stepped):
            seen = guard.flag_on(here)
            if seen is not None:
                torch._assert_async(~seen, _ASSERTION)  # type: ignore[call-overload]
        return  # flags of other devices are read at the next call outside a capture
    if _poisoned:
        _raise_if_poisoned()
    wrong = [guard for guard in list(_guards) if guard.read()]
    if wrong and (wrong := _stopping(wrong, stepped)):
        for guard in wrong:
            guard.clear()
        heads = ", ".join(sorted(guard.heads for guard in wrong))
        raise UpstreamMismatch(
            f"the upstream gradient of the per-token loss of {heads} is not a scalar times the token weights "
            "that strategy grad_in_forward was given in the forward (under Megatron: the loss_mask that the "
            f"model was called with), so its gradients are wrong; they were not applied. To go on: {_FIX}"
        )


def _stopping(guards: list[Guard], stepped: list[Tensor] | None) -> list[Guard]:
    """Those that belong to a model about to be stepped."""
    complete = _stepping.parameters is not None
    if _stepping.parameters is not None:
        stepped = _stepping.parameters()
    return [guard for guard in guards if guard.stops(stepped, complete)]


def _raise_if_poisoned() -> None:
    buffers = [buffer for ref in _poisoned if (buffer := ref()) is not None]
    full = [buffer for buffer in buffers if bool(buffer[(0,) * buffer.dim()].isnan())]
    _poisoned[:] = [weakref.ref(buffer) for buffer in full]
    if full:
        raise AbandonedGradient(
            f"a main_grad of {tuple(full[0].shape)} holds NaN in place of what a backward that failed had "
            "added to it; zero the gradients (Megatron: zero_grad_buffer() of its DDP) and run the step again"
        )


def _hook_optimizers() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: object, args: object, kwargs: object) -> None:
    """Called by torch before every optimizer step."""
    groups = getattr(optimizer, "param_groups", None)
    raise_if_mismatch(None if groups is None else [one for group in groups for one in group["params"]])


def _any_in(tensors: list[Tensor], modules: list[torch.nn.Module]) -> bool:
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return any(id(tensor) in ids for tensor in tensors)


def _all_in(tensors: list[Tensor], modules: list[torch.nn.Module]) -> bool:
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return all(id(tensor) in ids for tensor in tensors)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
