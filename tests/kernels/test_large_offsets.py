"""Elements more than 2**31 from the beginning: of logits, of the weight, of what the kernels are given.

On any machine few rows lie that far apart (memory that nobody touches costs none). On a GPU of enough memory
one chunk's logits, and the weight, really are that large.
"""

from __future__ import annotations

import mmap
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import triton
import triton.language as tl

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.distillation import rows_torch as divergence_torch
from megatron_fused_ce.kernels import divergence, gemm_variants, records, row_kernels, scaled_exp_rows
from megatron_fused_ce.kernels.records import Side, TileStatistics
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.losses.outputs import PLAIN
from megatron_fused_ce.losses.statistics import Upstream, merge_shards
from megatron_fused_ce.scripts.lib.reference import HeadInputs, HeadResult, make_inputs, plain_head
from tests.support.losses import assert_within
from tests.support.op import products, run

FAR = 2**31
GIB = 2**30


def far_rows(rows, device):
    """The same numbers, the last row more than 2**31 elements behind the first; bf16."""
    num_rows, num_columns = rows.shape
    # Whole 16 bytes, as TMA wants them.
    stride = -(-FAR // (num_rows - 1) // 8) * 8 + 8
    numel = stride * (num_rows - 1) + num_columns
    if device.type == "cuda":
        flat = torch.empty(numel, dtype=torch.bfloat16, device=device)
    else:
        flat = torch.frombuffer(mmap.mmap(-1, 2 * numel), dtype=torch.bfloat16)
    far = flat.as_strided(rows.shape, (stride, 1))
    far.copy_(rows)
    return far


@triton.jit
def _times_kernel(address, factor):
    tl.store(address, tl.load(address) * factor)


@pytest.mark.parametrize("value, overflows", [(2**30 - 1, False), (2**30, True)])
def test_the_interpreter_sees_an_overflow(value, overflows, device):
    """Which is how the CPU's tests find an offset in int32."""
    if device.type == "cuda":
        pytest.skip("compiled, it wraps")
    number = torch.full((1,), value, dtype=torch.int32)
    with pytest.raises(Exception, match="int32 overflow") if overflows else nullcontext():
        _times_kernel[(1,)](number, 2)


@pytest.fixture
def logits(device):
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([5, -1, 330, 0], device=device)
    return torch.randn(4, 331, generator=generator).to(device, torch.bfloat16), labels


def test_row_kernels_at_far_rows(logits, device):
    """In place, and from far to far; statistics too."""
    near, labels = logits
    far, far_out = far_rows(near, device), far_rows(torch.zeros_like(near), device)
    plain = rows_torch.row_statistics(near, labels, 1.0, with_argmax=True)
    ours = row_kernels.row_statistics(far, labels, 1.0, with_argmax=True)
    assert torch.equal(ours.argmax, plain.argmax)
    torch.testing.assert_close(ours.shard, plain.shard, rtol=1e-5, atol=1e-6)
    terms = merge_shards(plain.shard[None]).stats
    gradient = PLAIN.grad_coefficients(terms, Upstream(torch.ones(4, device=device)))
    room = torch.empty_like(near)
    expected = rows_torch.row_gradients(near, labels, gradient, 1.0, out=room)
    row_kernels.row_gradients(far, labels, gradient, 1.0, out=far_out)
    torch.testing.assert_close(far_out, expected, rtol=8e-3, atol=1e-7)
    row_kernels.row_gradients(far, labels, gradient, 1.0, out=far)
    torch.testing.assert_close(far, expected, rtol=8e-3, atol=1e-7)


@pytest.mark.parametrize("kind", records.DIVERGENCES)
def test_a_divergence_of_far_rows(logits, kind, device):
    """Both sides and what is written; then in place."""
    near = logits[0]
    other = near.flip(1)
    row_max, log_sum = near.float().amax(1), (near.float() - near.float().amax(1, keepdim=True)).logsumexp(1)
    beside = other.gather(1, near.argmax(1, keepdim=True))[:, 0].float()
    plain = [Side(z, row_max, log_sum, 1.0, None, 0 * log_sum, beside) for z in (near, other)]
    far, far_other = (far_rows(z, device) for z in (near, other))
    ours = [side._replace(logits=z) for side, z in zip(plain, (far, far_other), strict=True)]
    sums = divergence_torch.divergence_sums(*plain, kind, 0.5, None)
    torch.testing.assert_close(divergence.divergence_sums(*ours, kind, 0.5, None), sums)
    room = torch.empty_like(near)
    divergence_torch.divergence_gradients(*plain, kind, 0.5, None, sums[1], room)
    far_out = far_rows(torch.zeros_like(near), device)
    for out in (far_out, far):
        divergence.divergence_gradients(*ours, kind, 0.5, None, sums[1], out)
        torch.testing.assert_close(out, room, rtol=8e-3, atol=1e-7)


def test_sealing_and_scaling_far_rows(logits, device):
    """Whole rows of E, brought into another unit, and the label's own entries."""
    near, labels = logits
    e = near.abs()
    far = far_rows(e, device)
    column = torch.zeros(4, device=device)
    # Of one tile, far above the others' references: each row is multiplied by 1/2, its unit by 1.
    tiles = TileStatistics(512, column[None], column[None], column, None)
    terms = torch.stack((column, column + 1.0, column + 0.25, column))
    reference = column + 0.6931471805599453
    stats = rows_torch.row_statistics(near, labels, 1.0)
    stats = stats._replace(shard=torch.zeros_like(stats.shard), tile_shift=column - 1.0)
    unit = scaled_exp_rows.finalize_rows(far, labels, tiles, stats, reference, terms)
    expected = 0.5 * e
    here = (labels >= 0).nonzero()[:, 0]
    expected[here, labels[here]] = (-0.25 / unit[here]).to(expected.dtype)
    torch.testing.assert_close(unit, column + 2.0)
    torch.testing.assert_close(far, expected, rtol=8e-3, atol=0)
    scaled_exp_rows.scale_rows(far, unit, far)
    torch.testing.assert_close(far, 2 * expected, rtol=8e-3, atol=0)


# --- with as much memory as it takes ---------------------------------------------------------


def take(gib):
    """Skips where a GPU has less; waits until other processes' tests have ended, behind which these come."""
    total = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 0.0
    if total < gib:
        pytest.skip(f"needs a GPU of {gib} GiB for what is really that large, has {total:.0f}")
    torch.use_deterministic_algorithms(False)  # no time for 4 GiB of NaN in each torch.empty
    torch.cuda.empty_cache()
    for _ in range(900):
        if torch.cuda.mem_get_info()[0] + torch.cuda.memory_allocated() >= gib * GIB:
            return
        time.sleep(1)


OPTIONS = {"z_loss": 1e-3, "logit_softcap": 30.0, "true_vocab_size": 128250, "ignore_index": -100}


@lru_cache(maxsize=1)
def many_logits(what):
    """17408 tokens x 128256 columns: 2.2e9 logits in one chunk; the definition, 512 tokens at a time."""
    sizes = {"s": 17408, "b": 1, "hidden_size": 256, "vocab": 128256}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.bfloat16, device="cuda")
    assert inputs.labels.numel() * inputs.weight.shape[0] > FAR
    inputs.labels[0, -8:] = torch.arange(128248, 128256, device="cuda")  # the last element of all
    if what == "outlier":  # its tile is in another unit: whole rows are gone through
        inputs.hidden[..., 0], inputs.weight[70001] = 1.0, 0.0
        inputs.weight[70001, 0] = 70.0
    inputs = replace(inputs, config=FusedCEConfig(**(OPTIONS if what == "options" else {})))
    return inputs, *(in_slices(inputs, dtype) for dtype in (torch.float64, torch.bfloat16))


