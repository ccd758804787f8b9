"""Every collective of the head: gathers, the merge of statistics, sums.

All of them go over the tensor-parallel group, in the same order on every rank, whatever the data. If a call
has several chunks, they run on one side stream of this package: each waits for the work that was on the
current stream when it started, and the current stream waits for it before its result is read
(:mod:`.head.buffers` says when). The side stream has a high priority: its kernels get the first SMs that a
GEMM frees. Over gloo the host waits for each collective. No collective is left running when a forward or a
backward returns, so that other users of the group never meet one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Protocol, cast
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
    """A running collective; call ``wait`` before reading its result or overwriting its input."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        """Return at once: no collective was started."""


DONE: Work = _Done()


# torch 2.13 renamed these and warns if the old names are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _OnSideStream:
    """A collective on the side stream: ``wait`` waits for its event, and tensors are held until then."""

    def __init__(self, device: torch.device, held: tuple[Tensor, ...]) -> None:
        self.event: torch.cuda.Event | None = None
        self._device = device
        self._held = held

    def wait(self) -> None:
        assert self.event is not None, "not sent yet: it was started inside coalesced()"
        torch.cuda.current_stream(self._device).wait_event(self.event)
        self._held = ()


class _SideStream:
    """The stream of one device on which collectives run, beside the GEMMs of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._together: list[_OnSideStream] | None = None

    def start(self, collective: Callable[..., Any], tensors: tuple[Tensor, ...], **options: Any) -> Work:
        """Start a collective behind all work of the current stream."""
        pending = _OnSideStream(self.device, tensors)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            # With async_op torch would use the group's own stream, whose priority is Megatron's choice.
            collective(*tensors, async_op=False, **options)
            if self._together is None:
                pending.event = self.stream.record_event()
            else:
                self._together.append(pending)
        return pending

    @contextmanager
    def coalesced(self, group: Any) -> Iterator[None]:
        """Launch the collectives that are started inside as one, at the end."""
        backend = group._get_backend(self.device)
        # NCCL can do so, gloo cannot. torch before 2.7 may not have the property.
        coalesces = getattr(backend, "supports_coalescing", backend.name() == "nccl")
        if self._together is not None or not coalesces:
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
                if work is not None:  # this version of torch runs them on the group's own stream
                    work.wait()
                event = self.stream.record_event()
            for pending in started:
                pending.event = event

    def join(self) -> None:
        """Let the current stream wait for everything on this one."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> _SideStream:
    return _SideStream(device)


def _start(collective: Callable[..., Any], *tensors: Tensor, overlap: bool = True, **options: Any) -> Work:
    """Start a collective on ``tensors``; on a GPU on the side stream (``overlap``) or on the current one."""
    device = tensors[0].device
    if device.type != "cuda":
        return cast(Work, collective(*tensors, async_op=True, **options))
    if overlap:
        return _side_stream(device).start(collective, tensors, **options)
    collective(*tensors, async_op=False, **options)
    return DONE


@dataclass(frozen=True)
class VocabParallel:
    """The tensor-parallel group of one head, and the collectives over it."""

    #: a weak reference, since the history of the group holds specs, and a :class:`.head.spec.Spec` this
    _group: ref[dist.ProcessGroup] | None
    size: int
    rank: int
    sequence_parallel: bool
    #: how statistics are merged: "packed" or "all_reduce"
    merge: str = "packed"
    #: whether the head sums ``grad_hidden`` over the ranks; if not, the caller does
    reduces_grad_hidden: bool = True
    #: Whether gathers and merges run on the side stream. With one chunk nothing overlaps: then they use the
    #: current stream, which takes less time on the host.
    overlap: bool = True

    @staticmethod
    def of(
        group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        merge: str = "packed",
        reduces_grad_hidden: bool = True,
    ) -> VocabParallel:
        """Describe ``group``. For None, or a group of one rank, there are no collectives at all."""
        size = 1 if group is None else dist.get_world_size(group)
        if group is None or size == 1:
            return VocabParallel(None, 1, 0, False)
        rank = dist.get_rank(group)
        return VocabParallel(ref(group), size, rank, sequence_parallel, merge, reduces_grad_hidden)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None over one rank."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError("the head's tensor-parallel group was destroyed after its forward")
        return group

    @property
    def num_parts(self) -> int:
        """Number of ranks that hold different tokens: ``R`` with sequence parallelism, else 1."""
        return self.size if self.sequence_parallel else 1

    @property
    def part(self) -> int:
        """Index of this rank's part among the ``num_parts`` parts of a chunk."""
        return self.rank if self.sequence_parallel else 0

    def coalesced(self, device: torch.device) -> AbstractContextManager[None]:
        """Context that launches the collectives started inside as one, at its end; wait for them after it.

        Two separate launches would not fit into one gap between GEMMs (:mod:`.head.buffers`).
        """
        if self.size == 1 or not self.overlap or device.type != "cuda":
            return nullcontext()
        return _side_stream(device).coalesced(self.group)

    def join(self, device: torch.device) -> None:
        """Wait for running collectives after an exception, so that their memory is not reused too early."""
        if self.size > 1 and device.type == "cuda":
            _side_stream(device).join()

    def gather(self, part: Tensor, out: Tensor) -> Work:
        """Start to gather every rank's ``[k, H]`` into ``out`` ``[R * k, H]``, in rank order.

        Collectives, asynchronous: one all-gather.
        """
        return _start(_all_gather, out, part.contiguous(), overlap=self.overlap, group=self.group)

    def gathered(self, part: Tensor) -> tuple[Tensor, Work]:
        """Start :meth:`gather` into a new tensor ``[R * k, H]``; over one rank that is ``part`` itself."""
        if self.size == 1:
            return part, DONE
        whole = part.new_empty(self.size * part.shape[0], part.shape[1])
        return whole, self.gather(part, whole)

    def reduce_grad_hidden(self, partial: Tensor, out: Tensor) -> Work:
        """Start to sum ``partial`` ``[C, H]`` over the ranks; ``out`` gets this rank's rows of the sum.

        Collectives, asynchronous, in the dtype of the hidden states: one reduce-scatter with sequence
        parallelism, else one all-reduce (``partial`` is then ``out`` itself); none if the caller sums.
        """
        if self.size == 1 or not self.reduces_grad_hidden:
            return DONE
        if self.sequence_parallel:
            return _start(_reduce_scatter, out, partial, group=self.group)
        return _start(dist.all_reduce, partial, group=self.group)

    def over_shards_(self, value: Tensor, largest: bool = False) -> Tensor:
        """Replace ``value``, in place, by its sum, or the largest, over the ranks; the current stream waits.

        Collectives: one SUM or MAX all-reduce (R > 1), behind those of this head that were started before.
        """
        if self.size > 1:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            _start(dist.all_reduce, value, overlap=self.overlap, op=op, group=self.group).wait()
        return value

    def delay_next_gemm(self, device: torch.device) -> None:
        """Hold the next GEMM back for some microseconds, until the collective just started has its SMs.

        Under ``CUDA_DEVICE_MAX_CONNECTIONS=1`` the order of launches does so, and this does nothing.
        """
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
        """Start to merge the statistics of a chunk's rows over the vocabulary shards of all ranks.

        The function returned waits for the running collective, runs the other ones of the merge, and returns
        the merged statistics. A NaN in any shard gives NaN on all ranks: a MAX may drop it, sums do not.

        Collectives, asynchronous, fp32. ``packed``: one all-gather of ``[4, C]``. ``all_reduce``: MAX of (row
        maximum, row_shift) ``[2, C]``, then SUM of (sum_exp_nonlabel, label, label logit) ``[3, C]``. Each
        statistic in ``stats.extra`` is one row more of the all-gather or the SUM, which is fp64 with a
        ``rest``; but with ``all_reduce`` ``best`` is a MIN after them.
        """
        if self.size == 1:
            return partial(_merge_alone, stats, token_ops)
        if self.merge == "all_reduce":
            return self._start_all_reduced(stats, token_ops)
        return self._start_packed(stats, token_ops)

    def _start_packed(self, stats: RowStatistics, token_ops: ModuleType) -> Callable[[], Merged]:
        """Merge by one all-gather of all statistics; every rank merges them in rank order."""
        sent, names = stats.shard, stats.extra.names
        if names:
            sent = torch.cat((sent, torch.stack(stats.extra.rows())))
        received = sent.new_empty((self.size, *sent.shape))
        pending = _start(_all_gather, received.flatten(0, 1), sent, overlap=self.overlap, group=self.group)

        def finish() -> Merged:
            pending.wait()
            shards = received[:, :NUM_STATISTICS].contiguous()
            merged: Merged = token_ops.merge_shards(shards)
            if not names:
                return merged
            return merged._replace(extra=merge_extra(names, received[:, NUM_STATISTICS:], shards))

        return finish

    def _start_all_reduced(self, stats: RowStatistics, token_ops: ModuleType) -> Callable[[], Merged]:
        """Merge by all-reduces: of the maxima, of sums relative to them, and of ``best`` if it is needed."""
        reduce = partial(_start, dist.all_reduce, overlap=self.overlap, group=self.group)
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
    """Merge over one rank, without a collective."""
    shards = stats.shard.unsqueeze(0)
    merged: Merged = stats.merged or token_ops.merge_shards(shards)
    if stats.extra == NO_EXTRA:
        return merged
    rows = torch.stack(stats.extra.rows()).unsqueeze(0)
    return merged._replace(extra=merge_extra(stats.extra.names, rows, shards))


def largest_over_ranks(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replace ``value``, of any shape, in place, by the largest over all ranks. The host does not wait.

    Collectives: one MAX all-reduce (R > 1).
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def same_on_all_ranks(words: str, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks give the same ``words``. The host waits.

    Collectives: one MAX all-reduce of two int64 (R > 1).
    """
    if group is None or group.size() == 1:
        return True
    number = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "big")
    said = torch.tensor([number, -number], device=collective_device(group))
    return largest_over_ranks(said.clone(), group).equal(said)


def raise_if_any(wrong: Tensor, words: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if ``wrong`` (bool ``[]``) is true on any of them. The host waits.

    While a CUDA graph is captured nothing is checked.

    Collectives: one MAX all-reduce of an int64 (R > 1).

    Raises:
        ValueError: with ``words``. A rank where nothing is wrong adds that another rank found it.
    """
    if wrong.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    here = wrong.to(torch.int64).reshape(1)
    if largest_over_ranks(here.clone(), group).item():
        where = "" if here.item() else "on another rank of the tensor-parallel group: "
        raise ValueError(where + words)


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Device on which tensors of this group's collectives must lie."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
