"""The table of peers: nothing installed is no error, and what is there computes the head."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.scripts.bench import measure, peers
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.loss import Loss
from megatron_fused_ce.scripts.bench.problem import World
from tests.support.megatron import NEWEST, of_core
from tests.support.ranks import Rank, on_ranks

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


class LocalLoss(torch.autograd.Function):
    """``[T]`` of this rank's shard, as verl and Liger give it; ``grad_hidden`` is this shard's share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, reduces: bool) -> Tensor:
        logits, local = hidden @ weight.t(), labels - dist.get_rank() * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        columns = local.where(here, 0)
        both = torch.stack([logits.exp().sum(-1), logits.gather(1, columns[:, None])[:, 0].where(here, 0.0)])
        dist.all_reduce(both)
        ctx.save_for_backward(hidden, weight, logits, both[0], columns, here)
        ctx.reduces = reduces
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, logits, total, columns, here = ctx.saved_tensors
        grad_logits = logits.exp() / total[:, None]
        grad_logits.scatter_add_(1, columns[:, None], -here.float()[:, None])
        grad_logits *= grad[:, None]
        grad_hidden = grad_logits @ weight
        if ctx.reduces:
            dist.all_reduce(grad_hidden)
        return grad_hidden, grad_logits.t() @ hidden, None, None


class InGroup(World):
    """The world of a test's ranks."""

    def _init_group(self) -> Any:
        return dist.group.WORLD


@on_ranks(of_core(2, NEWEST))
def test_peers_over_ranks_compute_the_definition(rank: Rank):
    """With sequence parallelism and without; a rank that forgets its own labels is seen by both."""

    def verl(hidden, weight, labels, temperature, reduction, group):  # type: ignore[no-untyped-def]
        assert (temperature, reduction) == (1.0, "none")
        return -LocalLoss.apply(hidden, weight, labels, False), None

    def liger(hidden, weight, labels, temperature, ignored, entropy, group):  # type: ignore[no-untyped-def]
        assert (temperature, ignored, entropy) == (1.0, -100, False)
        return LocalLoss.apply(hidden, weight, labels, True)

    def forgetful(hidden, weight, labels, *rest):  # type: ignore[no-untyped-def]
        own = labels // weight.shape[0] == rank.rank == rank.size - 1
        return verl(hidden, weight, labels.masked_fill(own, -1), *rest)

    world = InGroup(use_gpu=False, size=rank.size)
    world.rank = rank.rank
    named = "verl.utils.kernel.linear_cross_entropy", "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    functions = {"linear_cross_entropy": verl}, {"_apply_tp_fallback": liger}
    sys.modules.update({n: types.SimpleNamespace(**f) for n, f in zip(named, functions, strict=True)})  # type: ignore[misc]
    for world.sequence_parallel in (False, True):
        problem = Loss(Cell.of("16x64", 48), world, dtype=torch.float32)
        for name, function in (("liger-tp-loop", liger), ("verl-tp", verl), ("verl-tp", forgetful)):
            sys.modules[named[0]].linear_cross_entropy = function  # type: ignore[attr-defined]
            case = replace(peers.PEERS[name], library="torch", limits=None).case(world)
            outcome = measure.Outcome(case, case.why_not)
            measure.check([outcome], problem, world)
            assert (outcome.reason is None) == (function is not forgetful), (name, outcome)
            assert function is forgetful or max(outcome.errors.values()) < 1e-6, outcome
            assert world.everyone(outcome.errors) == [outcome.errors] * rank.size
