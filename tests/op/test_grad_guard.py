"""The guard of ``grad_in_forward``: only a scalar times the token weights reaches an optimizer step."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, grad_guard
from megatron_fused_ce.grad_guard import (
    WITHOUT_MODEL,
    UpstreamMismatch,
    fit_scalar,
    raise_if_mismatch,
)

ROOT = Path(__file__).resolve().parents[2]
MILLION = 1_000_000

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Each test starts and ends without a mismatch in the flags."""
    yield
    try:
        raise_if_mismatch()
    except UpstreamMismatch:
        pytest.fail("a mismatch was left in the flag")


def mask(num_tokens: int = 4096, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(num_tokens, generator=generator) < 0.7).float().to(device)


def fractions(num_tokens: int = 4096) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("c", [1.0, -3.0, 1 / 3, 65536 * 0.77, 2.0**-30 / 7, 1e-30])
@pytest.mark.parametrize(
    "weights",
    [mask(), fractions(), torch.tensor([1.0, -1.0, 2.0, -2.0])],
    ids=["mask", "fractions", "sum of 0"],
)
def test_a_scalar_times_the_weights_fits(weights, c):
    found, mismatch = fit_scalar(weights * c, weights)
    assert not mismatch and found.dtype == torch.float32 and found.shape == ()
    assert float(found) == pytest.approx(c, rel=2e-7, abs=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(dtype):
    weights = fractions().to(dtype)
    found, mismatch = fit_scalar(weights.float() * 0.1, weights)
    assert not mismatch and float(found) == pytest.approx(0.1, rel=2e-7)


def upstream(make_loss, weights) -> torch.Tensor:
    losses = torch.ones_like(weights, requires_grad=True)
    make_loss(losses).backward()
    return losses.grad


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**32, 2.0**-14 / 3])
def test_megatrons_arithmetic_fits(loss_scale):
    """pretrain_gpt's loss_func, the schedule's division and the loss scale, in Megatron's order."""
    for weights in (mask(), mask().bfloat16(), fractions()):

        def make_loss(losses, weights=weights):
            loss = torch.sum(losses.view(-1).float() * weights.view(-1).float())
            loss = loss / torch.clamp(weights.sum().int(), min=1) / 7
            return loss * loss_scale

        g = upstream(make_loss, weights.float())
        assert not fit_scalar(g, weights)[1]


def test_the_same_weights_in_another_order_of_rounding_fit():
    lengths = torch.randint(1, 4000, (4096,), generator=torch.Generator().manual_seed(2)).float()
    weights = mask() / lengths * 1.7 / 3.0

    def make_loss(losses):
        return (losses * 1.1 * mask() / 3.0 * 0.9 * (1.7 / lengths) / 1.3).sum()

    assert not fit_scalar(upstream(make_loss, weights), weights)[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g, w: g.index_fill_(0, w.nonzero()[1234], 0.0),  # a token left out
        lambda g, w: g.index_fill_(0, (w == 0).nonzero()[99, :1], 1e-12),  # a masked one let in
        lambda g, w: g.mul_(1 + 4e-6 * _one(w)),
        lambda g, w: g.mul_(1 - 2 * _one(w)),  # its sign
        lambda g, w: g.mul_(1 + _one(w) * 9),
        lambda g, w: g.add_(1e-8),
        lambda g, w: g.copy_(torch.ones_like(g)),  # the mean over all tokens
    ],
    ids=["left out", "let in", "4e-6 off", "sign", "ten times", "all shifted", "no mask"],
)
def test_one_wrong_token_in_a_million_is_seen(spoil):
    weights = mask(MILLION)
    g = weights * 0.37
    assert not fit_scalar(g, weights)[1]
    spoil(g, weights)
    assert fit_scalar(g, weights)[1]


def _one(weights: torch.Tensor) -> torch.Tensor:
    """1 at one token that counts, else 0."""
    one = torch.zeros_like(weights)
    one[weights.nonzero()[4321]] = 1.0
    return one


def test_small_weights_are_compared_on_their_own_scale():
    weights = torch.tensor([1.0, 1e-9, 1e-20])
    for token in range(3):
        g = weights * 0.3
        g[token] *= 1.0001
        assert fit_scalar(g, weights)[1]


