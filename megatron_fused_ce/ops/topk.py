"""The K likeliest ids of each token from hidden states, without the logits of all tokens."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.agree import compared
from megatron_fused_ce.head.autograd import autocast_off, uncompiled
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, takes_config
from megatron_fused_ce.head.targets import in_token_order, inv_temperature_of
from megatron_fused_ce.head.validation import check_arguments
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows, write_logits
from megatron_fused_ce.logits.rows_torch import scaled_logits
from megatron_fused_ce.ops.arguments import (
    sequence_first,
    temperature_of,
    why_no_layout,
    why_no_mask,
    widened,
)
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.ranks.agreement import check_true_vocab_size, history_of
from megatron_fused_ce.ranks.collectives import DONE, VocabParallel

#: Bytes of a chunk's logits if ``config`` names neither chunks nor a budget.
CHUNK_BYTES = 1 << 30


@takes_config
@uncompiled
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

    It computes ``((hidden @ weight.T).float() / temperature).log_softmax(-1).topk(k)`` over all ranks' rows.
    The GEMM writes fp32 logits. They are compared after a softcap and before the temperature; of equal ones
    the lower id comes first.

    Args:
        hidden, weight, temperature, active_mask, tp_group, sequence_parallel, vocab_start: as for
            :func:`.rl.token_log_probs`. Tokens outside the mask have ids -1 and log-probabilities -inf, which
            are empty entries.
        k: from 1 to the size of the vocabulary; it may exceed the number of a rank's rows.
        batch_first: whether hidden states of three dimensions are ``[b, s, H]``, not ``[s, b, H]``; for those
            it must be given.
        config: ``logit_scale``, ``logit_softcap``, ``logit_precision``, ``true_vocab_size``; ``num_chunks``,
            ``chunk_tokens`` or ``memory_mb``, else 1 GiB of logits a chunk. Other options have no effect.

    Returns:
        ``log_probs`` fp32 and ``ids`` int64, ``[b, s, k]`` or ``[T, k]``, likeliest first, of all tokens and
        the same on every rank. If log-probabilities of a token are NaN (a logit is NaN or +inf, to which fp32
        overflows, or all are -inf), its ids are -1.

    Raises:
        TypeError, ValueError: an argument does not fit, or the ranks' arguments differ; on every rank, in
            every call.
        ImportError: fp32 logits of half-precision operands on a GPU need torch 2.8.

    Memory above inputs and outputs: a chunk's logits, ``4 * C * V`` bytes (``6 * C * V`` if rounded), some
    ``8 * C * sqrt(V * k)`` of candidates a few times, and with sequence parallelism its hidden states.

    Collectives, in order (R > 1): one all-gather of a few int64; with ``active_mask`` a MAX all-reduce of two
    bytes a token; with a temperature per token a MAX all-reduce of an int64. The host waits for these. Then,
    per chunk, an all-gather of hidden states (sequence parallelism) and one of int64 ``[C, k + 1]``.
    """
    history_of(tp_group)  # raises if it is no group
    comm = VocabParallel.of(tp_group, sequence_parallel)
    wrong: Exception | None = why_no_layout("hidden", hidden, batch_first)
    hidden = widened(sequence_first(hidden, batch_first), weight)
    labels = mask = hidden  # replaced below, unless an error is raised
    if isinstance(hidden, Tensor) and hidden.dim() in (2, 3):
        labels = torch.full((*hidden.shape[1:-1], len(hidden) * comm.num_parts), -1, device=hidden.device)
        temperature = temperature_of(temperature, labels.shape)
        active = labels == -1 if active_mask is None else active_mask
        if (wrong := wrong or why_no_mask(active, labels.shape)) is None:
            mask = active.to(labels.device).float()
    config = DEFAULT_CONFIG if config is None else config
    call = Call(hidden, weight, labels, tp_group, sequence_parallel, mask, vocab_start, config)
    call = call._replace(temperature=temperature, caller_error=wrong).completed()
    config, hidden, weight = call.config, call.hidden, call.weight
    try:
        check_arguments(call, comm)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k is {k!r}; expected a whole number, 1 or more")
        if hidden.dtype != torch.float32 and config.logit_precision != "activations":
            gemm_then_rows(hidden.device, logits_dtype=torch.float32)  # raises if torch cannot write fp32
    except (TypeError, ValueError, ImportError) as error:
        wrong = error
    starts, sizes, end = _shards(call, comm, wrong, {"k": k, "active_mask given": active_mask is not None})
    if k > (num_ids := end - min(starts)):
        raise ValueError(f"k is {k}; expected at most the {num_ids} ids of the vocabulary")
    with call.on_its_device(), autocast_off(hidden.device):
        hidden, parts = hidden.reshape(-1, hidden.shape[-1]), comm.num_parts
        mask, num_tokens = in_token_order(mask, labels, parts), len(hidden)
        if active_mask is not None:
            num_tokens = tokens.num_kept(tokens.count(mask, comm.group), num_tokens)
        kept = tokens.Kept.of(mask, num_tokens)
        if (inv_t := inv_temperature_of(call.temperature, labels, comm)) is None:
            inv_t = torch.full_like(mask, 1 / float(call.temperature))
        hidden, inv_t = kept.take(hidden, comm.part), kept.of_tokens(inv_t)
        log_probs, ids = mask.new_empty((*mask.shape, k)), labels.new_empty((*mask.shape, k))
        start, rows = starts[comm.rank], len(weight)
        real = min(max(end - start, 0), rows)  # rows that are no padding
        # Blocks of about sqrt(V / K) columns: then there are few blocks, and few columns in K of them.
        block = 1 << min(8, max(3, (real // k).bit_length() // 2))
        num_blocks = -(-max(rows, k) // block)
        if config.num_chunks is not None:
            cut = Cut.into(num_tokens, config.num_chunks)
        else:  # the same on every rank
            fit = (CHUNK_BYTES if config.memory_mb is None else config.memory_mb << 20) // (4 * max(sizes))
            fit = fit - fit % 128 if fit >= 128 else max(fit, 1)
            cut = Cut.of_length(num_tokens, max(1, (config.chunk_tokens or fit) // parts))
        buffer = mask.new_empty((parts * cut.longest, num_blocks * block))
        index = torch.arange(num_blocks * block + parts, device=mask.device)
        for of_chunk in (slice(chunk.start, chunk.stop) for chunk in cut.chunks):
            x, gathering = comm.gathered(hidden[of_chunk]) if parts > 1 else (hidden[of_chunk], DONE)
            gathering.wait()
            z, t = buffer[: len(x)], inv_t[:, of_chunk].reshape(-1, 1)
            if config.logit_precision == "activations":
                z[:, :rows] = x @ weight.t()
            else:
                write_logits(x, weight, z[:, :rows])
            scaled_logits(z, config.logit_scale, config.logit_softcap, in_place=True)
            z[:, real:] = -torch.inf
            here = _largest_here(z.unflatten(1, (num_blocks, block)), t, k, index, start, real)
            log_p, largest = _largest_of_all(here, t, comm)
            at = index[:parts].unsqueeze(-1), kept.tokens[:, of_chunk]
            log_probs[at], ids[at] = log_p.view(parts, -1, k), largest.view(parts, -1, k)
        log_probs[kept.skipped], ids[kept.skipped] = -torch.inf, -1
    made = [each.view(*reversed(labels.shape), k).transpose(0, labels.dim() - 1) for each in (log_probs, ids)]
    return made[0].contiguous(), made[1].contiguous()


def _shards(
    call: Call, comm: VocabParallel, error: Exception | None, more: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Compare a call over the ranks; first ids and rows of their shards, and the id behind the last real one.

    Arguments and collectives are those of :func:`.agree.compared`; the host waits.

    Raises:
        TypeError, ValueError: on every rank, if an argument is wrong or the ranks differ.
    """
    if comm.group is not None:
        with call.on_its_device():
            _, sizes, starts = compared(call, comm, error, more=more)
    elif error is not None:
        raise error
    else:
        sizes, starts = (call.weight.shape[0],), (0,)
        check_true_vocab_size(call.config.true_vocab_size, sizes[0])
    # From here on all ranks know the same numbers, so that all raise or none does.
    starts = starts or tuple(accumulate(sizes[:-1], initial=0))
    ranges = sorted((start, start + rows) for start, rows in zip(starts, sizes, strict=True))
    if any(left[1] != right[0] for left, right in pairwise(ranges)):
        raise ValueError(f"the vocabulary shards leave gaps: [start, stop) is {ranges}; expected none")
    return starts, sizes, call.config.true_vocab_size or ranges[-1][1]


def _largest_here(
    z: Tensor,  # [C, blocks, block] fp32: this shard's logits, -inf in columns of padding; overwritten
    inv_t: Tensor,  # [C, 1] fp32
    k: int,
    index: Tensor,  # int64: 0, 1, ...
    start: int,
    real: int,  # columns that are no padding
) -> Tensor:
    """Keys of the k largest logits of this shard, then its log-sum of ``exp(z * inv_t)``: ``[C, k + 1]``.

    The K blocks with the largest maxima hold the K largest logits: an entry of any other block has K maxima
    before it. Padding gets the lowest key.
    """
    num_blocks, block = z.shape[1:]
    maxima = z.amax(-1)
    best = ~_keys(maxima, index[:num_blocks]).topk(min(k, num_blocks)).values & 0xFFFFFFFF
    columns = (best.unsqueeze(-1) * block + index[:block]).flatten(1)
    z = z.flatten(1)
    keys = _keys(z.gather(1, columns), columns + start).masked_fill_(columns >= real, -(2**63))
    row_max = maxima.amax(-1, keepdim=True)
    e = z.sub_(row_max.clamp(min=torch.finfo(z.dtype).min)).mul_(inv_t).exp_()
    lse = row_max.double() * inv_t + e.sum(-1, keepdim=True).log()
    return torch.cat((keys.topk(k).values, lse.view(torch.int64)), dim=1)


def _largest_of_all(here: Tensor, inv_t: Tensor, comm: VocabParallel) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids ``[C, k]`` of the k largest logits over all shards.

    Collectives: one all-gather of ``here``, int64 ``[C, k + 1]``.
    """
    k = here.shape[1] - 1
    every, gathering = comm.gathered(here)
    gathering.wait()
    keys, lse = every.view(comm.size, len(here), k + 1).split((k, 1), dim=-1)
    keys = keys.transpose(0, 1).flatten(1).topk(k).values
    bits = (keys >> 32).to(torch.int32)
    values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    log_p = (values.double() * inv_t - lse.view(torch.float64).logsumexp(0)).float()
    return log_p, (~keys & 0xFFFFFFFF).masked_fill_(log_p.isnan(), -1)


def _keys(values: Tensor, places: Tensor) -> Tensor:
    """Keys int64 in the order of fp32 ``values``, then of lower ``places``; the low half is ``~place``.

    -0.0 counts as 0.0.
    """
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) * 2**32 + (~places & 0xFFFFFFFF)
