"""The Triton row kernels against their plain PyTorch twin and fp64: on a CPU under the interpreter."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.head import fp16
from megatron_fused_ce.kernels import row_kernels, token_kernels, upstream_kernels
from megatron_fused_ce.kernels.records import NOT_HERE, RowOptions
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.losses.outputs import PLAIN
from megatron_fused_ce.losses.statistics import Upstream, merge_shards, shard_addends, token_loss
from tests.support.op import DTYPES, rows_by, without_interpreter

#: Below it fp32 has fewer digits, and a GPU's exp flushes to 0.
SUBNORMAL = torch.finfo(torch.float32).tiny


def chunk(num_columns, dtype, device, spread=3.0):
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(7, num_columns, generator=generator) * spread
    labels = torch.randint(0, num_columns, (7,), generator=generator)
    labels[1], labels[2], labels[3] = -5, num_columns, num_columns - 1
    return logits.to(device, dtype), labels.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_columns", [1, 2, 127, 128, 4096, 4097, 9001])
def test_statistics_and_gradients_match_plain_pytorch(num_columns, dtype, device):
    logits, labels = chunk(num_columns, dtype, device)
    kept = logits.clone()
    ours = row_kernels.row_statistics(logits, labels, 0.7, with_argmax=True)
    plain = rows_torch.row_statistics(logits, labels, 0.7, with_argmax=True)
    assert torch.equal(logits, kept), "the statistics pass must not write"
    assert torch.equal(ours.argmax, plain.argmax)
    torch.testing.assert_close(ours.shard, plain.shard, rtol=2e-6, atol=1e-6)

    terms = merge_shards(plain.shard[None]).stats
    factor = torch.randn(7, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.empty_like(logits)
    gradient = PLAIN.grad_coefficients(terms, Upstream(factor))
    row_kernels.row_gradients(logits, labels, gradient, 0.7, out=out)
    expected = rows_torch.row_gradients(logits, labels, gradient, 0.7, out=torch.empty_like(logits))
    assert torch.equal(logits, kept), "out of place must leave the logits alone"
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-7)
    row_kernels.row_gradients(logits, labels, gradient, 0.7, out=logits)
    assert torch.equal(logits, out), "in place must equal out of place"


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_token_kernels_match_their_definition(num_shards, device):
    """Confident and hopeless tokens, labels elsewhere, an empty shard, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_shards, 300)
    row_max = torch.randn(shape, generator=generator) * 50
    others = torch.exp(torch.randn(shape, generator=generator) * 12)
    label_logit = row_max - torch.rand(shape, generator=generator) * 20
    holder = torch.randint(0, num_shards + 1, shape[1:], generator=generator)
    label_logit[torch.arange(num_shards)[:, None] != holder] = NOT_HERE
    reference = row_max - 3 * torch.rand(shape, generator=generator)
    others[-1, 0], reference[-1, 0], row_max[-1, 0] = 0.0, -torch.inf, -torch.inf
    label_logit[-1, 0] = NOT_HERE
    others[-1, 1], reference[-1, 2], others[-1, 3] = torch.nan, torch.nan, torch.inf
    row_max[-1, 40], row_max[-1, 41] = torch.inf, torch.nan
    others[:, 4:40] *= 1e-30  # 1 - p far below fp32's resolution of 1
    shards = torch.stack((row_max, reference, others, label_logit), 1).to(device)
    plain = merge_shards(shards)
    ours = token_kernels.merge_shards(shards)
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-45, equal_nan=True)
    assert torch.isnan(plain.loss[torch.tensor([1, 2, 40, 41])]).all()
    assert not torch.isnan(plain.loss[4:40]).any()

    # What two all-reduces would bring: the same, with any order of the sums.
    global_max = plain.stats[0]
    parts = [token_kernels.shard_addends(shard, global_max) for shard in shards]
    for part, shard in zip(parts, shards, strict=True):
        torch.testing.assert_close(
            part, shard_addends(shard, global_max), rtol=4e-6, atol=SUBNORMAL, equal_nan=True
        )
    summed = torch.stack(parts).sum(0)
    for merged in (token_kernels.token_loss(summed, global_max), token_loss(summed, global_max)):
        torch.testing.assert_close(merged[0], plain.loss, rtol=4e-6, atol=1e-45, equal_nan=True)
        torch.testing.assert_close(merged[1], plain.stats, rtol=4e-6, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1.0, 3e-39, 1e-30, 7.7e37, 0.0, torch.inf, torch.nan])