def test_an_all_masked_micro_batch_is_legal_only_without_gradient():
    weights, g = torch.zeros(2, 5), torch.zeros(2, 5)
    c, mismatch = fit_scalar(g, weights)
    assert float(c) == 0.0 and not mismatch
    g[1, 2] = 1e-20
    assert fit_scalar(g, weights)[1]


def test_no_upstream_at_all_fits():
    c, mismatch = fit_scalar(torch.zeros(4096), mask())
    assert float(c) == 0.0 and not mismatch


def test_an_empty_batch_fits():
    c, mismatch = fit_scalar(torch.empty(0), torch.empty(0))
    assert float(c) == 0.0 and not mismatch


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("weights", [mask(), torch.zeros(4096)], ids=["mask", "all masked"])
def test_an_overflow_is_no_mismatch_but_stays_visible(weights, bad):
    """The loss scale has overflowed: Megatron must find it in the gradients, and skip the step."""
    for g in (weights * bad, weights.index_fill(0, torch.tensor(3), bad)):
        assert not torch.isfinite(g).all()
        c, mismatch = fit_scalar(g, weights)
        assert not math.isfinite(c) and not mismatch


def test_bad_weights_do_not_pass():
    weights = mask()
    weights[7] = math.nan
    assert fit_scalar(torch.ones(4096), weights)[1]
    assert fit_scalar(torch.zeros(4096), weights)[1]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(4, 1\) and token_weights \(4,\)"):
        fit_scalar(torch.ones(4, 1), torch.ones(4))


class Promised(torch.autograd.Function):
    """A stand-in for ``grad_in_forward``: its gradient is right only for the promised token weights."""

    @staticmethod
    def forward(ctx, parameter, weights):
        ctx.save_for_backward(weights)
        return parameter.expand_as(weights).clone()

    @staticmethod
    def backward(ctx, grad_loss):
        (weights,) = ctx.saved_tensors
        c, mismatch = fit_scalar(grad_loss, weights)
        WITHOUT_MODEL.record_mismatch(mismatch)
        return (c * weights).sum(), None


class Training:
    """One parameter, an optimizer, and steps whose loss keeps the promise or not."""

    def __init__(self, make_optimizer, device="cpu"):
        self.parameter = torch.nn.Parameter(torch.ones((), device=device))
        self.optimizer = make_optimizer([self.parameter])
        self.weights = mask(64, device)

    def backward(self, right=True, scale=1.0):
        losses = Promised.apply(self.parameter, self.weights)
        used = self.weights if right else torch.ones_like(self.weights)
        (losses * used).sum().mul(scale).backward()

    def step(self):
        before = self.parameter.detach().clone()
        try:
            self.optimizer.step()
        except UpstreamMismatch:
            assert torch.equal(before, self.parameter), "the parameter changed before the error"
            raise
        assert not torch.equal(before, self.parameter)
        self.optimizer.zero_grad()


