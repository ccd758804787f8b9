"""The Hopper kernel's launch gives tensors by position: here without a GPU, each under its name."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.kernels.records import GradEpilogue, RowOptions, TileStatistics

pytest.importorskip("triton.experimental.gluon")
from megatron_fused_ce.kernels import scaled_exp_hopper as hopper

C, H, V = 3, 16, 300


@pytest.fixture
def launched(monkeypatch):
    """Arguments of the last launch by the kernel's names for them."""
    given = {}

    class Kernel:
        def bind(self, grid, numbers, **constants):
            def launch(tensors, descriptors):
                values = (*descriptors, *tensors, *numbers, *constants.values())
                given.update(zip(hopper._gemm_kernel.arg_names, values, strict=True))
                assert list(given)[-len(constants) :] == list(constants)

            return launch

    monkeypatch.setattr(hopper, "_gemm", Kernel())
    monkeypatch.setattr(hopper, "_descriptor", lambda tensor, block: tensor)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 132)
    hopper._bound_gemm.cache_clear()
    yield given
    hopper._bound_gemm.cache_clear()


def operands():
    return {
        **{"tokens": torch.empty(C, H).bfloat16(), "weight": torch.empty(V, H).bfloat16()},
        **{"out": torch.empty(C, V).bfloat16(), "labels": torch.empty(C, dtype=torch.int64)},
        **{"table": torch.empty(8, dtype=torch.int32), "inv_temperature": torch.empty(C)},
    }


def assert_launched(launched, of, form, **others):
    """Each tensor, and each number, is what the kernel's argument of that name got."""
    names = {"tokens": "tokens_desc", "weight": "weight_desc", "out": "out_desc", "labels": "label_ptr"}
    expected = {names.get(name, f"{name}_ptr"): tensor for name, tensor in of.items()}
    expected |= {"valid_columns_ptr": form.valid_columns, **others}
    expected |= {"num_rows": C, "num_columns": V, "hidden_size": H}
    for name, value in expected.items():
        same = launched[name] is value if isinstance(value, torch.Tensor) else launched[name] == value
        assert same and value is not None, name


def test_statistics(launched):
    of, shift = operands(), torch.empty(C)
    form = RowOptions(valid_columns=torch.tensor([V]), with_weighted=True)
    tiles = hopper.scaled_exp_gemm(row_shift2=shift, logit_scale=0.5, with_argmax=True, form=form, **of)
    written = {f"{name}_ptr": tensor for name, tensor in tiles._asdict().items() if name != "tile_columns"}
    assert len(written) == len(TileStatistics._fields) - 1
    assert_launched(launched, of, form, row_shift_ptr=shift, logit_scale=0.5, **written)


def test_gradients(launched):
    of, gradient = operands(), GradEpilogue(*[torch.empty(C) for _ in GradEpilogue._fields])
    form = RowOptions(valid_columns=torch.tensor([V]), softcap=30.0)
    hopper.grad_logits_gemm(gradient=gradient, logit_scale=2.0, form=form, **of)
    names = ("row_shift", "factor", "at_label", "entropy_factor")
    rows = {f"{name}_ptr": tensor for name, tensor in zip(names, gradient, strict=True)}
    assert_launched(launched, of, form, logit_scale=2.0, softcap=30.0, **rows)
