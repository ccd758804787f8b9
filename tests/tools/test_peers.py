"""The table of peers: nothing installed is no error, and what is there computes the head."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fused_ce.scripts.bench import peers

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("transformer_engine", "liger_kernel", "quack", "cutlass", "cut_cross_entropy", "verl")


def test_nothing_foreign_is_needed_at_import():
    """As on a GPU: each finder is asked, and says what is missing."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in FOREIGN)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {blocked}"
        "import torch; torch.cuda.get_device_capability = lambda: (9, 0); "
        "from megatron_fused_ce.scripts.bench import peers, op; "
        "found = {p.name: op.why_not(p.find) for p in peers.PEERS.values()}; "
        "print([name for name, reason in found.items() if reason and 'ModuleNotFoundError' not in reason],"
        "[name for name, reason in found.items() if reason is None])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['torch-eager', 'torch-compile']", done.stdout


def test_the_command_lists_and_tries(capsys):
    assert peers.main(["--device", "cpu", "--names", "torch-eager", "liger", "verl-tp", "--try-out"]) == 0
    eager, liger, verl = capsys.readouterr().out.splitlines()
    assert "3 GEMMs, per token" in eager and "ready [torch " in eager
    assert "one upstream for all tokens NO: needs a CUDA device [liger-kernel" in liger
    assert "4 GEMMs, per token" in verl and "NO: needs a CUDA device" in verl
    assert peers.main(["--names", "none"]) == 2


def test_refusals_and_chunks():
    def refusal(name: str, T: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16) -> str:
        weight = torch.empty(V, H, device="meta")
        problem: Any = types.SimpleNamespace(num_tokens=T, weight=weight, num_rows=V, dtype=dtype)
        return peers.PEERS[name].limits(problem) or ""  # type: ignore[misc]

    assert refusal("liger-cute", 8192, 4096, 128256) == refusal("verl-tp", 8192, 4096, 32064) == ""
    assert refusal("liger-cute", 8192, 2048, 151936) == "needs T % 128 == 0 and V % 256 == 0"  # qwen's
    assert refusal("quack", 8191, 4096, 128256) and "H % 128" in refusal("verl-tp", 8192, 2880, 32064)
    assert refusal("liger-cute", 8192, 4096, 128256, torch.float16) == "takes bfloat16 only"
    chunks = {(8192, 2048): 4096, (8192, 4096): 8192, (2048, 2048): 1024, (4096, 4096): 2048}
    chunks |= {(6144, 2048): 8192, (32768, 8192): 4096}  # 4096 leaves a last chunk of 2048
    assert {sizes: peers.scaled_exp_chunk(*sizes) for sizes in chunks} == chunks
    with pytest.raises(ValueError, match="exactly H = 1024"):
        peers.scaled_exp_chunk(1024, 1024)
    for T, H, V in ((8192, 4096, 128256), (131072, 8192, 128256), (1024, 2048, 151936), (32768, 64, 512)):
        budget = peers.liger_chunk_budget(T, H, V)
        sizes = [1 << (-(-T // -(-V // (b * H))) - 1).bit_length() for b in (budget, budget // 2 or 1)]
        assert sizes[0] >= min(T, 4096) and (budget == 1 or sizes[1] < min(T, 4096))
