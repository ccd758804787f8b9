"""``grad_in_forward`` is exact for every loss: what was promised costs three GEMMs, anything else six."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.promise import ATOL, BROKEN, KEPT, NOT_FINITE, RTOL, Head, fit_scalar
from megatron_fused_ce.kernels import upstream_kernels
from megatron_fused_ce.scripts.lib.reference import HeadInputs, make_inputs
from tests.support.op import EXP_DTYPE, HAS_EXP, assert_same_bits, captured, open_main_grad, promises, run

ROOT = Path(__file__).resolve().parents[2]

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: What a broken promise is told with.
is_told = partial(pytest.warns, UserWarning, match="is not a scalar times the token weights")


#: Two blocks of the kernel and a part of one.
NOTHING = torch.zeros(9001)
MASK = (torch.rand(9001, generator=torch.Generator().manual_seed(0)) < 0.7).float()
FRACTIONS = torch.randn(9001, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.randint(1, 4000, (9001,), generator=torch.Generator().manual_seed(2)).float()
SMALL = torch.tensor([1.0, 1e-9, 1e-20])
INF, NAN = math.inf, math.nan
#: Of one that counts and of one that is masked.
COUNTS, MASKED = int(MASK.nonzero()[4321]), int((MASK == 0).nonzero()[99])


def at(tensor: torch.Tensor, token: int, value: float) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor(token), value)


def in_megatrons_order(weights, loss_scale):
    """pretrain_gpt's loss_func, the schedule's division and the loss scale."""
    return torch.ones(9001) / torch.clamp(weights.sum().int(), min=1) / 7 * loss_scale * weights.float()


#: Upstream gradient, token weights, what comes of them, and the scalar if it is known.
FITS = {
    "the weights": (MASK, MASK, KEPT, 1.0),
    "weights in bf16": (FRACTIONS.bfloat16().float() * 0.1, FRACTIONS.bfloat16(), KEPT, 0.1),
    "Megatron's": (in_megatrons_order(MASK, 2.0**32), MASK, KEPT, None),
    "Megatron's, of fractions": (in_megatrons_order(FRACTIONS, 2.0**-14 / 3), FRACTIONS, KEPT, None),
    "another order of rounding": (
        *(1.1 * MASK / 3.0 * 0.9 * (1.7 / LENGTHS) / 1.3, MASK / LENGTHS * 1.7 / 3.0),
        *(KEPT, None),
    ),
    # An all-masked micro-batch is legal without a gradient only.
    "nothing of nothing": (NOTHING, NOTHING, KEPT, 0.0),
    "nothing of a mask": (NOTHING, MASK, KEPT, 0.0),
    "no token": (torch.empty(0), torch.empty(0), KEPT, 0.0),
    "something of nothing": (at(NOTHING, 7, 1e-20), NOTHING, BROKEN, 0.0),
    # Small weights are compared on their own scale.
    "a small one 1e-4 off": (at(SMALL * 0.3, 2, 1e-20 * 0.30003), SMALL, BROKEN, None),
    "below fp32's normal numbers": (MASK * 1.7e-39, MASK, KEPT, None),
    "a token left out": (at(MASK * 0.37, COUNTS, 0.0), MASK, BROKEN, None),
    "a masked one let in": (at(MASK * 0.37, MASKED, 1e-12), MASK, BROKEN, None),
    "one 4e-6 off": (at(MASK * 0.37, COUNTS, 0.37 * (1 + 4e-6)), MASK, BROKEN, None),
    "the last one ten times": (at(MASK * 0.37, 9000, 3.7), at(MASK, 9000, 1.0), BROKEN, None),
    "the mean over all": (torch.ones(9001), MASK, BROKEN, None),
    # As 1 over the length of an empty sequence; the upstream gradient is finite, or 0.
    **{f"a weight {bad}": (MASK, at(MASK, 3, bad), BROKEN, None) for bad in (INF, -INF, NAN)},
    **{f"a weight {bad}, no gradient": (NOTHING, at(MASK, 3, bad), BROKEN, None) for bad in (INF, NAN)},
    # The loss scale has overflowed: the loss is what was promised, but the gradients are not.
    **{f"all {bad}": (MASK * bad, MASK, NOT_FINITE, NAN) for bad in (INF, NAN)},
    **{f"one {bad}": (at(MASK, 3, bad), MASK, NOT_FINITE, NAN) for bad in (-INF, NAN)},
    "one nan of nothing": (at(NOTHING, 3, NAN), NOTHING, NOT_FINITE, NAN),
    "a scalar beyond fp32": (1e38 * torch.ones(3), torch.full((3,), 1e-5), NOT_FINITE, NAN),
}


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize("name", FITS)
def test_what_fits(name, by, device):
    g, weights, expected, c = FITS[name]
    scale, found = fit_scalar(g, weights)
    if by == "triton" and len(g):
        given = (x.to(device, torch.float32) for x in (g, weights))
        expected_scale, (scale, found) = scale, upstream_kernels.fit_scalar(*given, RTOL, ATOL)
        torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2.0**-22, atol=0, equal_nan=True)
    assert found == expected and scale.dtype == torch.float32 and scale.shape == ()
    assert c is None or float(scale) == pytest.approx(c, rel=2e-7, abs=0, nan_ok=True)


# --- a head whose promise is kept or broken -------------------------------------------------------


class Micro:
    """A micro-batch of a head of its own; ``strategy`` in three chunks."""

    def __init__(self, device, dtype=torch.float32, main_grad=None, seed=3, **options):
        """``main_grad``: what ``grad_weight`` is added to, or None for autograd's."""
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(12, 2, 8, generator=generator).to(device, dtype).requires_grad_()
        self.weight = torch.randn(20, 8, generator=generator).to(device, dtype).requires_grad_()
        self.labels = torch.randint(0, 20, (2, 12), generator=generator).to(device)
        self.mask = (torch.rand(2, 12, generator=generator) < 0.7).float().to(device)
        self.main_grad, self.options = main_grad, options

    def evaluate(self, strategy, hidden=None, **call):
        if self.main_grad is not None:
            call["open_grad_weight"] = partial(open_main_grad, self.main_grad)
        operands = self.hidden if hidden is None else hidden, self.weight
        config = FusedCEConfig(strategy=strategy, num_chunks=3, **self.options)
        return linear_cross_entropy(
            Call(*operands, self.labels, token_weights=self.mask, config=config, **call)
        )

    def losses(self, strategy, hidden=None, **call):
        return self.evaluate(strategy, hidden, **call).loss

    def gradients(self, strategy, make_loss, **backward):
        """Of ``make_loss(losses, mask)``, added to what ``main_grad`` holds."""
        self.hidden.grad = self.weight.grad = None
        make_loss(self.losses(strategy), self.mask).backward(**backward)
        of_weight = self.weight.grad if self.main_grad is None else self.main_grad.clone()
        return [self.hidden.grad, of_weight]


