"""Deferred logits: the output layer's result, from which the loss is computed without logits.

Megatron's models call the output layer, perhaps scale the result, and only then call the loss with labels;
with multi-token prediction the labels are rolled in between. The layer therefore returns a
:class:`DeferredLogits`. The loss evaluates it fused; any other use turns it into real logits.

Only for callers that are known (:mod:`.caller`): all others get Megatron's own logits. Without labels
Megatron transposes the logits and returns them. They stay deferred only where their caller is known to need
log-probabilities (:func:`.returned_to_caller`, :func:`.switch.enable`), and remember transpose, slice of
positions, dtype and scale until its log-softmax evaluates them.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import requests
from megatron_fused_ce.adapter.layer_call import LayerCall
from megatron_fused_ce.adapter.requests import MaxAndIndices
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.adapter.token_weights import TokenWeights
from megatron_fused_ce.config import FusedCEConfig

#: Attributes of the sum or mean of all logits.
_OF_TOTAL = {"shape": torch.Size(()), "for_caller": False, "_is_total": True}


class DeferredLogits:
    """Logits ``[s, b, V]`` that have not been computed.

    Reading ``shape``, ``dtype``, ``device`` costs nothing. Remembered are a product with a number and, of
    logits for the caller, ``transpose(0, 1)``, ``contiguous()``, ``float()``, ``squeeze(0)``, a slice of
    positions (then ``[b, s, V]``), ``sum()`` and ``mean()``. After a loss the maximum over the last dimension
    comes from its evaluation. Everything else makes the logits real, once, by Megatron's own layer, and
    counts it. From then on real ones are used for everything, since any of them may share memory with others
    and be changed in place.

    Args:
        call: makes the logits, or a loss without them.
        shape: of the requested logits; ``V`` is this rank's part, or the whole vocabulary if gathered.
        dtype: of the logits; None for the hidden states'.
        for_caller: stay deferred when the model returns them; gathered ones always do.
        needs_grad: real logits would carry a gradient.
    """

    def __init__(
        self,
        call: LayerCall,
        shape: torch.Size,
        dtype: torch.dtype | None = None,
        for_caller: bool = False,
        needs_grad: bool = True,
    ) -> None:
        self.call = call
        self.shape = shape
        self.dtype = dtype or call.hidden.dtype
        self.for_caller = call.gathered or for_caller
        #: Product of all factors so far: MuP's output multiplier, 1 / temperature.
        self.logit_scale = 1.0
        self._batch_first = False
        self._squeezed = False  # of a batch of one, [s, V]
        self._batch = (shape[1], shape[0])  # (b, s) of the call
        self._positions = range(shape[0])  # positions that are left after slicing
        #: what these were made of, and how; None for the layer's own, and once these are real
        self._made_by: tuple[DeferredLogits, Callable[[Any], Any]] | None = None
        #: all that were made of the same call, in their order, with the call's own
        self._family: list[weakref.ref[DeferredLogits]] = [weakref.ref(self)]
        #: of that call: log-probabilities of an evaluation that left no token out
        self._of_all: list[Tensor] = []
        self._is_total = False  # the sum or mean of all
        self._needs_grad = needs_grad
        self._top: MaxAndIndices | None = None  # of a loss
        self._real: Tensor | None = None

    def _after(self, step: Callable[[Any], Any], **changed: Any) -> Any:
        """These logits after one more step, with the attributes ``changed``; real if these are."""
        if changed.get("_needs_grad", self._needs_grad):
            self._refuse_without_grad_mode()
        if self._real is not None:
            return step(self._real)
        after = copy.copy(self)
        vars(after).update(changed)
        after._made_by = self, step
        after._top = None
        self._family.append(weakref.ref(after))
        return after

    @property
    def is_real(self) -> bool:
        """Whether the logits were materialised, and may have been changed in place."""
        return self._real is not None

    def _grad_mode(self) -> torch.set_grad_enabled:
        """Grad mode in which a loss has a gradient where that of real logits would have one."""
        return torch.set_grad_enabled(self._needs_grad and torch.is_grad_enabled())

    @property
    def config(self) -> FusedCEConfig:
        """The call's config, with the scale that the logits have got since.

        A softcap around the layer comes before the scale, the config's own after it:
        ``s * cap * tanh(z / cap)`` is the softcap ``s * cap`` of ``s * z``.
        """
        config, scale = self.call.config, self.logit_scale
        if self.call.softcap:
            config = replace(config, logit_softcap=self.call.softcap * abs(scale))
        return config if scale == config.logit_scale else replace(config, logit_scale=scale)

    def _ask(self, request: requests.Request, *given: Any) -> requests.Answer:
        """The answer to a request: an evaluation without logits, with a gradient as from real ones."""
        with self._grad_mode():
            answer = self.call.ask(request, self.config, *given)
        counters().fused += 1
        return answer

    def loss(self, labels: Tensor, token_weights: TokenWeights) -> Tensor:
        """Losses ``[b, s]`` of labels ``[b, s]``."""
        loss, self._top = self._ask(requests.losses, labels, token_weights)
        return loss

    def divergence(self, teacher: DeferredLogits, kind: str, temperature: float) -> Tensor:
        """Divergences fp32 ``[b, s]`` from the softmax of ``teacher``, another model's logits for the same
        tokens; whole on every rank."""
        with self._grad_mode():
            _, given = teacher.call.ask(requests.teacher, teacher.config, kind)
        weights = self.call.token_weights
        return self._ask(requests.divergences, self._batch, given, temperature, weights)[0]

    def log_probs(
        self,
        labels: Tensor,
        entropy: str = "none",
        active_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """``log_softmax(self)`` at ``labels`` ``[b, n]``, without logits; None if real logits are needed.

        They have a gradient if the layer was called with one, even if the caller's ``no_grad`` has ended.

        Args:
            labels: global ids, one for each of the ``n`` positions that are left; ``[n]`` after ``squeeze``.
            entropy: of the softmax too: ``none``, ``detached`` or ``differentiable``.
            active_mask: bool, in the labels' shape, as of :func:`.rl.token_log_probs`.

        Returns:
            Log-probability and entropy in the labels' shape and the dtype of these logits.

        Raises:
            ValueError: the head has options that make another loss than the plain one.
        """
        if self.is_real or not self.for_caller or not self._batch_first or labels.shape != self.shape[:-1]:
            return None
        left = slice(self._positions.start, self._positions.stop, self._positions.step)

        def everywhere(given: Tensor) -> Tensor:
            """All positions: sequence parallelism needs a multiple of its ranks."""
            batched = given.unsqueeze(0) if self._squeezed else given
            whole = batched.new_zeros(self._batch)
            whole[:, left] = batched
            return whole

        # What is sliced off gets the upstream gradient 0.
        active = None if active_mask is None else everywhere(active_mask)
        made = self._ask(requests.log_probs, everywhere(labels), entropy, active)
        if active is None:
            self._of_all[:] = made[:1]
        with self._grad_mode():
            # Not views: pipeline schedules free the tensors that they send.
            log_prob, of_entropy = (
                None if x is None else x[:, left].reshape(labels.shape).to(self.dtype, copy=True)
                for x in made
            )
        assert log_prob is not None
        return log_prob, of_entropy

    def log_probs_of(
        self,
        cut: Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]],
        entropy: str = "none",
    ) -> list[list[Tensor] | None]:
        """:meth:`log_probs` for a caller who cuts logits ``[b, s, V]`` into samples, with one evaluation.

        Tokens of no sample take part in no GEMM.

        Args:
            cut: gives a sample's rows ``[n, 1]`` of what stands for the logits, ``[b, s, 1]`` in fp32, and
                the labels ``[n]`` of these rows, sample by sample. The labels of no rows are not read: they
                are often ``tokens[-n:]``, which are all of them.

        Returns:
            log-probabilities of each sample, ``[n]``, and entropies or None; NaN where two samples have
            another label for one row.

        Raises:
            ValueError: a sample with another number of labels than of rows.
        """
        shape = self.shape[:-1]
        numbers = torch.arange(shape.numel(), dtype=torch.float32, device=self.device)  # exact below 2**24
        cuts = [(rows.flatten().long(), labels) for rows, labels in cut(numbers.view(*shape, 1))]
        sizes = [len(rows) for rows, _ in cuts]
        given = [labels if len(rows) else labels[:0] for rows, labels in cuts]
        if sizes != [len(labels) for labels in given]:
            raise ValueError(f"samples have {sizes} rows and {[len(labels) for labels in given]} labels")
        where, ids = torch.cat([rows for rows, _ in cuts]), torch.cat(given).long()
        everywhere = ids.new_zeros(shape.numel(), dtype=torch.int64)
        everywhere.scatter_reduce_(0, where, ids, "amax", include_self=False)  # of two the same on all ranks
        shared = everywhere[where] != ids  # a row with the label of another sample
        active = None
        if len(where) < len(everywhere):
            active = torch.zeros(shape, dtype=torch.bool, device=self.device)
            active.view(-1)[where] = True
        made = self.log_probs(everywhere.view(shape), entropy, active)
        if made is None:
            raise RuntimeError("log_probs_of needs deferred logits [b, s, V] as the model returned them")
        of_samples = [None if x is None else x.flatten()[where].masked_fill(shared, torch.nan) for x in made]
        return [None if x is None else list(x.split(sizes)) for x in of_samples]

    def materialise(self) -> Tensor:
        """Real logits, as Megatron's layer computes them, once.

        Raises:
            RuntimeError: they need a gradient, and grad mode is off, as inside an autograd function: whatever
            is made of them there would have none, without an error.
        """
        self._refuse_without_grad_mode()
        if self._real is None:
            # Now, as they are before anything is changed in place.
            for reference in self._family:
                if (member := reference()) is not None:
                    member._computed()
        return self._computed()

    def _refuse_without_grad_mode(self) -> None:
        if self._needs_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "deferred logits of the fused head are used where no gradient is recorded (torch.no_grad, or "
                "inside an autograd function), and the head was called with gradients: a loss made of them "
                "would have none. For a metric take logits.detach(); for a loss logits.clone(), or "
                "megatron_fused_ce.rl.token_log_probs, or leave --fused-chunked-ce out"
            )

    def _computed(self, keeps: bool = True) -> Tensor:
        """Real logits; ``keeps`` them, and those that they are made of, for all later uses."""
        if self._real is not None:
            return self._real
        with torch.set_grad_enabled(self._needs_grad):
            if self._made_by is None:
                counters().materialised += 1
                made = self.call.logits()
            else:
                before, step = self._made_by
                made = step(before._computed(keeps))
        if keeps:
            self._real, self._made_by = made, None
        return made

    # Costs nothing.

    @property
    def device(self) -> torch.device:
        return self.call.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # Remembered.

    def __mul__(self, other: Any) -> Any:
        if self._is_total and not self.is_real and isinstance(other, (int, float)) and other == 0:
            return self._zero()
        if not _is_scale(other):
            return self.materialise() * other
        return self._after(lambda real: real * other, logit_scale=self.logit_scale * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not _is_scale(other):
            return self.materialise() / other
        return self._after(lambda real: real / other, logit_scale=self.logit_scale / other)

    def _step(self, remembers: bool, name: str, given: Any, named: Any, **changed: Any) -> Any:
        """What this method gives: these logits after one more step, or what real ones give."""
        if not (remembers and self.for_caller) or named:
            return getattr(self.materialise(), name)(*given, **named)
        return self._after(operator.methodcaller(name, *given), **changed)

    def transpose(self, *dims: Any, **named: Any) -> Any:
        swaps = len(self.shape) == 3 and {dim % 3 for dim in dims} == {0, 1}
        shape = torch.Size((*self.shape[1::-1], *self.shape[2:]))
        return self._step(swaps, "transpose", dims, named, shape=shape, _batch_first=not self._batch_first)

    def squeeze(self, *dim: Any, **named: Any) -> Any:
        squeezes = self._batch_first and not self._squeezed and dim == (0,) and self.shape[0] == 1
        return self._step(squeezes, "squeeze", dim, named, shape=self.shape[1:], _squeezed=True)

    def sum(self, *dim: Any, **named: Any) -> Any:
        return self._step(not dim, "sum", dim, named, **_OF_TOTAL)

    def mean(self, *dim: Any, **named: Any) -> Any:
        return self._step(not dim, "mean", dim, named, **_OF_TOTAL)

    def contiguous(self, **named: Any) -> Any:
        return self._step(True, "contiguous", (), named)

    def float(self, **named: Any) -> Any:
        return self._step(True, "float", (), named, dtype=torch.float32)

    def detach(self) -> Any:
        """These logits without a gradient, wherever they are used."""
        return self._after(operator.methodcaller("detach"), _needs_grad=False)

    @property
    def requires_grad(self) -> bool:
        return self._needs_grad

    def _zero(self) -> Tensor:
        """0 times the sum of all logits, without them: NaN where a token's are NaN or +inf, else 0.

        Frameworks add it to their loss, so that every rank has a backward. It is 0 times log-probabilities of
        an evaluation, or losses from a pass of its own (not kept: a checkpoint that runs the loss again
        counts what it saves), whose backward goes where that of real logits does.
        """
        with self._grad_mode():
            needs_grad = self._needs_grad and torch.is_grad_enabled()
            made = next((x for x in self._of_all if x.requires_grad >= needs_grad), None)
            if made is None:
                made = self._ask(requests.zeros, self._batch)[0]
            return (0.0 * made.sum()).to(self.dtype)

    def __getitem__(self, index: Any) -> Any:
        """``[:, some positions]`` of logits ``[b, s, V]`` for the caller; else real logits."""
        batched = self.for_caller and self._batch_first and not self._squeezed
        parts = index if isinstance(index, tuple) and len(index) in (2, 3) else ()
        slices = batched and parts and all(isinstance(part, slice) for part in parts)
        whole = slices and all(part == slice(None) for part in (parts[0], *parts[2:]))
        if not whole or (parts[1].step or 1) < 0:
            return self.materialise()[real(index)]
        which: slice = parts[1]
        left = self._positions[which]
        shape = torch.Size((self.shape[0], len(left), self.shape[2]))
        return self._after(operator.itemgetter(index), shape=shape, _positions=left)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """``max(dim=-1)`` as Megatron's acceptance counts call it; else real logits."""
        served = self._served_argmax(*args, **kwargs)
        return served if served is not None else self._for_a_count().max(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Tensor:
        served = self._served_argmax(*args, **kwargs)
        return served.indices if served is not None else self._for_a_count().argmax(*args, **kwargs)

    def _for_a_count(self) -> Tensor:
        """Real logits, not kept where no gradient is recorded: a maximum shares no memory with them."""
        return self.materialise() if torch.is_grad_enabled() else self._computed(keeps=False)

    def _served_argmax(self, dim: int | None = None, keepdim: bool = False) -> MaxAndIndices | None:
        if self._top is None or dim not in (-1, self.ndim - 1) or keepdim:
            return None
        return MaxAndIndices(self._top.values.to(self.dtype), self._top.indices)

    # Needs real logits.

    @property
    def data(self) -> Tensor:
        return self.materialise().data

    @data.setter
    def data(self, numbers: Any) -> None:
        self.materialise().data = real(numbers)

    #: a number of numpy's beside these asks for __rmul__ and the like
    __array_ufunc__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.argmax and args and isinstance(args[0], cls):
            return args[0].argmax(*args[1:], **kwargs)
        if func is torch.max and args and isinstance(args[0], cls):
            return args[0].max(*args[1:], **kwargs)
        return func(*real(args), **real(kwargs))


def real(value: Any) -> Any:
    """``value`` with real logits instead of deferred ones."""
    if isinstance(value, DeferredLogits):
        return value.materialise()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(real, value))
    if isinstance(value, (tuple, list)):
        return type(value)([real(item) for item in value])
    if isinstance(value, dict):
        return {key: real(item) for key, item in value.items()}
    return value


def _is_scale(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0


def _forward_operator(name: str) -> None:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialise(), name)(*real(args))

    setattr(DeferredLogits, name, operator)


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul"),
    *("neg", "pos", "abs", "setitem", "iter", "lt", "le", "gt", "ge", "float", "bool", "contains", "array"),
    # Without eq and ne, comparison would silently be by identity. Hashing stays by identity, as for tensors.
    *("iadd", "isub", "imul", "itruediv", "eq", "ne"),
):
    _forward_operator(f"__{_name}__")
