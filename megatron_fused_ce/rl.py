"""Reinforcement learning, public names: log-probabilities, likeliest ids, on-policy distillation."""

from megatron_fused_ce.distillation.loss import token_divergence
from megatron_fused_ce.ops.log_probs import LogProbOptions, token_log_probs
from megatron_fused_ce.ops.topk import fused_linear_topk

__all__ = ["LogProbOptions", "fused_linear_topk", "token_divergence", "token_log_probs"]
