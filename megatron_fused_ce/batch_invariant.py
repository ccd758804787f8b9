"""Log-probabilities by whatever replaces ``aten::mm`` and ``aten::_log_softmax``: Megatron's
``--batch-invariant-mode``, whose sums do not depend on the other tokens of a batch.

The mode replaces functional operators alone: a GEMM with ``out=`` would leave it without a word. So a chunk's
logits are ``torch.mm(hidden, weight.t())``, gathered over the ranks into whole rows, in a fresh contiguous
tensor, and given to ``log_softmax``: a row's bits are those of whole logits, for backends that promise them
for any number of rows (triton, deepgemm; not te_native).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import autocast
from megatron_fused_ce.autograd import differentiated_once
from megatron_fused_ce.call import Call, check_arguments
from megatron_fused_ce.chunking import Cut
from megatron_fused_ce.op import linear_cross_entropy, uncompiled
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.shards import Shards, cut_of
from megatron_fused_ce.targets import in_token_order


class _Evaluation(NamedTuple):
    call: Call  # without its tensors
    comm: VocabParallel
    in_fp32: bool

    def log_probs(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Of a chunk ``[C, H]`` of all ranks' tokens at ``labels [C]``.

        Collectives: one all-gather of the logits (R > 1).
        """
        logits, comm = torch.mm(hidden, weight.t()), self.comm
        dtype = torch.float32 if self.in_fp32 else logits.dtype
        if comm.size > 1:
            shards, gathering = comm.gathered(logits)
            gathering.wait()
            shards = shards.view(comm.size, *logits.shape).transpose(0, 1)
            logits = shards.new_empty(shards.shape, dtype=dtype).copy_(shards).flatten(1)
        log_p = torch.log_softmax(logits.to(dtype), dim=-1)
        known = (labels >= 0) & (labels < log_p.shape[1])
        of_label = log_p.gather(1, labels.where(known, 0).unsqueeze(-1)).squeeze(-1)
        return of_label.where(known, log_p.amax(-1))

    def cut(self, num_tokens: int, weight: Tensor) -> Cut:
        # Logits of the shard, of all shards, in fp32, and their logarithms.
        token_bytes = self.comm.size * len(weight) * (2 * weight.element_size() + 8)
        return cut_of(self.call.config, num_tokens, self.comm.num_parts, token_bytes)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, of: _Evaluation) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(hidden, weight, labels)
        comm, flat = of.comm, hidden.reshape(-1, hidden.shape[-1])
        num_parts = comm.num_parts
        ids = in_token_order(labels, labels, num_parts).to(torch.int64)
        made = flat.new_empty(ids.shape, dtype=torch.float32 if of.in_fp32 else flat.dtype)
        with autocast.off(hidden.device):
            for chunk in of.cut(len(flat), weight).chunks:
                x = flat[chunk.start : chunk.stop]
                if num_parts > 1:
                    x, gathering = comm.gathered(x)
                    gathering.wait()
                part = slice(chunk.start, chunk.stop)
                made[:, part] = of.log_probs(x, weight, ids[:, part].flatten()).view(num_parts, -1)
        made = made.view(*reversed(labels.shape))
        return made.t().contiguous() if labels.dim() == 2 else made

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the head, whose upstream gradients are known now: three GEMMs."""
        hidden, weight, labels = ctx.saved_tensors
        given = [
            x.detach().requires_grad_(needs)
            for x, needs in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        ]
        upstream = -grad.float()
        call = ctx.of.call._replace(hidden=given[0], weight=given[1], labels=labels, token_weights=upstream)
        with torch.enable_grad():
            loss = linear_cross_entropy(call).loss
        wanted = [x for x in given if x.requires_grad]
        made = iter(torch.autograd.grad(loss, wanted, upstream, allow_unused=True))
        return *(next(made) if x.requires_grad else None for x in given), None, None


@uncompiled
def log_probs(call: Call, in_fp32: bool = True) -> Tensor:
    """:func:`.rl.batch_invariant_log_probs` with fields of :class:`.call.Call`."""
    call = call.completed()
    with call.on_its_device():
        config, error = call.config, None
        comm = VocabParallel.of(call.tp_group, call.sequence_parallel, config.merge, call.reduce_grad_hidden)
        try:
            check_arguments(call, comm)
            if config.loss_options or config.logit_scale != 1.0:
                options = config.loss_options or f"logit_scale {config.logit_scale}"
                raise ValueError(
                    f"batch-invariant log-probabilities are those of the plain logits, without {options}"
                )
        except (TypeError, ValueError) as one:
            error = one
        shards = Shards.agreed(call, comm, error, {"in_fp32": in_fp32})
        if len(set(shards.sizes)) > 1 or list(shards.starts) != sorted(shards.starts):
            raise ValueError(
                f"the vocabulary shards begin at {shards.starts} with {shards.sizes} rows; expected equal "
                "ones in rank order, whose logits are gathered as they lie"
            )
        made: Tensor = _LogProbs.apply(
            call.hidden, call.weight, call.labels, _Evaluation(call, comm, in_fp32)
        )
        return made
