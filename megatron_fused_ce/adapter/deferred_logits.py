"""What the output layer hands out in place of logits: a promise that knows how to become a loss.

Megatron's models call the output layer, perhaps scale the result, and only then call the loss with
labels; with multi-token prediction the labels are rolled in between. A :class:`DeferredLogits` travels
that road. Handed to the loss it is evaluated fused; touched in any other way it becomes real logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.adapter.token_weights import TokenWeights


class DeferredHead(Protocol):
    """The output layer, as deferred logits see it."""

    def fused_loss(
        self, deferred: DeferredLogits, labels: Tensor, token_weights: TokenWeights
    ) -> LossAndArgmax: ...

    def stock_logits(self, deferred: DeferredLogits) -> Tensor: ...


class LossAndArgmax(NamedTuple):
    """A fused evaluation: loss ``[b, s]`` and, where asked for, this shard's maximum ``[s, b]``."""

    loss: Tensor
    local_max: Tensor | None
    local_argmax: Tensor | None


class MaxAndIndices(NamedTuple):
    """The shape of ``Tensor.max(dim)``'s result."""

    values: Tensor
    indices: Tensor


class DeferredLogits:
    """Logits ``[s, b, V]`` of one head use that have not been computed.

    Reading ``shape``, ``dtype``, ``device`` costs nothing; multiplying by a number is remembered;
    after a fused loss the maximum over the last dimension is served from that pass. Everything else
    materialises the logits through Megatron's own layer, once, and counts it.
    """

    def __init__(
        self,
        head: DeferredHead,
        hidden: Tensor,
        weight: Tensor | None,
        shape: torch.Size,
        scales: tuple[float, ...] = (),
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.weight = weight
        self.shape = shape
        self.scales = scales
        self._needs_grad = torch.is_grad_enabled()
        self._evaluated: LossAndArgmax | None = None
        self._real: Tensor | None = None

    @property
    def logit_scale(self) -> float:
        """The product of the numbers these logits were multiplied by (MuP's output multiplier)."""
        product = 1.0
        for scale in self.scales:
            product *= scale
        return product

    def loss(self, labels: Tensor, token_weights: TokenWeights) -> Tensor:
        """Per-token loss ``[b, s]`` for labels ``[b, s]``, without logits."""
        self._evaluated = self.head.fused_loss(self, labels, token_weights)
        counters().fused += 1
        return self._evaluated.loss

    def materialise(self) -> Tensor:
        """Real logits, as Megatron's layer computes them.

        With gradients if the layer was called with them, wherever they are first needed: what a metric under
        ``no_grad`` makes may serve a loss later.
        """
        if self._real is None:
            counters().materialised += 1
            with torch.set_grad_enabled(self._needs_grad):
                real = self.head.stock_logits(self)
                for scale in self.scales:
                    real = real * scale
            self._real = real
        return self._real

    # What costs nothing.

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # What is remembered.

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0:
            scales = (*self.scales, float(other))
            return DeferredLogits(self.head, self.hidden, self.weight, self.shape, scales)
        return self.materialise() * other

    __rmul__ = __mul__

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """``max(dim=-1)`` as Megatron's acceptance counts ask for it; else real logits."""
        served = self._served_argmax(*args, **kwargs)
        return served if served is not None else self.materialise().max(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Tensor:
        served = self._served_argmax(*args, **kwargs)
        return served.indices if served is not None else self.materialise().argmax(*args, **kwargs)

    def _served_argmax(self, dim: int | None = None, keepdim: bool = False) -> MaxAndIndices | None:
        done = self._evaluated
        if done is None or done.local_max is None or done.local_argmax is None:
            return None
        if dim not in (-1, self.ndim - 1) or keepdim:
            return None
        return MaxAndIndices(done.local_max.to(self.dtype), done.local_argmax)

    # What needs the logits.

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
        return func(*_real(args), **_real(kwargs))


def _real(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.materialise()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_real, value))
    if isinstance(value, (tuple, list)):
        return type(value)([_real(item) for item in value])
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value


def _forward_operator(name: str) -> None:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialise(), name)(*_real(args))

    operator.__name__ = name
    setattr(DeferredLogits, name, operator)


for _name in (
    *("add", "radd", "sub", "rsub", "truediv", "rtruediv", "floordiv", "mod", "pow", "matmul"),
    *("neg", "abs", "getitem", "setitem", "iter", "lt", "le", "gt", "ge", "float", "bool"),
    # Without these two objects compare by identity, in silence. Hashing stays by identity, as of tensors.
    *("eq", "ne"),
    *("iadd", "isub", "imul", "itruediv", "contains", "array"),
):
    _forward_operator(f"__{_name}__")
