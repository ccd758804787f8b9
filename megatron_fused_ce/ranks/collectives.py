"""Everything that crosses ranks: the only module that calls a collective.

All collectives go over the tensor-parallel group, in the same order on every rank, whatever the data. Those
of one of several chunks are asynchronous: on GPUs they run on one side stream of this package, behind all
work that the current stream holds at the call, and the current stream waits where a result is read
(:mod:`.head.buffers` decides when). The side stream has a high priority: its kernels get the first SMs that a
running GEMM frees. Over gloo the host waits for each collective, which goes through its memory. No
collective is left running when a forward or a backward returns, so other users of the group never meet one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.kernels.records import (
    NO_EXTRA,
    NUM_STATISTICS,
    ROW_MAX,
    ROW_SHIFT,
    ExtraStatistics,
    Merged,
    RowStatistics,
)
from megatron_fused_ce.losses.statistics import extra_addends, merge_extra


class Work(Protocol):
    """A running collective; call ``wait`` before its result is read or its input is overwritten."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        """Return at once: no collective was started."""


DONE: Work = _Done()


class BothWorks(NamedTuple):
    """Two collectives to be waited for."""

    first: Work
    second: Work

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


# torch 2.13 renamed these and warns if the old names are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _OnSideStream:
    """Waits by an event, and keeps the collective's tensors alive until then."""

    def __init__(self, device: torch.device, held: tuple[Tensor, ...]) -> None:
        self.event: torch.cuda.Event | None = None
        self._device = device
        self._held = held

    def wait(self) -> None:
        assert self.event is not None, "not sent yet: it was started inside coalesced()"
        torch.cuda.current_stream(self._device).wait_event(self.event)
        self._held = ()


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend can launch several collectives as one. NCCL can; gloo runs them one by one."""
    backend = group._get_backend(device)
    # torch before 2.7 may not have the property.
    return bool(getattr(backend, "supports_coalescing", backend.name() == "nccl"))


class _SideStream:
    """The stream on which the collectives of one device run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._together: list[_OnSideStream] | None = None

    def start(self, collective: Callable[..., Any], tensors: tuple[Tensor, ...], **options: Any) -> Work:
        pending = _OnSideStream(self.device, tensors)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            # Not async_op: torch would take it to the group's own stream, whose priority is Megatron's
            # choice.
            collective(*tensors, async_op=False, **options)
            if self._together is None:
                pending.event = self.stream.record_event()
            else:
                self._together.append(pending)
        return pending

    @contextmanager
    def coalesced(self, group: Any) -> Iterator[None]:
        if self._together is not None or not _coalesces(group, self.device):
            yield
            return
        group._start_coalescing(self.device)
        started = self._together = []
        try:
            yield
        finally:
            self._together = None
            with torch.cuda.stream(self.stream):
                work = group._end_coalescing(self.device)
                if work is not None:  # this torch runs them on the group's own stream after all
                    work.wait()
                event = self.stream.record_event()
            for pending in started:
                pending.event = event

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> _SideStream:
    return _SideStream(device)


def _start(collective: Callable[..., Any], *tensors: Tensor, beside: bool = True, **options: Any) -> Work:
    """Start a collective on ``tensors``; on a GPU ``beside`` what follows, or on the current stream."""
    device = tensors[0].device
    if device.type != "cuda":
        return cast(Work, collective(*tensors, async_op=True, **options))
    if beside:
        return _side_stream(device).start(collective, tensors, **options)
    collective(*tensors, async_op=False, **options)
    return DONE


