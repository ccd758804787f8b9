"""Which launches go past Triton's binder, and with which arguments; the compiled kernel is a stand-in."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.kernels import launch
from megatron_fused_ce.kernels.launch import Launch


class Kernel:
    """Remembers its launches: those by the binder, and direct ones by their arguments."""

    arg_names = ("x_ptr", "n", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.bound = 0
        self.direct = []

    def __getitem__(self, grid):
        return self._through_the_binder

    def _through_the_binder(self, *args, **constants):
        self.bound += 1
        return self

    def run(self, *args) -> None:
        self.direct.append(args)


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(launch, "_raw_stream", lambda index: f"stream {index}")
    monkeypatch.setattr(launch, "_called_directly", lambda: True)
    return Kernel()


def test_a_direct_launch(kernel):
    one, two, half = torch.zeros(16), torch.zeros(16), torch.zeros(16, dtype=torch.float16)
    launches = Launch(kernel, num_warps=4)
    launches((8,), (one,), (5,), BLOCK=2)
    assert (kernel.bound, kernel.direct) == (1, [])
    launches((8,), (two,), (5,), BLOCK=2)
    before = 8, 1, 1, "stream -1", "function", "metadata", None, None, None
    assert kernel.direct == [(*before, two.data_ptr(), 5, 2)]
    launches((8,), (half,), (5,), BLOCK=2)  # another dtype, number, constant, grid
    launches((8,), (two,), (6,), BLOCK=2)
    launches((8,), (two,), (5,), BLOCK=4)
    launches((9,), (two,), (5,), BLOCK=2)
    assert (kernel.bound, len(kernel.direct)) == (5, 1)


@pytest.mark.parametrize("watched", [False, True])
def test_what_only_the_binder_can_launch(kernel, watched, monkeypatch):
    """A tensor that does not begin at a multiple of 16 bytes; any, where somebody watches launches."""
    bound = Launch(kernel).bind((8,), (5,), BLOCK=2)
    aligned = torch.zeros(16)
    bound((aligned,))
    if watched:
        monkeypatch.setattr(launch, "_watched", lambda: True)
    bound((aligned if watched else aligned[1:],))
    assert (kernel.bound, kernel.direct) == (2, [])
