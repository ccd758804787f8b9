"""The table of peers: nothing installed is no error, and what torch itself offers computes the head."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_fused_ce.scripts.bench import peers

ROOT = Path(__file__).resolve().parents[2]
T, H, V = 24, 16, 40

CPU = torch.device("cpu")
FOREIGN = ("transformer_engine", "transformer_engine_ce", "liger_kernel", "quack", "cutlass")
FOREIGN += ("cut_cross_entropy", "verl", "verl_ce")
PARALLEL = peers.Parallel(group=None, rank=0, size=2)
OVER_RANKS = ["liger-tp-loop", "verl-tp"]


def problem(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator)
    return [hidden, weight, labels, torch.randn(T, generator=generator)]


def exact(hidden, weight, labels, upstream) -> list[torch.Tensor]:
    """Loss [T] and both gradients of the plain definition in fp64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T
    loss = logits.logsumexp(-1) - logits[torch.arange(T), labels]
    loss.backward(upstream.double().expand(T))
    return [loss.detach(), hidden.grad, weight.grad]


def by_name(name: str) -> peers.Peer:
    (peer,) = peers.available(CPU, [name])
    return peer


def test_the_table_is_complete_and_unique():
    table = peers.available(CPU)
    assert [peer.name for peer in table] == peers.names()
    assert len(set(peers.names())) == len(table) >= 16
    for peer in table:
        assert (peer.why_not is None) == (peer.loss_of is not None), peer
        assert "\n" not in (peer.why_not or "") and peer.title and peer.gemms in (3, 4)
        assert peer.tensor_parallel == (peer.name in OVER_RANKS)
        # One upstream for all tokens is what gradients built in the forward cost.
        assert not (peer.scalar_only and peer.gemms == 4), peer
    assert {"torch-eager", "torch-compile"} <= {p.name for p in table if p.why_not is None}


def test_nothing_foreign_is_needed_at_import():
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in FOREIGN)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {blocked}import torch; "
        "from megatron_fused_ce.scripts.bench import peers; "
        # As on a GPU: the builders themselves are asked, not the device.
        "entries = [peers.replace(e, needs_cuda=False) for e in peers._table()]; "
        "peers._hopper = lambda device: None; "
        "p = peers.Parallel(None, 0, 2); "
        "print([p.name for p in (peers._load(e, torch.device('cpu'), "
        "p if e.peer.tensor_parallel else None) for e in entries) "
        "if p.why_not is None or 'ModuleNotFoundError' in p.why_not or 'no F.' in p.why_not]"
        " == peers.names())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True", done.stdout


def test_ranks_and_peers_must_fit():
    """What runs on one device does not run over ranks, and the other way round."""
    table = [peers.replace(entry, needs_cuda=False) for entry in peers._table()]
    one = {e.peer.name: peers._load(e, CPU).why_not for e in table if e.peer.name in OVER_RANKS}
    assert one == dict.fromkeys(OVER_RANKS, "needs several ranks")
    for entry in table:
        if not entry.peer.tensor_parallel:
            assert peers._load(entry, CPU, PARALLEL).why_not == "knows no tensor parallelism"


def test_verl_wants_whole_blocks_of_hidden_states():
    verl = next(entry.peer for entry in peers._table() if entry.peer.name == "verl-tp")
    assert verl.refusal(8192, 4096, 32064, torch.bfloat16) is None
    assert "H % 128" in (verl.refusal(8192, 2880, 32064, torch.bfloat16) or "")
    assert "bfloat16" in (verl.refusal(8192, 4096, 32064, torch.float32) or "")


def test_only_the_named_are_imported(monkeypatch):
    asked = []
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *rest: (asked.append(name), real(name, *rest))[1]
    )
    assert [peer.name for peer in peers.available(CPU, ["torch-eager"])] == ["torch-eager"]
    assert not asked
    with pytest.raises(ValueError, match="no peer tea; there are torch-eager"):
        peers.available(CPU, ["tea"])