def test_token_weights_that_fp16_scales(largest, dtype, device):
    """One launch for what PyTorch makes of it on a CPU."""
    for size, factor in ((1, 1.0), (7, -0.7), (4096, 1.0), (9001, -0.7)):
        weights = torch.rand(size, generator=torch.Generator().manual_seed(size))
        weights *= largest if 0 < largest < torch.inf else 1.0
        weights[size // 2] = largest
        bits = 4 if dtype == torch.float16 else 0
        made = upstream_kernels.scaled_weights(weights.to(device), bits, factor)
        expected = fp16.scale_token_weights(weights, factor, dtype)
        torch.testing.assert_close(made.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", [row_kernels, rows_torch], ids=["triton", "torch"])
def test_rows_with_infinities_nan_and_ties(backend, device):
    """The argmax takes the lowest column of a tie."""
    logits = torch.zeros(6, 9000, device=device)
    logits[0, :] = -torch.inf  # no finite logit in this shard
    logits[1, 2] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :-1] = -torch.inf  # one finite logit
    logits[5, [4500, 8999]] = 1.0
    labels = torch.tensor([-1, -1, -1, 8999, 0, 0], device=device)
    stats = backend.row_statistics(logits, labels, 1.0, with_argmax=True)
    row_max, _, sum_exp_nonlabel, label_logit = stats.shard
    assert sum_exp_nonlabel[0] == 0 and row_max[0] == -torch.inf
    assert torch.isnan(sum_exp_nonlabel[1:3]).all()
    assert sum_exp_nonlabel[3] == 0 and row_max[3] == 0 and label_logit[3] == 0
    assert sum_exp_nonlabel[4] == 8999
    assert stats.argmax[3:].tolist() == [8999, 0, 4500]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a pause is of a GPU's stream")
def test_a_pause_lasts(device):
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    token_kernels.pause(device)
    ended.record()
    ended.synchronize()
    assert began.elapsed_time(ended) * 1e6 > 0.9 * token_kernels.PAUSE_NS


@pytest.mark.parametrize(
    ("words", "variants", "cores"),
    [
        ("90 statistics gradients", 4, ""),
        pytest.param("80", 10, "", marks=pytest.mark.rest),
        pytest.param("90", 14, "wgmma.mma_async", marks=pytest.mark.rest),
        pytest.param("100", 14, "tcgen05.mma", marks=pytest.mark.rest),
    ],
)
def test_kernels_compile_without_a_gpu(words, variants, cores):
    """Plain, and with all options: they fit, and nothing spills but the portable GEMM."""
    done = without_interpreter("compile_triton.py", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("bytes of shared memory") >= variants
    assert not cores or done.stdout.count(f"{cores} and cp.async.bulk.tensor") >= 2


@pytest.mark.parametrize("size", [1e-30, 1e-3, 0.06, 0.124, 0.126, 1.0, 3.0, 40.0])
def test_bent_logits_keep_their_digits(size, device):
    """With one class the loss is ``Z * lse**2`` and the lse the bent logit: tanh's relative error shows."""
    cap, z_loss = 0.5, 0.25
    hidden = torch.tensor([[[size]], [[-size]]], device=device, requires_grad=True)
    weight = torch.ones(1, 1, device=device)
    config = FusedCEConfig("store", logit_softcap=cap, z_loss=z_loss, logits_backend="gemm_rows")
    labels = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with rows_by("triton"):
        loss = fused_linear_cross_entropy(hidden, weight, labels, config=config)
    loss.sum().backward()
    x = hidden.detach().double().flatten() / cap
    bent, slope = cap * torch.tanh(x), 1 / torch.cosh(x) ** 2
    close = {"rtol": 2e-6, "atol": 1e-44, "check_dtype": False}
    torch.testing.assert_close(loss.flatten(), z_loss * bent**2, **close)
    torch.testing.assert_close(hidden.grad.flatten(), 2 * z_loss * bent * slope, **close)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("scale", [1.0, -0.3125])
@pytest.mark.parametrize("num_columns", [2, 128, 9001])
@pytest.mark.parametrize("rows", [row_kernels, rows_torch], ids=["triton", "torch"])
def test_what_the_largest_logit_leaves(rows, num_columns, scale, softcap, device):
    """Its column, and the others' sum with its own digits; also the label's; also where two are largest."""
    logits, labels = chunk(num_columns, torch.float32, device)
    at = torch.arange(7, device=device) * 1000 % num_columns
    logits[torch.arange(7), at] = 40.0 / scale
    labels[4], logits[5] = at[4], 40.0 / scale
    valid = torch.tensor([max(num_columns - 3, 2)], device=device)
    form = RowOptions(softcap=softcap, valid_columns=valid, with_weighted=True, with_rest=True)
    made = rows.row_statistics(logits, labels, scale, form=form)
    alone = rows.row_statistics(logits, labels, scale, form=RowOptions(softcap, valid, with_weighted=True))
    s = logits[:, : int(valid)].double() * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    largest, first = s.max(1, keepdim=True)
    assert torch.equal(s.gather(1, made.argmax[:, None]), largest)  # of two, the label's serves as well
    rest = (s - largest).exp().scatter(1, first, 0.0).sum(1)
    bound = {(row_kernels, None): 1e-6, (row_kernels, 20.0): 4e-6}.get((rows, softcap), 1e-7)
    torch.testing.assert_close(made.extra.rest, rest, rtol=bound, atol=0)
    torch.testing.assert_close(made.shard, alone.shard, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(made.extra.weighted, alone.extra.weighted, rtol=4e-6, atol=1e-30)