def promised(losses, mask):
    return (losses * mask).sum() * 0.3


def one_token_more(losses, mask):
    changed = mask.clone()
    changed[1, 3] = 1.0 - changed[1, 3]
    return (losses * changed).sum()


#: Losses that are not what was promised.
BROKEN_LOSSES = {
    "all tokens": lambda losses, mask: losses.mean(),
    "a token more or less": one_token_more,
    "used twice": lambda losses, mask: promised(losses, mask) + (losses.square() * mask).mean(),
    "two terms": lambda losses, mask: promised(losses, mask) + losses[0, 2],
}
#: Losses of which an upstream gradient is inf or NaN.
OVERFLOWS = {
    "inf": lambda losses, mask: promised(losses, mask) * math.inf,
    "one nan": lambda losses, mask: promised(losses, mask) + losses[1, 4] * math.nan,
    "a NaN at a masked token": lambda losses, mask: (
        one_token_more(losses, mask) + (losses[mask == 0] * 0.0)[0] * math.nan
    ),
}
#: Losses that keep the promise.
KEPT_LOSSES = {
    "as promised": promised,
    "scaled by 0": lambda losses, mask: promised(losses, mask) * 0.0,
    "a function of the sum": lambda losses, mask: -7.0 * promised(losses, mask).square(),
}
DTYPES_AND_ENDS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16, fp32 main_grad": (torch.bfloat16, torch.float32),
    "bf16, bf16 main_grad": (torch.bfloat16, torch.bfloat16),
    "fp16, fp32 main_grad": (torch.float16, torch.float32),
}