class OwnStep(torch.optim.Optimizer):
    """As apex's and Transformer Engine's optimizers are made: a subclass with a step of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": torch.optim.Adam,
    "fused adam": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "own step": OwnStep,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mismatch_raises_before_the_parameter_changes(name, device):
    training = Training(OPTIMIZERS[name], device)
    training.backward(right=False)
    with pytest.raises(UpstreamMismatch, match="--fused-ce-strategy store or recompute") as error:
        training.step()
    assert "weights that the loss uses" in str(error.value)
    # Once raised it is forgotten, and right steps are taken.
    training.optimizer.zero_grad()
    training.backward()
    training.step()


def test_a_mismatch_in_the_first_iteration_raises():
    """In a fresh process: nothing was set up, the optimizer is older than the first backward."""
    code = (
        "from tests.op.test_grad_guard import *\n"
        "training = Training(sgd)\n"
        "training.backward(right=False)\n"
        "try: training.step()\n"
        "except UpstreamMismatch: print('raised')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "raised"


def test_right_steps_are_taken(device):
    training = Training(sgd, device)
    for _ in range(3):
        training.backward()
        training.backward()
        training.step()


def test_later_right_backwards_do_not_forget_a_mismatch(device):
    training = Training(sgd, device)
    training.backward()
    training.backward(right=False)
    training.optimizer.zero_grad()  # as Megatron's re-run does
    training.backward()
    training.backward()
    with pytest.raises(UpstreamMismatch):
        training.step()


def test_the_first_of_two_optimizers_raises(device):
    wrong, right = Training(sgd, device), Training(torch.optim.Adam, device)
    wrong.backward(right=False)
    right.backward()
    with pytest.raises(UpstreamMismatch):
        right.step()
    right.step()


def test_a_step_that_a_grad_scaler_skips_keeps_the_mismatch(device):
    training = Training(sgd, device)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    training.backward(right=False)
    training.parameter.grad.fill_(math.inf)
    scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)  # skipped
    scaler.update()
    assert float(training.parameter.detach()) == 1.0
    training.optimizer.zero_grad()
    training.backward()
    with pytest.raises(UpstreamMismatch):
        training.step()


def test_an_overflow_reaches_the_gradient(device):
    training = Training(sgd, device)
    training.backward(scale=math.inf)
    assert not torch.isfinite(training.parameter.grad)
    raise_if_mismatch()


def test_check_without_a_step(device):
    raise_if_mismatch()
    Training(sgd, device).backward(right=False)
    with pytest.raises(UpstreamMismatch):
        raise_if_mismatch()
    raise_if_mismatch()


class HeadTraining:
    """The bare op under ``grad_in_forward``, its two operands trained by a plain torch optimizer."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(12, 2, 8, generator=generator).to(device).requires_grad_()
        self.weight = torch.randn(20, 8, generator=generator).to(device).requires_grad_()
        self.labels = torch.randint(0, 20, (2, 12), generator=generator).to(device)
        self.mask = (torch.rand(2, 12, generator=generator) < 0.7).float().to(device)
        self.optimizer = torch.optim.AdamW([self.hidden, self.weight])

    def losses(self, strategy="grad_in_forward"):
        return fused_linear_cross_entropy(
            self.hidden, self.weight, self.labels, token_weights=self.mask,
            config=FusedCEConfig(strategy=strategy, num_chunks=3),
        )  # fmt: skip

    def gradients(self, strategy):
        self.optimizer.zero_grad()
        (self.losses(strategy) * self.mask).sum().mul(0.3).backward()
        return self.hidden.grad, self.weight.grad

    def assert_step_raises(self):
        before = [self.hidden.detach().clone(), self.weight.detach().clone()]
        with pytest.raises(UpstreamMismatch):
            self.optimizer.step()
        assert torch.equal(before[0], self.hidden) and torch.equal(before[1], self.weight)