@dataclass(frozen=True)
class VocabParallel:
    """The tensor-parallel group as one head sees it.

    ``num_parts`` ranks hold different tokens of a chunk: ``R`` with sequence parallelism, else 1.
    """

    #: weak: a :class:`.head.spec.Spec` holds this, and the group's own history the spec
    _group: ref[dist.ProcessGroup] | None
    size: int
    rank: int
    sequence_parallel: bool
    #: how statistics are merged: "packed" or "all_reduce"
    merge: str = "packed"
    #: whether ``grad_hidden`` is summed over the ranks here; else by the caller
    reduces_grad_hidden: bool = True
    #: Whether gathers and merges run beside GEMMs. With one chunk nothing overlaps: then they use the
    #: current stream, which is cheaper on the host.
    beside: bool = True

    @staticmethod
    def of(
        group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        merge: str = "auto",
        reduces_grad_hidden: bool = True,
    ) -> VocabParallel:
        """Describe ``group``; ``None`` or a group of one rank runs no collective at all."""
        size = 1 if group is None else dist.get_world_size(group)
        if group is None or size == 1:
            return VocabParallel(None, 1, 0, False)
        merge = "packed" if merge == "auto" else merge
        rank = dist.get_rank(group)
        return VocabParallel(ref(group), size, rank, sequence_parallel, merge, reduces_grad_hidden)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None over one rank."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError("the head's tensor-parallel group was destroyed after its forward")
        return group

    @property
    def num_parts(self) -> int:
        return self.size if self.sequence_parallel else 1

    @property
    def part(self) -> int:
        """Which of the ``num_parts`` parts of a chunk is this rank's."""
        return self.rank if self.sequence_parallel else 0

    def coalesced(self, device: torch.device) -> AbstractContextManager[None]:
        """Coalesce the collectives started inside into one launch at the end; wait for them only after it.

        Two separate launches would not fit into one gap between GEMMs: see :mod:`.head.buffers`.
        """
        if self.size == 1 or not self.beside or device.type != "cuda":
            return nullcontext()
        return _side_stream(device).coalesced(self.group)

    def join(self, device: torch.device) -> None:
        """After an exception: wait for running collectives, so that their memory is not reused too early.

        Collectives: none.
        """
        if self.size > 1 and device.type == "cuda":
            _side_stream(device).join()

    def gather(self, part: Tensor, out: Tensor) -> Work:
        """Start gathering ``[R * k, H]`` into ``out`` from every rank's ``[k, H]``, in rank order.

        Collectives, asynchronous: one all-gather; none over one rank, where ``out`` is left alone.
        """
        if self.size == 1:
            return DONE
        return _start(_all_gather, out, part.contiguous(), beside=self.beside, group=self.group)

    def gathered(self, part: Tensor) -> tuple[Tensor, Work]:
        """:meth:`gather` into a new tensor ``[R * k, H]``; over one rank ``part`` ``[k, H]`` itself."""
        if self.size == 1:
            return part, DONE
        whole = part.new_empty(self.size * part.shape[0], part.shape[1])
        return whole, self.gather(part, whole)

    def reduce_grad_hidden(self, partial: Tensor, out: Tensor) -> Work:
        """Start summing ``partial`` ``[C, H]`` over the ranks into this rank's ``out`` ``[n, H]``.

        Collectives, asynchronous: one reduce-scatter with sequence parallelism, else one all-reduce
        (``partial`` is then ``out`` itself), in the dtype of the hidden states. None where the caller sums.
        """
        if self.size == 1 or not self.reduces_grad_hidden:
            return DONE
        if self.sequence_parallel:
            return _start(_reduce_scatter, out, partial, group=self.group)
        return _start(dist.all_reduce, partial, group=self.group)

    def sum_over_shards(self, of_shard: Tensor) -> Tensor:
        """The sum over the ranks, in place.

        Collectives: one SUM all-reduce (R > 1).
        """
        if self.size > 1:
            _start(dist.all_reduce, of_shard, beside=self.beside, group=self.group).wait()
        return of_shard

    def take_largest_(self, value: Tensor) -> None:
        """Replace ``value``, in place, by the largest over the ranks; the current stream waits for it.

        Collectives: one MAX all-reduce, behind those of this head that were started; none over one rank.
        """
        if self.size > 1:
            _start(dist.all_reduce, value, beside=self.beside, op=dist.ReduceOp.MAX, group=self.group).wait()

    def delay_next_gemm(self, device: torch.device) -> None:
        """Hold the next matrix product back for some microseconds, until the collective just started has its
        SMs; only where the order of launch does not see to it."""
        if self.size == 1 or device.type != "cuda":
            return
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            from megatron_fused_ce.kernels import token_kernels

            token_kernels.pause(device)

    def start_merge(
        self,
        stats: RowStatistics,
        token_ops: ModuleType,  # losses.statistics or kernels.token_kernels
    ) -> Callable[[], Merged]:
        """Start merging a chunk's statistics over the whole vocabulary. The function that comes back ends it:
        waits for the running collective, and starts and awaits the next one, if the merge has one.

        Collectives, asynchronous, fp32. ``packed``: one all-gather of ``[4, C]`` a rank. ``all_reduce``:
        MAX of (row maximum, row_shift) ``[2, C]``, then SUM of (sum_exp_nonlabel, label, label logit) ``[3,
        C]``. Each of ``stats.extra`` is one row more of the all-gather or the SUM, which is fp64 with a
        ``rest``; with ``all_reduce``, ``best`` is a MIN after them. NaN in any shard gives NaN on all: a MAX
        may drop it, sums do not.
        """
        if self.size == 1:
            return partial(_merge_alone, stats, token_ops)
        if self.merge == "packed":
            return self._start_packed(stats, token_ops)
        return self._start_all_reduced(stats, token_ops)

    def _start_packed(self, stats: RowStatistics, token_ops: ModuleType) -> Callable[[], Merged]:
        """One all-gather of all statistics; every rank merges them in rank order."""
        sent, names = stats.shard, stats.extra.names
        if names:
            sent = torch.cat((sent, torch.stack(stats.extra.rows())))
        received = sent.new_empty((self.size, *sent.shape))
        pending = _start(_all_gather, received.flatten(0, 1), sent, beside=self.beside, group=self.group)

        def finish() -> Merged:
            pending.wait()
            shards = received[:, :NUM_STATISTICS].contiguous()
            merged: Merged = token_ops.merge_shards(shards)
            if not names:
                return merged
            return merged._replace(extra=merge_extra(names, received[:, NUM_STATISTICS:], shards))

        return finish

    def _start_all_reduced(self, stats: RowStatistics, token_ops: ModuleType) -> Callable[[], Merged]:
        """All-reduces of the maxima, of the sums relative to them, and of the lowest id if it is needed."""
        reduce = partial(_start, dist.all_reduce, beside=self.beside, group=self.group)
        maxima = stats.shard[ROW_MAX : ROW_SHIFT + 1].clone()
        pending = reduce(maxima, op=dist.ReduceOp.MAX)

        def finish() -> Merged:
            pending.wait()
            row_max, row_shift = maxima
            sums = token_ops.shard_addends(stats.shard, row_max)
            extra = extra_addends(stats.extra, stats.shard, row_max)
            added, best = extra._replace(best=None), extra.best
            if added.names:
                sums = torch.cat((sums, torch.stack(added.rows())))
            reduce(sums).wait()
            if best is not None:
                reduce(best, op=dist.ReduceOp.MIN).wait()
            loss, saved = token_ops.token_loss(sums[:3].float(), row_max)
            merged = ExtraStatistics.of(added.names, sums[3:].unbind(0))._replace(best=best)
            return Merged(loss, saved, row_shift, merged)

        return finish