def micro_of(device, kind, **options):
    """``main_grad`` has an earlier micro-batch's gradient."""
    dtype, of_main_grad = DTYPES_AND_ENDS[kind]
    main_grad = None
    if of_main_grad is not None:
        main_grad = torch.linspace(-1, 1, 160, device=device).view(20, 8).to(of_main_grad)
    return Micro(device, dtype, main_grad, **options)


OPTIONS = {
    "plain": {},
    "smoothing and z-loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "ignored and padded": {"ignore_index": 3, "true_vocab_size": 17, "logit_softcap": 5.0},
}


#: Each loss with two dtypes; every option with a broken promise.
EVERY_LOSS = {**BROKEN_LOSSES, **OVERFLOWS, **KEPT_LOSSES}
CASES = [
    *((loss, "plain", list(DTYPES_AND_ENDS)[i % 6]) for i, loss in enumerate([*EVERY_LOSS, "two terms"] * 2)),
    *(("used twice", option, kind) for option in list(OPTIONS)[1:] for kind in ("bf16", "fp16")),
]


@pytest.mark.parametrize(("loss", "options", "kind"), CASES)
def test_gradients_of_any_loss(loss, options, kind, device):
    """A promise that is not kept: the bits of `recompute`, and later calls of the head no longer rely on it.

    But for an overflowed loss scale, which says nothing of the loss.
    """
    make_loss, settings = EVERY_LOSS[loss], OPTIONS[options]

    def gradients(strategy="grad_in_forward", of=make_loss):
        return micro_of(device, kind, **settings).gradients(strategy, of)

    def assert_near(made, bound):
        for one, other in zip(made, expected, strict=True):
            assert float((one - other).double().norm()) <= bound * float(other.double().norm())

    expected = gradients("recompute")
    if "fp16" in kind and "z_loss" in settings:  # how large its gradients are is known after the forward
        with promises(kept=0, remade=0):
            gradients()
    elif loss in BROKEN_LOSSES:
        with promises(kept=0, remade=1), is_told():
            assert_same_bits(gradients(), expected)
        with promises(kept=0, remade=0):  # bf16 and fp16: the strategy that was taken rounds elsewhere
            assert_near(gradients(), 1e-6 if kind == "fp32" else 2e-2)
    elif loss in OVERFLOWS:
        assert not all(torch.isfinite(one).all() for one in expected), "the case tests nothing"
        for _ in range(2):
            with promises(kept=0, remade=1):
                assert_same_bits(gradients(), expected)
        with promises(kept=1):
            gradients(of=promised)
    else:
        with promises(kept=1):
            assert_near(gradients(), 2e-6 if kind == "fp32" else 2e-2)


@pytest.mark.filterwarnings("ignore:the upstream gradient")
@pytest.mark.skipif(not HAS_EXP, reason="the scaled-exp GEMM needs Hopper or newer")
@pytest.mark.parametrize("options", [name for name in OPTIONS if "smoothing" not in name])
def test_a_broken_promise_of_the_scaled_exp_gemm(options, device):
    """Its forward has E and row scales, the recomputation neither."""
    sizes = {"s": 24, "b": 2, "hidden_size": 16, "vocab": 264}
    inputs = make_inputs("odd-labels", **sizes, dtype=EXP_DTYPE, device=device)
    made = []
    for strategy in ("recompute", "grad_in_forward"):
        config = FusedCEConfig(strategy, num_chunks=2, logits_backend="scaled_exp", **OPTIONS[options])
        with promises(0, int(strategy == "grad_in_forward")):
            made.append(run(inputs, config, token_weights=inputs.grad_loss.square()))
    assert_same_bits(*made)


