"""Names the phases of a forward and a backward, for profilers.

``with phase("logits"):`` is the range ``fused-ce logits`` while torch's profiler runs, or ``emit_nvtx`` under
Nsight Systems. Without them it does nothing: a range would take 5.6 us of the host even if nobody records it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

#: Name of a phase on the model's stream -> description. The phase of a collective is the wait for it.
PHASES = {
    "gather": "wait for the other ranks' hidden states (sequence parallelism)",
    "logits": "the GEMM that makes a chunk's logits, or E",
    "statistics": "row statistics; finalizing saved E",
    "merge": "wait for the other ranks' statistics; the losses",
    "grad-logits": "gradients of the logits; with recompute their GEMM too",
    "grad-hidden": "GEMM with the weight; row scales",
    "reduce": "wait for the sum of grad_hidden over the ranks",
    "grad-weight": "GEMM with the hidden states, summed over the chunks",
}

_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """Context for one of :data:`PHASES`. Where one opens inside another, the time counts for both."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"fused-ce {name}")
    return _NOTHING
