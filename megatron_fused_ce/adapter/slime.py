"""slime's log-probabilities and entropy, made by this head.

    --custom-megatron-init-path megatron_fused_ce.adapter.slime.serve_slime

slime's workers call that function before their models are built. slime calls the model without labels and
takes the log-softmax of its logits outside. The model then returns deferred logits; they pass slime's checks,
squeeze and division by the temperature, and one function of slime's evaluates them, after a look at its
parameters.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter import deferred_logits, switch
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.rl_stacks import entropy_of, function_of
from megatron_fused_ce.config import FusedCEConfig

MODULE = "slime.backends.megatron_utils.loss"
FUNCTION = "calculate_log_probs_and_entropy"
PARAMETERS = (
    *("logits", "tokens", "tp_group", "with_entropy", "chunk_size", "log_prob_keep_mask"),
    "with_entropy_grad",
)


def serve_slime(args: Any = None, config: FusedCEConfig | None = None) -> None:
    """Let log-probabilities and entropy of models built from now on be this head's, with ``config``.

    slime's chunk length is then not used. With its mask of kept tokens (top-p replay) logits are computed,
    and slime's own function takes them; the same for any other use of them.

    Args:
        args: slime's, not used.

    Raises:
        ImportError: there is no slime; or as :func:`.switch.enable`.
        RuntimeError: its function takes other parameters than those that this was written for.
    """
    module = import_module(MODULE)
    way_out = "leave serve_slime out, slime then makes its log-probabilities itself"
    found = function_of(module, FUNCTION, PARAMETERS, False, way_out)

    @functools.wraps(found)
    def calculate(
        logits: Any,
        tokens: Tensor,
        tp_group: Any,
        with_entropy: bool = False,
        chunk_size: int = -1,
        log_prob_keep_mask: Tensor | None = None,
        with_entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(logits, DeferredLogits) and log_prob_keep_mask is None:
            made = logits.log_probs(tokens, entropy_of(with_entropy, with_entropy_grad))
            if made is not None:
                return made[0].unsqueeze(-1), made[1]
        return found(  # type: ignore[no-any-return]
            deferred_logits.real(logits),
            tokens,
            tp_group,
            with_entropy=with_entropy,
            chunk_size=chunk_size,
            log_prob_keep_mask=log_prob_keep_mask,
            with_entropy_grad=with_entropy_grad,
        )

    switch.enable(config)
    setattr(module, FUNCTION, calculate)
    deferred_logits.caller_takes_shards()
