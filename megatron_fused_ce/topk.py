"""The likeliest K ids of each token from hidden states, without the logits of all tokens."""

from __future__ import annotations

import math
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import autocast, masked_tokens
from megatron_fused_ce.call import DEFAULT_CONFIG, Call, check_arguments
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.config import FusedCEConfig, takes_config
from megatron_fused_ce.kernels.records import NOTHING
from megatron_fused_ce.logits import rows_torch, topk_torch
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows, write_logits
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.op import uncompiled
from megatron_fused_ce.parallel import DONE, VocabParallel, Work, check_group
from megatron_fused_ce.shards import Shards, cut_of
from megatron_fused_ce.targets import in_token_order, inv_temperature_of
from megatron_fused_ce.words import sequence_first, temperature_of, why_no_layout, why_no_mask, widened

#: In the place of an id: a token outside ``active_mask``, or one whose log-probabilities are NaN.
NO_ID = -1


@takes_config
@torch.no_grad()
def fused_linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    active_mask: Tensor | None = None,
    batch_first: bool | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest ids of each token and their log-probabilities, one chunk at a time, no gradient.

    The same as::

        logits = (hidden @ weight.T).float()              # fp32 products, over all ranks' rows
        log_probs, ids = (logits / temperature).log_softmax(-1).topk(k)

    with equal logits in the order of their ids. They are compared in fp32 after ``config``'s scale and
    softcap, before the temperature.

    Args:
        hidden, weight, tp_group, sequence_parallel, vocab_start: as for :func:`.fused_linear_cross_entropy`.
            Half-precision hidden states with an fp32 weight are cast to fp32.
        k: from 1 to the size of the vocabulary; it may be more than a rank has rows.
        temperature: a number, a tensor without dimensions, ``[b]``, or one per token, ``[b, s]`` or ``[T]``.
        active_mask: bool, ``[b, s]`` or ``[T]``, the same on every rank: tokens outside it take part in no
            GEMM. Their ids are -1 and their log-probabilities -inf: an empty entry of
            :func:`.fused_linear_topk_distillation` and :func:`.rl.token_log_probs`.
        batch_first: whether hidden states of three dimensions are ``[b, s, H]``, not ``[s, b, H]``; must be
            said for them.
        config: ``logit_scale``, ``logit_softcap``, ``true_vocab_size`` (padding rows are never returned);
            ``num_chunks``, ``chunk_tokens`` or ``memory_mb``, else 1 GiB of logits a chunk;
            ``logit_precision="activations"`` rounds the logits. The rest does not count.

    Returns:
        ``log_probs`` fp32 and ``ids`` int64, ``[b, s, k]`` or ``[T, k]``, likeliest first, of all tokens and
        the same on every rank. Where log-probabilities are NaN (a logit of NaN or +inf, which an fp32 product
        above 3.4e38 is; or all of -inf), ids are -1.

    Raises:
        TypeError, ValueError: on every rank, in every call: what :func:`.fused_linear_cross_entropy`
            refuses, a ``k`` or a temperature that does not fit, ranks that differ.
        ImportError: fp32 logits of half-precision operands on a GPU need torch 2.8.

    Memory above inputs and outputs: a chunk's logits, ``4 * C * V`` bytes, and some ``4 * C * sqrt(V * k)``
    of candidates, a few times; with sequence parallelism two chunks of hidden states.

    Collectives (R > 1): one all-gather of a few int64, for which the host waits; with a temperature per token
    a MAX all-reduce of an int64 and with ``active_mask`` one of two bytes a token, waited for too; then, per
    chunk, the all-gather of hidden states (sequence parallelism, of the next chunk before this one's GEMM)
    and one of int32 ``[C, 2 * k + 2]``.

    Source: the K blocks with the largest maxima hold the K largest; :mod:`.kernels.topk`.
    """
    config = DEFAULT_CONFIG if config is None else config
    wrong: Exception | None = why_no_layout("hidden", hidden, batch_first)
    hidden = widened(sequence_first(hidden, batch_first), weight)
    check_group(tp_group)
    labels = hidden  # for the error alone
    if isinstance(hidden, Tensor) and hidden.dim() in (2, 3):
        parts = VocabParallel.of(tp_group, sequence_parallel).num_parts
        tokens = (hidden.shape[0] * parts, *hidden.shape[1:-1])
        labels = torch.full(tokens[::-1], NO_ID, dtype=torch.int64, device=hidden.device)
        temperature = temperature_of(temperature, labels.shape)
        if active_mask is not None:
            wrong = wrong or why_no_mask(active_mask, labels.shape)
    weights = None if active_mask is None or wrong else active_mask.to(labels.device).float()
    call = Call(
        hidden, weight, labels, tp_group=tp_group, sequence_parallel=sequence_parallel,
        token_weights=weights, active_mask=active_mask is not None, vocab_start=vocab_start, config=config,
        temperature=temperature, caller_error=wrong,
    )  # fmt: skip
    return _evaluate(call, k)


@uncompiled
def _evaluate(call: Call, k: int) -> tuple[Tensor, Tensor]:
    call = call.completed()
    with call.on_its_device(), autocast.off(call.hidden.device):
        return _of_all(call, k)


def _of_all(call: Call, k: int) -> tuple[Tensor, Tensor]:
    config, error = call.config, None
    comm = VocabParallel.of(call.tp_group, call.sequence_parallel)
    try:
        check_arguments(call, comm)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k is {k!r}; expected a whole number, 1 or more")
        # With the plain GEMM, whatever logits_backend says.
        dtype = call.hidden.dtype if config.logit_precision == "activations" else torch.float32
        other = None if dtype == call.hidden.dtype else dtype
        in_torch = gemm_then_rows(call.hidden.device, other).rows is rows_torch
    except (TypeError, ValueError, ImportError) as one:
        error = one
    shards = Shards.agreed(call, comm, error, {"k": k})
    if k > shards.end - shards.first:
        raise ValueError(f"k is {k}; expected at most the {shards.end - shards.first} ids of the vocabulary")
    labels, parts = call.labels, comm.num_parts
    flat = call.hidden.reshape(-1, call.hidden.shape[-1])
    inv_temperature = inv_temperature_of(call.temperature, labels, comm)
    if inv_temperature is None:
        assert not isinstance(call.temperature, Tensor)
        inv_temperature = torch.full(
            (parts, len(flat)), 1 / call.temperature, dtype=torch.float32, device=flat.device
        )
    kept = None
    if call.token_weights is not None:
        weights = in_token_order(call.token_weights, labels, parts)
        counted = masked_tokens.count(weights, comm.group)
        if counted is not None:  # no CUDA graph is captured
            num_kept = masked_tokens.num_kept(masked_tokens.num_unmasked(counted), len(flat))
            kept = Kept.of(weights, num_kept)
            flat, inv_temperature = kept.take(flat, comm.part), kept.of_tokens(inv_temperature)
    head = _Head(call, comm, shards, k, in_torch, dtype)
    log_probs = flat.new_empty((parts, len(flat), k), dtype=torch.float32)
    ids = flat.new_empty((parts, len(flat), k), dtype=torch.int64)
    chunks = head.chunks(len(flat))
    ahead: list[tuple[Tensor, Work]] = []
    longest = parts * max((chunk.num_tokens for chunk in chunks), default=0)
    buffer = flat.new_empty((longest, len(call.weight)), dtype=dtype)
    for chunk in chunks:
        for each in chunks[chunk.index + len(ahead) : chunk.index + 2]:
            own = flat[each.start : each.stop]
            ahead.append(comm.gathered(own) if parts > 1 else (own, DONE))
        x, gathering = ahead.pop(0)
        gathering.wait()
        of_chunk = slice(chunk.start, chunk.stop)
        made = head.likeliest(x, inv_temperature[:, of_chunk].flatten().contiguous(), buffer[: len(x)])
        for whole, part in zip((log_probs, ids), made, strict=True):
            whole[:, of_chunk] = part.view(parts, -1, k)
    if kept is not None:
        log_probs, ids = (
            _put_back(kept, made, fill) for made, fill in ((log_probs, -torch.inf), (ids, NO_ID))
        )
    return _in_layout(log_probs, labels), _in_layout(ids, labels)


def _put_back(kept: Kept, made: Tensor, fill: float) -> Tensor:
    """``[parts, m, k]`` as ``[parts, n, k]``, with ``fill`` for the tokens that are left out."""
    whole = made.new_full((*kept.skipped.shape, made.shape[-1]), fill)
    made = made.masked_fill_(~kept.active.unsqueeze(-1), fill)
    return whole.scatter_(1, kept.tokens.unsqueeze(-1).expand_as(made), made)


def _in_layout(made: Tensor, labels: Tensor) -> Tensor:
    """``[parts, n, k]`` as ``[b, s, k]`` or ``[T, k]``."""
    made = made.view(*reversed(labels.shape), made.shape[-1])
    return made.transpose(0, 1) if labels.dim() == 2 else made


class _Head:
    """What is the same for all chunks."""

    def __init__(
        self, call: Call, comm: VocabParallel, shards: Shards, k: int, in_torch: bool, dtype: torch.dtype
    ) -> None:
        self._weight, self._config, self._comm, self._k = call.weight, call.config, comm, k
        self._start = shards.starts[comm.rank]
        self._num_columns = min(max(shards.end - self._start, 0), shards.sizes[comm.rank])
        #: ranks by their place in the vocabulary: of equal logits the lower id comes first
        self._ranks = sorted(range(comm.size), key=shards.starts.__getitem__)
        self._row_bytes = max(shards.sizes) * dtype.itemsize
        #: columns of a block: a power of 2 near sqrt(V / k)
        per_block = math.log2(max(self._num_columns, 1) / k) / 2
        self._group = 1 << min(8, max(3, round(per_block)))
        self._picks: ModuleType = topk_torch
        self._merges: ModuleType = topk_torch
        if not in_torch:
            from megatron_fused_ce.kernels import topk

            if topk.can_pick(self._num_columns, self._group, k):
                self._picks = topk
            if topk.can_pick(comm.size * k, 1, k):
                self._merges = topk

    def chunks(self, num_tokens: int) -> tuple[Chunk, ...]:
        """Of ``num_tokens`` of each part; the same on every rank."""
        return cut_of(self._config, num_tokens, self._comm.num_parts, self._row_bytes, 128).chunks

    def likeliest(self, hidden: Tensor, inv_temperature: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids ``[C, k]`` of a chunk. Collectives: one all-gather (R > 1)."""
        keys, ids, stats = self._of_shard(hidden, inv_temperature, logits)
        if self._comm.size > 1:
            keys, ids, stats = self._merged(keys, ids, stats, inv_temperature)
        keys, order = keys.sort(dim=1, descending=True, stable=True)
        row_max, log_sum = stats[0].unsqueeze(-1), stats[1].log().unsqueeze(-1)
        z = topk_torch.of_keys(keys).sub_(row_max)
        log_probs = z.mul_(inv_temperature.unsqueeze(-1)).sub_(log_sum)
        no_softmax = (row_max == -torch.inf) | log_sum.isnan()
        ids = ids.gather(1, order).to(torch.int64)
        return log_probs.masked_fill_(no_softmax, torch.nan), ids.masked_fill_(no_softmax, NO_ID)

    def _of_shard(
        self, hidden: Tensor, inv_temperature: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and ids int32 ``[C, k]``, by ascending id; row maximum and sum of exponentials, fp32 ``[2,
        C]``."""
        config, group, num_columns = self._config, self._group, self._num_columns
        scaled = config.logit_scale, config.logit_softcap
        if not num_columns or not len(hidden):  # padding alone
            keys = torch.full((len(hidden), self._k), NOTHING, dtype=torch.int32, device=hidden.device)
            stats = hidden.new_zeros((2, len(hidden)), dtype=torch.float32)
            stats[0] = -torch.inf
            return keys, keys, stats
        write_logits(hidden, self._weight, logits)
        maxima, stats = self._picks.block_maxima(logits, num_columns, group, *scaled, inv_temperature)
        _, blocks = self._picks.best(maxima, min(self._k, maxima.shape[1]))
        keys, columns = self._picks.best_of_blocks(logits, blocks, num_columns, group, self._k, *scaled)
        return keys, columns.add_(self._start), stats

    def _merged(
        self, keys: Tensor, ids: Tensor, stats: Tensor, inv_temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of all shards. Collectives: one all-gather of int32 ``[C, 2 * k + 2]``."""
        k = self._k
        sent = torch.cat((keys, ids, stats.view(torch.int32).t()), dim=1)
        received, gathering = self._comm.gathered(sent)
        gathering.wait()
        # [R, C, ...] by the ranks' places in the vocabulary.
        received = received.view(self._comm.size, *sent.shape)
        if self._ranks != sorted(self._ranks):
            received = received[self._ranks]
        of_rows = received.transpose(0, 1)
        keys, ids = (of_rows[..., at : at + k].flatten(1).contiguous() for at in (0, k))
        row_max, sums = received[..., 2 * k :].contiguous().view(torch.float32).unbind(-1)
        largest = row_max.amax(0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        # A shard without a finite logit adds 0; one with a NaN, NaN.
        total = (sums * ((row_max - shift) * inv_temperature).exp()).sum(0)
        keys, places = self._merges.best(keys, k)
        return keys, ids.gather(1, places.to(torch.int64)), torch.stack((largest, total))