@pytest.mark.filterwarnings("ignore:the upstream gradient")
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
@pytest.mark.parametrize("loss", ["as promised", "two terms"])
def test_one_gradient_alone(wanted, loss, device):
    """The other operand is frozen, or nobody asks for its gradient."""
    make_loss, kept = EVERY_LOSS[loss], loss in KEPT_LOSSES
    expected = dict(zip(("hidden", "weight"), Micro(device).gradients("recompute", make_loss), strict=True))
    for frozen in (True, False):
        micro = Micro(device)
        (micro.weight if wanted == "hidden" else micro.hidden).requires_grad_(not frozen)
        loss_of_it = make_loss(micro.losses("grad_in_forward", head=Head("a head of its own")), micro.mask)
        with promises(kept=int(kept), remade=int(not kept)):
            (got,) = torch.autograd.grad(loss_of_it, [getattr(micro, wanted)])
        torch.testing.assert_close(got, expected[wanted], rtol=2e-6, atol=2e-6)


def test_it_is_told_once_for_each_head(device):
    """A head of another name, shape or process group keeps its promise."""
    told = []
    heads = [Head(name, say=told.append) for name in ("one", "another")]
    micro = Micro(device)

    def step(head, make_loss):
        made, waiting = (micro.evaluate("grad_in_forward", head=head) for _ in range(2))
        for loss in (made.loss, waiting.loss):
            make_loss(loss, micro.mask).backward()
        return made.plan.strategy

    with promises(kept=2, remade=2):
        assert step(heads[0], one_token_more) == "grad_in_forward"
        assert step(heads[0], one_token_more) == "recompute"
        assert step(heads[0], promised) == "recompute"
        assert step(heads[1], promised) == "grad_in_forward"
    micro.weight.requires_grad_(False)  # for a while
    with promises(kept=0, remade=0):
        assert step(heads[0], one_token_more) == "recompute"
    assert len(told) == 1 and "the per-token loss of one (20 rows of 8) is" in told[0]
    assert "--fused-ce-strategy recompute or store" in told[0]


@pytest.mark.filterwarnings("ignore:the upstream gradient")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", ""])
@pytest.mark.parametrize("way", ["two in flight", "a second backward"])
def test_a_checkpoint_whose_first_backward_breaks_the_promise(way, reentrant, device):
    """Its second forward runs by another plan than its first, and must save the same tensors."""
    if reentrant and way == "a second backward":
        pytest.skip("torch runs such a checkpoint's backward once")

    def gradients(strategy):
        micros = [Micro(device, seed=seed) for seed in (3, 4)]
        total = 0
        for micro in micros if way == "two in flight" else micros[:1]:
            losses = checkpoint(partial(micro.losses, strategy), micro.hidden, use_reentrant=reentrant)
            total = total + one_token_more(losses, micro.mask)
        if way == "a second backward":
            total.backward(retain_graph=True)
        total.backward()
        return [operand.grad for micro in micros for operand in (micro.hidden, micro.weight)]

    expected = gradients("recompute")
    made = gradients("grad_in_forward")
    assert_same_bits([one for one in made if one is not None], [one for one in expected if one is not None])


