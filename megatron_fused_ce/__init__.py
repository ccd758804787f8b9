"""Vocab-parallel fused linear cross-entropy for Megatron-LM: the loss without the logits.

Shape letters, the same in every file, kernel and document:

======  ==========================================================================
``s``   sequence length seen by the tensor-parallel group
``b``   micro-batch size
``T``   tokens seen by the tensor-parallel group, ``s * b``
``H``   hidden size
``V``   vocabulary rows held by this rank (the shard)
``R``   ranks of the tensor-parallel group
``C``   tokens of one chunk, counted over the whole tensor-parallel group
``n``   tokens of one chunk that this rank holds: ``C / R`` with sequence parallelism
======  ==========================================================================

Read the code in this order: :mod:`.op`, :mod:`.strategies`, :mod:`.row_ops`,
:mod:`.vocab_parallel`, :mod:`.grad_weight`; then :mod:`.adapter` for Megatron.
"""

from megatron_fused_ce.adapter.switch import Counters, counters, disable, enable
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.op import fused_linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "Counters",
    "FusedCEConfig",
    "counters",
    "disable",
    "enable",
    "fused_linear_cross_entropy",
]