@pytest.mark.parametrize("name", ["torch-eager", "torch-lce", "torch-lce-sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_peers_compute_the_definition(name, dtype):
    peer = by_name(name)
    if peer.why_not is not None:
        assert not hasattr(F, "linear_cross_entropy") and "linear_cross_entropy" in peer.why_not
        return
    hidden, weight, labels, grad_loss = problem(dtype)
    loss = peer.step(hidden, weight, labels, grad_loss)
    want = exact(hidden, weight, labels, peer.upstream(grad_loss))
    if peer.scalar_only:
        want[0] = want[0].sum()
    assert loss.shape == want[0].shape and loss.dtype == torch.float32 and not loss.requires_grad
    # bf16's own rounding: 2^-9 in the logits and in every product's result.
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for got, true in zip((loss, hidden.grad, weight.grad), want, strict=True):
        assert (got.double() - true).norm() <= bound * true.norm()


def test_torch_compile_takes_the_whole_graph(monkeypatch):
    """Traced forward and backward; the C++ that inductor would write and build is torch's own matter."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    peer = by_name("torch-compile")
    hidden, weight, labels, grad_loss = problem()
    loss = peer.step(hidden, weight, labels, grad_loss)
    want = exact(hidden, weight, labels, grad_loss)
    for got, true in zip((loss, hidden.grad, weight.grad), want, strict=True):
        assert (got.double() - true).norm() <= 1e-6 * true.norm()


def test_a_scalar_peers_upstream():
    peer = peers.Peer("x", "x", scalar_only=True)
    grad_loss = torch.tensor([3.0, -4.0, 0.0, 0.0])
    assert peer.upstream(grad_loss).item() == 2.5  # sqrt((9 + 16) / 4)
    assert peer.upstream(torch.full((1000,), 1e-3)).item() == pytest.approx(1e-3, rel=1e-6)
    assert peer.upstream(torch.tensor(-2.0)).item() == -2.0
    per_token = peers.Peer("y", "y")
    assert per_token.upstream(grad_loss) is grad_loss


def test_a_failing_peer_is_a_reason():
    def fails(hidden, weight, labels):
        raise TypeError("\n\n\x1b[91m\x1b[1mno such\x1b[0m tile\n  at line 3")

    absent = peers.Peer("x", "x", why_not="not installed")
    assert peers.try_out(absent, CPU) is absent
    assert absent.refusal(8, 8, 8, torch.float32) == "not installed"
    with pytest.raises(RuntimeError, match="peer x is absent: not installed"):
        absent.forward(*problem()[:3])
    assert (
        peers.try_out(peers.Peer("x", "x", loss_of=fails), CPU).why_not == "TypeError: no such tile at line 3"
    )
    nan = peers.Peer("x", "x", loss_of=lambda h, w, y: F.linear(h, w).sum(-1) * float("nan"))
    assert "not finite" in (peers.try_out(nan, CPU).why_not or "")
    assert len(peers.one_line(ValueError("x" * 1000))) == peers.REASON_CHARS
    assert peers.one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_limits_of_shape():
    table = {entry.peer.name: entry.peer for entry in peers._table()}
    bf16 = torch.bfloat16
    cute = table["liger-cute"]
    assert cute.refusal(8192, 4096, 128256, bf16) is None
    assert "V % 256" in (cute.refusal(8192, 2048, 151936, bf16) or "")  # qwen's vocabulary
    assert "bfloat16" in (cute.refusal(8192, 4096, 128256, torch.float16) or "")
    assert "T % 128" in (cute.refusal(8200, 4096, 128256, bf16) or "")
    assert table["quack"].refusal(8191, 4096, 128256, bf16)
    assert table["te"].refusal(8192, 4096, 128256, torch.float16)
    assert table["te"].refusal(8192, 4096, 128256, torch.float32) is None


@pytest.mark.parametrize(
    ("tokens", "hidden", "chunk"),
    [
        (8192, 2048, 4096),
        (8192, 4096, 8192),  # chunks of 4096 rows: as many as H
        (32768, 4096, 8192),
        (32768, 8192, 4096),
        (2048, 2048, 1024),  # one chunk of all tokens otherwise, as many as H
        (4096, 4096, 2048),
        (6144, 2048, 8192),  # 4096 leaves a last chunk of 2048
        (1024, 1024, None),
    ],
)
def test_scaled_exp_chunks_never_have_h_rows(tokens, hidden, chunk):
    assert peers.scaled_exp_chunk(tokens, hidden) == chunk
    peer = next(e.peer for e in peers._table() if e.peer.name == "quack-scaled-exp")
    assert (peer.refusal(tokens, hidden, 128256, torch.bfloat16) is None) == (chunk is not None)


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"),
    [(8192, 4096, 128256), (131072, 8192, 128256), (1024, 2048, 151936), (32768, 64, 512)],
)
def test_liger_chunk_budget(tokens, hidden, vocab):
    def chunk(budget: int) -> int:  # the rule of Liger 0.8.5
        raw = -(-tokens // -(-vocab // (budget * hidden)))
        return min(tokens, 1 << (raw - 1).bit_length())

    budget = peers.liger_chunk_budget(tokens, hidden, vocab, 4096)
    assert chunk(budget) >= min(tokens, 4096)
    assert budget == 1 or chunk(budget // 2) < min(tokens, 4096)