def in_slices(inputs: HeadInputs, dtype: torch.dtype, tokens: int = 512) -> HeadResult:
    parts, grad_weight = [], torch.zeros_like(inputs.weight, dtype=torch.float64)
    per_token = inputs.hidden.split(tokens), inputs.labels.split(tokens, 1), inputs.grad_loss.split(tokens, 1)
    for hidden, labels, grad_loss in zip(*per_token, strict=True):
        part = plain_head(replace(inputs, hidden=hidden, labels=labels, grad_loss=grad_loss), dtype)
        grad_weight += part.grad_weight
        parts.append(part)
    loss = torch.cat([part.loss for part in parts], 1)
    return HeadResult(loss, torch.cat([part.grad_hidden for part in parts]), grad_weight)


#: The rows, and every form of the product, by name.
PASSES = {"gemm_rows": None} | {module.__name__.rsplit(".", 1)[-1]: module for module in products()}


def taking(name, monkeypatch):
    """The logits backend by name, in a form of its product."""
    monkeypatch.setattr(gemm_variants, "gemm_for", lambda device: PASSES[name])
    return {"logits_backend": "gemm_rows" if name == "gemm_rows" else "scaled_exp"}


@pytest.mark.parametrize("strategy", ["recompute", "store", "grad_in_forward"])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("what", ["plain", "options", "outlier"])
def test_a_chunk_of_more_logits(what, name, strategy, monkeypatch):
    take(60)
    inputs, exact, eager = many_logits(what)
    config = replace(inputs.config, strategy=strategy, num_chunks=1, **taking(name, monkeypatch))
    made = run(replace(inputs, config=config), config)
    assert_within(made, exact, eager, torch.bfloat16)
    # Tokens beyond 2**31 elements by themselves.
    last = slice(FAR // inputs.weight.shape[0], None)
    beyond = (
        HeadResult(one.loss[:, last], one.grad_hidden[last], one.grad_weight) for one in (made, exact, eager)
    )
    assert_within(*beyond, torch.bfloat16)


@lru_cache(maxsize=1)
def large_weight():
    """262144 x 8256: 2.2e9 elements; made where they are needed, a CPU takes a minute for so many."""
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    vocab, hidden_size, tokens = 262144, 8256, 192
    weight = normal(vocab, hidden_size).div_(hidden_size**0.5)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator, device="cuda")
    labels[0, -8:] = torch.arange(vocab - 8, vocab, device="cuda")
    upstream = normal(1, tokens, dtype=torch.float32)
    inputs = HeadInputs(normal(tokens, 1, hidden_size), weight, labels, upstream)
    assert weight.numel() > FAR
    exact = plain_head(inputs, torch.float64)
    exact = exact._replace(grad_weight=exact.grad_weight.float())  # 8 GiB of 16
    return inputs, exact, plain_head(inputs, torch.bfloat16)


@pytest.mark.parametrize("strategy", ["recompute", "store", "grad_in_forward"])
@pytest.mark.parametrize("name", PASSES)
def test_a_larger_weight(name, strategy, monkeypatch):
    many_logits.cache_clear()
    take(110)
    inputs, exact, eager = large_weight()
    config = FusedCEConfig(strategy=strategy, num_chunks=1, **taking(name, monkeypatch))
    made = run(inputs, config)
    assert_within(made, exact, eager, torch.bfloat16)
    # The rows beyond 2**31 elements by themselves.
    last = slice(FAR // inputs.weight.shape[1], None)
    results = (made, exact, eager)
    assert_within(*(one._replace(grad_weight=one.grad_weight[last]) for one in results), torch.bfloat16)


def test_adding_more_elements():
    """The end of a gradient of the weight that is added into another, in fp32."""
    many_logits.cache_clear()
    large_weight.cache_clear()
    take(30)
    total = torch.ones(FAR + 4099, device="cuda")
    addend = torch.full_like(total, 2.0)
    never = torch.zeros(1, dtype=torch.int64, device="cuda")
    scaled_exp_rows.add_scaled_(total, addend, torch.tensor(0.5, device="cuda"), never)
    assert bool((total == 2.0).all())