def test_the_op_with_a_plain_optimizer(device):
    training = HeadTraining(device)
    expected = training.gradients("recompute")
    for got, right in zip(training.gradients("grad_in_forward"), expected, strict=True):
        torch.testing.assert_close(got, right)
    training.optimizer.step()

    training.optimizer.zero_grad()
    training.losses().mean().backward()  # over all tokens, not those of the mask
    training.assert_step_raises()
    training.gradients("grad_in_forward")
    training.optimizer.step()


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
        x = hidden.to(device, dtype).requires_grad_()
        loss = fused_linear_cross_entropy(
            x, weight.to(device, dtype).requires_grad_(), labels, token_weights=weights,
            config=FusedCEConfig(strategy="grad_in_forward", logits_backend=logits_backend),
        )  # fmt: skip
        loss.backward(scalar * weights)
        return x.grad.double()

    # The entries' own rounding averages out, a wrong factor does not.
    one, scaled = gradient(1.0), gradient(c)
    ratio = float((scaled * one).sum() / (one * one).sum())
    assert ratio == pytest.approx(c, rel=5e-4 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_weights_changed_between_loss_and_backward(device, num_sequences):
    """The gradients were made for what the weights were: the loss uses what they are now."""
    training = HeadTraining(device)
    training.hidden = training.hidden.detach()[:, :num_sequences].clone().requires_grad_()
    training.labels, training.mask = training.labels[:num_sequences], training.mask[:num_sequences]
    training.optimizer = torch.optim.AdamW([training.hidden, training.weight])
    losses = training.losses()
    training.mask[0, 5] = 1.0 - training.mask[0, 5]
    (losses * training.mask).sum().backward()
    training.assert_step_raises()


def test_one_hook_whatever_the_number_of_backwards():
    from torch.optim import optimizer as torch_optimizer

    training = Training(sgd)
    training.backward()
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    training.backward()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    ours = [grad_guard._before_step]
    assert [h for h in torch_optimizer._global_optimizer_pre_hooks.values() if h in ours] == ours


def test_the_assertion_fits_into_torchs_limit():
    assert len(grad_guard._ASSERTION) < 255


@on_gpu
def test_no_host_wait_before_the_step():
    training = Training(sgd, "cuda")
    training.backward()
    training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.backward(right=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(UpstreamMismatch):
        raise_if_mismatch()


@on_gpu
@pytest.mark.parametrize("first_in_capture", [False, True])
@pytest.mark.parametrize("error_mode", ["global", "thread_local"])
def test_captured_backwards_remember_at_every_replay(monkeypatch, first_in_capture, error_mode):
    """A mismatch in one replay is found after later right ones, and never before the first replay.

    A capture without a step before it is refused.
    """
    training = Training(sgd, "cuda")
    used = training.weights.clone()

    def backward():
        (Promised.apply(training.parameter, training.weights) * used).sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backward()
    torch.cuda.current_stream().wait_stream(side)
    raise_if_mismatch()
    if first_in_capture:
        monkeypatch.setattr(WITHOUT_MODEL, "_flags", {})
    graph = torch.cuda.CUDAGraph()
    if first_in_capture:
        with (
            pytest.raises(RuntimeError, match="before the capture"),
            torch.cuda.graph(graph, capture_error_mode=error_mode),
        ):
            backward()
        return
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        backward()
    raise_if_mismatch()
    graph.replay()
    raise_if_mismatch()
    for _ in range(2):
        used.fill_(1.0)
        graph.replay()
        used.copy_(training.weights)
        graph.replay()
        with pytest.raises(UpstreamMismatch):
            raise_if_mismatch()
        graph.replay()
        raise_if_mismatch()


@on_gpu
@pytest.mark.parametrize("first_in_capture", [False, True])
@pytest.mark.parametrize("error_mode", ["global", "thread_local"])
def test_the_op_in_a_graph_of_the_whole_iteration(first_in_capture, error_mode):
    """Forward and backward captured as Megatron's full_iteration graphs are; the step is outside."""
    code = f"""
from tests.op.test_grad_guard import *
training = HeadTraining("cuda")
used = training.mask.clone()
def iteration():
    (training.losses() * used).sum().backward()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side): iteration()
torch.cuda.synchronize()
if {first_in_capture}: WITHOUT_MODEL._flags.clear()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, capture_error_mode={error_mode!r}): iteration()
except RuntimeError as refused: print("refused" if "before the capture" in str(refused) else refused)
if {first_in_capture}: sys.exit()
raise_if_mismatch()
for wrong in (False, True, False):
    training.optimizer.zero_grad(set_to_none=False)
    used.copy_(torch.ones_like(used) if wrong else training.mask)
    graph.replay()
    used.copy_(training.mask)
    graph.replay()
    try: training.optimizer.step(); print("stepped")
    except UpstreamMismatch: print("raised")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = ["refused"] if first_in_capture else ["stepped", "raised", "stepped"]
    assert done.stdout.split() == said, done.stdout + done.stderr


@on_gpu
@pytest.mark.parametrize("right", [True, False])
def test_a_captured_optimizer_step_asserts_on_the_device(right):
    """In a process of its own: the assertion ends it."""
    code = (
        "from tests.op.test_grad_guard import *\n"
        "training = Training(lambda p: torch.optim.Adam(p, capturable=True), 'cuda')\n"
        "used = training.weights.clone()\n"
        "def whole_step():\n"
        "    losses = Promised.apply(training.parameter, training.weights)\n"
        "    training.optimizer.zero_grad()\n"
        "    (losses * used).sum().backward()\n"
        "    training.optimizer.step()\n"
        "side = torch.cuda.Stream()\n"
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): whole_step()\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): whole_step()\n"
        "graph.replay(); torch.cuda.synchronize(); print('one', flush=True)\n"
        f"used.fill_(1.0) if not {right} else None\n"
        "graph.replay(); torch.cuda.synchronize(); print('two', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if right:
        assert done.stdout.split() == ["one", "two"], done.stderr
    else:
        assert done.stdout.split() == ["one"] and done.returncode != 0, done.stderr
        assert "--fused-ce-strategy store or recompute" in done.stderr + done.stdout