def _merge_alone(stats: RowStatistics, token_ops: ModuleType) -> Merged:
    """The merge over one rank: no collective."""
    shards = stats.shard.unsqueeze(0)
    merged: Merged = stats.merged or token_ops.merge_shards(shards)
    if stats.extra == NO_EXTRA:
        return merged
    rows = torch.stack(stats.extra.rows()).unsqueeze(0)
    return merged._replace(extra=merge_extra(stats.extra.names, rows, shards))


def largest_over_ranks(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replace ``value`` (any shape), in place, by the largest over all ranks. The host does not wait.

    Collectives: one MAX all-reduce (R > 1).
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def same_on_all_ranks(words: str, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks say the same. The host waits.

    Collectives: one MAX all-reduce of two int64 (R > 1).
    """
    if group is None or group.size() == 1:
        return True
    number = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())
    said = torch.tensor([number, -number], device=collective_device(group))
    return largest_over_ranks(said.clone(), group).equal(said)


def raise_if_any(wrong: Tensor, words: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where ``wrong`` (bool ``[]``) holds on one of them. The host waits.

    Nothing is checked while a CUDA graph is captured.

    Collectives: one MAX all-reduce of an int64 (R > 1).

    Raises:
        ValueError: with ``words``; on ranks where nothing is wrong, that another rank found it.
    """
    if wrong.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    here = wrong.to(torch.int64).reshape(1)
    if largest_over_ranks(here.clone(), group).item():
        where = "" if here.item() else "on another rank of the tensor-parallel group: "
        raise ValueError(where + words)


def collective_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
