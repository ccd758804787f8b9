"""verl's fused log-probabilities and entropy (``use_fused_kernels``), made by this head.

    from megatron_fused_ce.adapter.verl import serve_verl
    serve_verl()  # on every rank, before its models are built

Replaces verl's output processor, which GPTModel calls from megatron-core 0.18 on, and the function that verl
calls in its place with an older one and with ``overlap_moe_expert_parallel_comm``, after a look at their
parameters. verl rolls the labels and packs the sequences before; both stay as they are.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter.rl_stacks import function_of
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.loss import TokenLogProbs
from megatron_fused_ce.rl import token_log_probs

MODULE = "verl.models.mcore.model_forward_fused"
FUNCTION = "fused_output_processor"
#: What the processor is called with and this package reads.
PARAMETERS = ("hidden_states", "output_layer", "output_weight", "labels", "context", "config")
#: verl's kernel, an autograd function, and the modules that have it by the name of its own module.
KERNEL = "verl.utils.kernel.linear_cross_entropy"
KERNEL_PARAMETERS = ("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group")
CALLERS = (MODULE, "verl.models.mcore.model_forward_1f1b_overlap")


def serve_verl(config: FusedCEConfig | None = None, entropy: str = "differentiable") -> None:
    """Let verl's fused log-probabilities and entropy be this head's, with ``config``.

    Args:
        entropy: as of :func:`.rl.token_log_probs`. ``detached`` is faster, for runs whose entropy coefficient
            is 0: ``differentiable`` computes the logits again in the backward, unless ``config`` names a
            strategy.

    Raises:
        ImportError: there is no verl.
        RuntimeError: its functions take other parameters than those that this was written for.
        ValueError: verl needs an entropy.
    """
    if entropy not in ("detached", "differentiable"):
        raise ValueError(f"entropy is {entropy!r}; verl reads it: choose detached or differentiable")
    module = import_module(MODULE)
    way_out = "leave serve_verl() out, verl then makes its log-probabilities itself"
    found = function_of(module, FUNCTION, PARAMETERS, True, way_out)
    kernel = import_module(KERNEL)
    function_of(kernel.LinearCrossEntropy, "forward", KERNEL_PARAMETERS, False, way_out)

    @functools.wraps(found)
    def process(*, hidden_states: Tensor, **given: Any) -> Any:
        made = log_probs_of(hidden_states, **given, entropy=entropy, fused_ce_config=config)
        output = module.CausalLMOutputForPPO(
            loss=None, logits=None, past_key_values=None, hidden_states=hidden_states, attentions=None
        )
        assert made.entropy is not None
        output.log_probs, output.entropy = made.log_prob.flatten(), made.entropy.flatten()
        return output

    def linear_cross_entropy(
        hidden: Tensor,  # [s, 1, H], gathered by a function whose backward sums grad_hidden
        weight: Tensor,
        labels: Tensor,  # [1, s]
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if reduction != "none":
            raise ValueError(f"reduction is {reduction!r}; verl's models call for none")
        made = token_log_probs(
            hidden,
            weight,
            labels,
            temperature=temperature,
            entropy=entropy,
            reduce_grad_hidden=False,
            tp_group=dist_process_group,
            config=config,
        )
        assert made.entropy is not None
        return made.log_prob.flatten(), made.entropy.flatten()

    setattr(module, FUNCTION, process)
    for name in CALLERS:
        with suppress(ImportError):  # the second needs a newer Megatron
            setattr(import_module(name), linear_cross_entropy.__name__, linear_cross_entropy)


def log_probs_of(
    hidden: Tensor,  # [s / R, 1, H] with sequence parallelism, else [s, 1, H]
    *,
    output_layer: Any,
    output_weight: Tensor | None,  # of tied embeddings
    labels: Tensor,  # [1, s]
    context: Any,  # has the temperature
    config: Any,  # Megatron's
    entropy: str,
    fused_ce_config: FusedCEConfig | None,
    **unused: Any,
) -> TokenLogProbs:
    """Of each token, fp32 ``[1, s]``. Hidden states are gathered chunk by chunk, not as a whole."""
    return token_log_probs(
        hidden,
        output_layer.weight if output_weight is None else output_weight,
        labels,
        temperature=context.temperature,
        entropy=entropy,
        tp_group=output_layer.tp_group,
        sequence_parallel=config.sequence_parallel,
        config=fused_ce_config,
    )