@pytest.mark.parametrize("logits_backend", ["auto", "gemm_rows"])
@pytest.mark.parametrize(
    ("dtype", "c"),
    [
        (torch.bfloat16, 1 + 38.5 / 2**7),  # half way between two bf16 numbers: 3e-3 from each
        (torch.float16, 1 + 307.5 / 2**10),  # 4e-4 from each
        (torch.float16, 2.0**17),  # inf
    ],
)
def test_the_scalar_keeps_its_digits(device, logits_backend, dtype, c):
    """It stays in fp32 beside gradients of 16 bits."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 1, 64, generator=generator)
    weight = 1e-3 * torch.randn(512, 64, generator=generator)
    labels = torch.randint(0, 512, (1, 256), generator=generator).to(device)
    weights = torch.ones(1, 256, device=device)

    def gradient(scalar):
        given = HeadInputs(hidden.to(device, dtype), weight.to(device, dtype), labels, scalar * weights)
        config = FusedCEConfig(strategy="grad_in_forward", logits_backend=logits_backend)
        return run(given, config, token_weights=weights).grad_hidden.double()

    # The entries' own rounding averages out, a wrong factor does not.
    with promises(kept=2):
        one, scaled = gradient(1.0), gradient(c)
    ratio = float((scaled * one).sum() / (one * one).sum())
    assert ratio == pytest.approx(c, rel=5e-4 if dtype == torch.bfloat16 else 1e-4)


# --- CUDA graphs and streams -----------------------------------------------------------------------


@on_gpu
@pytest.mark.filterwarnings("ignore:the upstream gradient")
@pytest.mark.parametrize("loss", ["as promised", "two terms"])
def test_the_host_waits_for_one_event(loss):
    """Never for the whole device or a stream."""
    make_loss = EVERY_LOSS[loss]
    micro = Micro("cuda", torch.bfloat16, torch.zeros(20, 8, device="cuda"))
    micro.gradients("recompute", make_loss)
    expected = micro.gradients("recompute", make_loss)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = micro.gradients("grad_in_forward", make_loss)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (made - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_the_addition_reads_the_flag_itself(device):
    """Launched before the host knows: nothing is added where the flag is up, a NaN neither."""
    from megatron_fused_ce.kernels import scaled_exp_rows

    total = torch.randn(33, 130, device=device)
    for up in (0, 1, 2):
        after = total.clone()
        addend = torch.full_like(total, math.nan if up else 2.0)
        flag = torch.tensor([up], device=device)
        scaled_exp_rows.add_scaled_(after, addend, torch.tensor(0.5, device=device), flag)
        assert torch.equal(after, total if up else total + 1.0)


@on_gpu
@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("error_mode", ["global", "thread_local"])
def test_a_captured_backward_asserts(error_mode, right, forward_inside):
    """In a process of its own, which the assertion ends. Without a step before the capture, too."""
    code = f"""
from tests.op.test_promise import *
micro = Micro("cuda", torch.bfloat16, torch.zeros(20, 8, device="cuda"))
used = micro.mask.clone()
micro.gradients("recompute", promised)
def forward(): return micro.losses("grad_in_forward")
def backward(losses, **more): (losses * used).sum().backward(**more)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    backward(forward())
    outside = None if {forward_inside} else forward()  # its backward runs on this stream, too
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side, capture_error_mode={error_mode!r}):
    backward(forward() if {forward_inside} else outside)
micro.main_grad.zero_()
graph.replay(); torch.cuda.synchronize()
assert micro.main_grad.any()
print("one", flush=True)
if not {right}: used.fill_(1.0)
graph.replay(); torch.cuda.synchronize(); print("two", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if right:
        assert done.stdout.split() == ["one", "two"], done.stderr
    else:
        assert done.stdout.split() == ["one"] and done.returncode != 0, done.stdout + done.stderr
        assert "--fused-ce-strategy store or recompute" in done.stderr + done.stdout


@on_gpu
def test_an_overflow_in_a_graph_leaves_nan():
    """fp16's loss scale has overflowed in a replay: Megatron must see it, and the run goes on."""
    micro = Micro("cuda", torch.bfloat16, torch.zeros(20, 8, device="cuda"))
    scale = torch.ones((), device="cuda")

    def iteration():
        (promised(micro.losses("grad_in_forward"), micro.mask) * scale).backward()

    graph, _ = captured(iteration)
    for overflows in (False, True, False):
        micro.main_grad.zero_()
        scale.fill_(math.inf if overflows else 1.0)
        graph.replay()
        assert micro.main_grad.isnan().any() == overflows
        assert micro.main_grad.any()
