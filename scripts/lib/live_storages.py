"""Measure how many bytes of logits, or of anything, are alive: watch storages, not formulas.

Both classes see every PyTorch operator that runs inside their `with` block, on any device, in the
forward and in the backward. A storage counts when it was created inside the block, for
`LogitStorages` once a tensor that lies on it has the shape of logits; it counts once, whatever
number of tensors share it, with all its bytes, from that operator on until PyTorch frees it. Only
weak references are kept, so watching changes no lifetime.

What counts as logits, for `V` vocabulary rows on this rank and hidden size `H`:

    [..., V]   logits, their softmax, their gradient, whatever the dtype
    [V, C]     the same transposed

Two-dimensional `[V, H]` and `[H, V]` are the weight's shape or its gradient's (autograd makes the
gradient of `hidden @ weight.T` as `[H, V]`) and never count, so watch no chunk of exactly H tokens.
Nor does a tensor count that was there before the block. What an operator allocates and frees inside
itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Peak and current bytes of the storages that were made inside the block.

        with LiveStorages() as live:
            loss = step(batch)
            loss.backward()
        print(live.peak_bytes)

    `num_storages` is how many have counted so far: with 0 nothing was watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = self.num_storages = 0
        self._created: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._counted_bytes: dict[int, int] = {}  # storage -> what it adds to live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, given)
        return result

    def _see(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._created:
            if key in given:
                return  # a view of something that is older than the block
            self._created[key] = weakref.ref(storage, partial(self._forget, key))
        if key in self._counted_bytes or self._counts(tensor.shape):
            self._count(key, storage.nbytes())

    def _counts(self, shape: torch.Size) -> bool:
        return True

    def _count(self, key: int, num_bytes: int) -> None:
        if key not in self._counted_bytes:
            self.num_storages += 1
        # A storage may have been resized since it was last seen.
        self.live_bytes += num_bytes - self._counted_bytes.get(key, 0)
        self._counted_bytes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, _: object) -> None:
        self._created.pop(key, None)
        self.live_bytes -= self._counted_bytes.pop(key, 0)


class LogitStorages(LiveStorages):
    """The same of the storages that hold logits.

        with LogitStorages(vocab_rows=V, hidden_size=H) as logits:
            ...

    Raises ValueError where V and H are equal or below 1: a weight could not be told from logits.
    """

    def __init__(self, *, vocab_rows: int, hidden_size: int) -> None:
        if not 0 < vocab_rows != hidden_size > 0:
            raise ValueError(f"cannot tell logits from weights by {vocab_rows=} and {hidden_size=}")
        super().__init__()
        self.vocab_rows, self.hidden_size = vocab_rows, hidden_size

    def _counts(self, shape: torch.Size) -> bool:
        if len(shape) == 2:
            return self.vocab_rows in shape and self.hidden_size not in shape
        return len(shape) > 2 and shape[-1] == self.vocab_rows


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The plain tensors in nested arguments or results of an operator."""
    if isinstance(tree, Tensor):
        if type(tree) in (Tensor, torch.nn.Parameter) and tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)
