"""The likeliest K ids of each token from hidden states, without the logits of all tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import autocast_off, uncompiled
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, takes_config
from megatron_fused_ce.head.targets import in_token_order, inv_temperature_of
from megatron_fused_ce.head.validation import check_arguments
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows, write_logits
from megatron_fused_ce.ops.arguments import (
    sequence_first,
    temperature_of,
    why_no_layout,
    why_no_mask,
    widened,
)
from megatron_fused_ce.ops.shards import Shards, cut_of
from megatron_fused_ce.ranks.agreement import history_of
from megatron_fused_ce.ranks.collectives import DONE, VocabParallel


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

    The same as ``((hidden @ weight.T).float() / temperature).log_softmax(-1).topk(k)`` over all ranks' rows.
    Logits are fp32 products, compared after a softcap and before the temperature, and if equal by their ids.

    Args:
        hidden, weight, temperature, active_mask, tp_group, sequence_parallel, vocab_start: as for
            :func:`.rl.token_log_probs`. Ids outside the mask are -1, log-probabilities -inf: no entry there.
        k: from 1 to the size of the vocabulary; it may be more than a rank has rows.
        batch_first: whether hidden states of three dimensions, for which it must be said, are ``[b, s, H]``.
        config: ``logit_scale``, ``logit_softcap``, ``logit_precision``, ``true_vocab_size``; ``num_chunks``,
            ``chunk_tokens`` or ``memory_mb``, else 1 GiB of logits a chunk. The rest does not count.

    Returns:
        ``log_probs`` fp32 and ``ids`` int64, ``[b, s, k]`` or ``[T, k]``, likeliest first, of all tokens and
        the same on every rank. Where log-probabilities are NaN (a logit of NaN or +inf, which an fp32 product
        above 3.4e38 is; or all of -inf), ids are -1.

    Raises:
        TypeError, ValueError: on every rank, in every call: an argument does not fit, or ranks differ.
        ImportError: fp32 logits of half-precision operands on a GPU need torch 2.8.

    Memory above inputs and outputs: a chunk's logits, ``4 * C * V`` bytes (``6 * C * V`` if rounded), some
    ``8 * C * sqrt(V * k)`` of candidates a few times, and with sequence parallelism its hidden states.

    Collectives (R > 1): one all-gather of a few int64, for which the host waits; with a temperature per token
    a MAX all-reduce of an int64 and with ``active_mask`` one of two bytes a token, waited for too; then, per
    chunk, the all-gather of hidden states (sequence parallelism) and one of int64 ``[C, k + 1]``.
    """
    wrong: Exception | None = why_no_layout("hidden", hidden, batch_first)
    hidden = widened(sequence_first(hidden, batch_first), weight)
    history_of(tp_group)  # raises where it is none
    comm = VocabParallel.of(tp_group, sequence_parallel)
    labels = mask = hidden  # for the error alone
    if isinstance(hidden, Tensor) and hidden.dim() in (2, 3):
        labels = torch.full((*hidden.shape[1:-1], len(hidden) * comm.num_parts), -1, device=hidden.device)
        temperature = temperature_of(temperature, labels.shape)
        active = labels == -1 if active_mask is None else active_mask
        if (wrong := wrong or why_no_mask(active, labels.shape)) is None:
            mask = active.to(labels.device).float()
    call = Call(
        hidden, weight, labels, tp_group=tp_group, sequence_parallel=sequence_parallel, token_weights=mask,
        vocab_start=vocab_start, temperature=temperature,
        config=DEFAULT_CONFIG if config is None else config, caller_error=wrong,
    ).completed()  # fmt: skip
    config, hidden, weight = call.config, call.hidden, call.weight
    try:
        check_arguments(call, comm)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k is {k!r}; expected a whole number, 1 or more")
        same = hidden.dtype == torch.float32 or config.logit_precision == "activations"
        gemm_then_rows(hidden.device, logits_dtype=None if same else torch.float32)  # can torch write it?
    except (TypeError, ValueError, ImportError) as error:
        wrong = error
    shards = Shards.agreed(call, comm, wrong, {"k": k, "active_mask given": active_mask is not None})
    if k > shards.end - shards.first:
        raise ValueError(f"k is {k}; expected at most the {shards.end - shards.first} ids of the vocabulary")
    with call.on_its_device(), autocast_off(hidden.device):
        hidden, parts = hidden.reshape(-1, hidden.shape[-1]), comm.num_parts
        mask, num_tokens = in_token_order(mask, labels, parts), len(hidden)
        if active_mask is not None and (counted := tokens.count(mask, comm.group)) is not None:
            num_tokens = tokens.num_kept(tokens.num_unmasked(counted), num_tokens)
        kept = tokens.Kept.of(mask, num_tokens)
        if (inv_t := inv_temperature_of(call.temperature, labels, comm)) is None:
            inv_t = torch.full_like(mask, 1 / float(call.temperature))
        hidden, inv_t = kept.take(hidden, comm.part), kept.of_tokens(inv_t)
        log_probs, ids = mask.new_empty((*mask.shape, k)), labels.new_empty((*mask.shape, k))
        # The K blocks of columns with the largest maxima hold the K largest logits: an entry of another block
        # has K maxima before it. With sqrt(V / K) columns each, both are few. Padding has the lowest key.
        start, rows = shards.starts[comm.rank], len(weight)
        real = min(max(shards.end - start, 0), rows)  # without padding
        block = 1 << min(8, max(3, (real // k).bit_length() // 2))
        blocks = -(-max(rows, k) // block)
        cut = cut_of(config, num_tokens, parts, 4 * max(shards.sizes), 128)
        buffer = mask.new_empty((parts * cut.longest, blocks * block))
        index = torch.arange(blocks * block + parts, device=mask.device)
        for of_chunk in (slice(chunk.start, chunk.stop) for chunk in cut.chunks):
            x, gathering = comm.gathered(hidden[of_chunk]) if parts > 1 else (hidden[of_chunk], DONE)
            gathering.wait()
            z, t = buffer[: len(x)], inv_t[:, of_chunk].reshape(-1, 1)
            if config.logit_precision == "activations":
                z[:, :rows] = x @ weight.t()
            else:
                write_logits(x, weight, z[:, :rows])
            if config.logit_scale != 1.0:
                z.mul_(config.logit_scale)
            if config.logit_softcap is not None:
                z.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
            z[:, real:] = -torch.inf
            maxima = z.unflatten(1, (blocks, block)).amax(-1)
            best = ~_keys(maxima, index[:blocks]).topk(min(k, blocks)).values & 0xFFFFFFFF
            columns = (best.unsqueeze(-1) * block + index[:block]).flatten(1)
            keys = _keys(z.gather(1, columns), columns + start).masked_fill_(columns >= real, -(2**63))
            row_max = maxima.amax(-1, keepdim=True)
            e = z.sub_(row_max.clamp(min=torch.finfo(z.dtype).min)).mul_(t).exp_()
            lse = row_max.double() * t + e.sum(-1, keepdim=True).log()
            every, gathering = comm.gathered(torch.cat((keys.topk(k).values, lse.view(torch.int64)), dim=1))
            gathering.wait()
            keys, lse = every.view(comm.size, len(x), k + 1).split((k, 1), dim=-1)  # of each shard
            keys = keys.transpose(0, 1).flatten(1).topk(k).values
            bits = (keys >> 32).to(torch.int32)
            values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
            log_p = (values.double() * t - lse.view(torch.float64).logsumexp(0)).float()
            at = index[:parts].unsqueeze(-1), kept.tokens[:, of_chunk]
            log_probs[at] = log_p.view(parts, -1, k)
            ids[at] = (~keys & 0xFFFFFFFF).masked_fill_(log_p.isnan(), -1).view(parts, -1, k)
        log_probs[kept.skipped], ids[kept.skipped] = -torch.inf, -1
    made = [each.view(*reversed(labels.shape), k).transpose(0, labels.dim() - 1) for each in (log_probs, ids)]
    return made[0], made[1]


def _keys(values: Tensor, places: Tensor) -> Tensor:
    """int64, larger for larger fp32 ``values`` (-0.0 is 0.0), then for lower ``places``, half of ``~key``."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) * 2**32 + (~places & 0xFFFFFFFF)
