"""Which heads stay with Megatron, one reason at a time, without building a model."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import stock_path

LAYER = {
    **dict.fromkeys(stock_path.LAYER_ATTRIBUTES, 1),
    **{"bias": None, "gather_output": False, "is_expert": False, "disable_grad_reduce": False},
    "weight": None,
}


class GPTModel:
    """A head, and a loss that takes deferred logits."""

    def __init__(self, without: str = "", **config):
        self.output_layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
        torch.nn.Module.__init__(self.output_layer)
        for name, value in LAYER.items():
            if name != without:
                setattr(self.output_layer, name, value)
        self.config = types.SimpleNamespace(params_dtype=torch.bfloat16, **config)

    def compute_language_model_loss(self, labels, logits): ...


setattr(GPTModel.compute_language_model_loss, stock_path.TAKES_DEFERRED, True)


def test_batch_invariance_is_megatrons():
    """Its mode replaces aten's products and softmax by ones whose sums do not depend on the batch."""
    assert stock_path.reason_at_build(GPTModel(), None) is None
    assert stock_path.reason_at_build(GPTModel(batch_invariant_mode=False), None) is None
    reason = stock_path.reason_at_build(GPTModel(batch_invariant_mode=True), None)
    assert reason is not None and "--batch-invariant-mode" in reason
    with pytest.raises(ValueError, match=r"z_loss.*batch-invariant-mode"):
        stock_path.refuse_options(FusedCEConfig(z_loss=1e-4), reason)


@pytest.mark.parametrize("name", list(LAYER))
def test_a_layer_laid_out_otherwise_stays(name):
    """Megatron moves an attribute: a reason in words, no AttributeError."""
    reason = stock_path.reason_at_build(GPTModel(without=name), None)
    assert reason is not None and name in reason
