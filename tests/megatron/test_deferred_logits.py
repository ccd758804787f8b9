"""Deferred logits without a model: looking, steps that are remembered, and uses that make real ones."""

from __future__ import annotations

import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter.token_weights import TokenWeights


class KnownCall:
    """A call of a head whose real logits are known."""

    hidden = torch.zeros(4, 2, 3)
    config = FusedCEConfig()
    softcap = 0.0

    def __init__(self, gathered=False):
        self.gathered = gathered
        self.real = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
        self.asked = []

    def logits(self):
        return self.real

    def ask(self, _, config, *given):
        """Losses of 0, and the argmax."""
        self.asked.append(config)
        return torch.zeros(2, 4), (self.real * config.logit_scale).max(-1)

    def deferred(self, **options):
        from megatron_fused_ce.adapter.deferred_logits import DeferredLogits

        return DeferredLogits(self, self.real.shape, **options)


@pytest.fixture
def deferred():
    megatron_fused_ce.counters().reset()
    return KnownCall().deferred()


@pytest.fixture
def gathered():
    """What Megatron's models return where ``returned_to_caller`` is open: ``[b, s, V]``."""
    megatron_fused_ce.counters().reset()
    return KnownCall(gathered=True).deferred().transpose(0, 1).contiguous()


def counts() -> tuple[int, int]:
    """Heads that were fused, and logits that were made real."""
    counters = megatron_fused_ce.counters()
    return counters.fused, counters.materialised


def test_looking_costs_nothing(deferred):
    assert deferred.shape == deferred.size() == (4, 2, 6)
    assert (deferred.size(-1), deferred.dim(), deferred.ndim, len(deferred)) == (6, 3, 3, 4)
    assert (deferred.dtype, deferred.device.type) == (torch.float32, "cpu")
    assert not hasattr(deferred, "__cuda_array_interface__")
    assert {deferred: 1}[deferred] == 1, "hashed by identity, as tensors are"
    assert counts() == (0, 0)


def copies_before(z):
    half = z * 0.5
    z.zero_()
    return half


#: What no head has an answer to: the result; or None after a change in place, of the logits or of what shares
#: their memory.
USES = [
    lambda z: z.transpose(0, 1)[:, :, :3].contiguous(),
    lambda z: z.transpose(dim0=1, dim1=2),
    lambda z: z.contiguous(memory_format=torch.contiguous_format),
    lambda z: z.float(memory_format=torch.preserve_format),
    lambda z: z.squeeze(dim=0),
    lambda z: torch.cat([z, z]),
    lambda z: z[0],
    lambda z: z[:1, :-1],
    lambda z: z[:, :, :3],
    lambda z: z[..., :-1, :],
    lambda z: z[z > 0],
    lambda z: 1 - z,
    lambda z: -z,
    lambda z: z * torch.tensor(3.0),
    lambda z: z / torch.ones(z.shape[1], 1),
    lambda z: torch.argmax(z, dim=-1),
    lambda z: z.max(dim=-1).values,
    lambda z: torch.stack(list(z)),
    lambda z: (z / 2).log_softmax(-1),
    lambda z: np.float32(0.5) * z,
    # Element by element, as of tensors; by default objects compare by identity, without an error.
    lambda z: z == z,
    lambda z: torch.full((2, 4, 6), z[0, 0, 0].item()).view(z.shape) == z,
    lambda z: z != torch.zeros(z.shape),
    # In place.
    lambda z: z.div_(3.0),
    lambda z: z.__setitem__((..., slice(4, None)), -9.0),
    lambda z: (torch.nn.functional.relu(z, inplace=True), None)[1],
    lambda z: (torch.mul(z, 0.3, out=z), None)[1],
    lambda z: (z.data.mul_(0.3), None)[1],
    lambda z: setattr(z, "data", z.data * 0.3),
    lambda z: (z.detach().mul_(0.3), None)[1],
    lambda z: (z[:, 1:3].mul_(0.3), None)[1],
    lambda z: (z.transpose(0, 1).mul_(0.3), None)[1],
    copies_before,
    lambda z: (z / 2).float().transpose(0, 1).transpose(0, 1).mul_(3.0),
    lambda z: ((z / 2).mul_(3.0), None)[1],
]


@pytest.mark.parametrize("whole", [False, True], ids=["the layer's own", "the caller's"])
def test_any_other_use_is_what_real_logits_give(whole):
    """So are later ones: log-probabilities would not know of a change in place."""
    for use in USES:
        megatron_fused_ce.counters().reset()
        call, made = KnownCall(whole), []
        real = call.real.clone()
        for layers in (call.deferred(), real):
            logits = layers.transpose(0, 1) if whole else layers  # as the model returns them
            result = use(logits)
            made.append(torch.log_softmax(logits / 0.7, -1) if result is None else result)
        where = f"line {use.__code__.co_firstlineno}"
        assert torch.equal(*made) and torch.equal(call.real, real), where
        assert counts() == (0, 1), where


def test_a_hook_on_the_logits_is_called(gathered):
    seen = []
    gathered.call.real.requires_grad_()
    gathered.register_hook(seen.append)
    gathered.transpose(0, 1).sum().backward()
    assert len(seen) == 1


class SumOfSquares(torch.autograd.Function):
    """As Megatron's own cross entropies: ``apply`` knows no ``__torch_function__``."""

    @staticmethod
    def forward(ctx, logits):
        return (logits * logits).sum()


@pytest.mark.parametrize("before", [False, True], ids=["", "after another loss"])
def test_logits_in_an_autograd_function_raise(deferred, before):
    """They would lose their gradient there; detached ones have none to lose."""
    if before:
        deferred.square().sum()
    with pytest.raises(RuntimeError, match=r"would have none. For a metric take logits.detach\(\)"):
        SumOfSquares.apply(deferred)
    assert deferred.requires_grad and not deferred.detach().requires_grad
    assert torch.equal(SumOfSquares.apply(deferred.detach()), deferred.call.real.square().sum())


def test_a_metric_of_logits_leaves_their_gradient(deferred):
    """Detached, or a count of right answers; a loss then has its gradient."""
    weight = torch.ones(6, requires_grad=True)
    deferred.call.logits = lambda: deferred.call.real * weight
    deferred = deferred.call.deferred() * 0.5
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="no gradient is recorded"):
            deferred.float().mean()
        deferred.detach().float().mean()
        deferred.argmax(-1), deferred.max(dim=-1)
    deferred.square().sum().backward()
    torch.testing.assert_close(weight.grad, deferred.call.real.square().sum((0, 1)) / 2)


def test_acceptance_counts_are_served_from_the_fused_pass(deferred):
    """Which has the scale. The two ways in which Megatron asks for a head's argmax."""
    scaled, real = 0.5 * (deferred * 3), 1.5 * deferred.call.real
    scaled.loss(torch.zeros(2, 4), TokenWeights(None, "nobody said"))
    assert deferred.call.asked[0].logit_scale == 1.5
    for dim in (-1, 2):
        assert torch.equal(torch.argmax(scaled, dim), real.max(dim=-1).indices)
        assert torch.equal(torch.max(scaled, dim).values, real.max(dim=-1).values)
    assert counts() == (1, 0)
    uses = (lambda z: (-2 * z).max(dim=-1), lambda z: z.max(dim=-1, keepdim=True), lambda z: z.max(dim=0))
    for use in uses:  # of other logits than those that the pass had, or in another shape
        assert torch.equal(use(scaled).values, use(real).values)
    assert counts() == (1, 1)


@pytest.mark.parametrize(
    ("use", "scale", "positions"),
    [
        (lambda z: z, 1.0, slice(None)),
        (lambda z: (z * 3)[:, :-1, :] / 1.5, 2.0, slice(-1)),
        (lambda z: z.float()[:, 1:][:, ::2], 1.0, slice(1, None, 2)),
    ],
)
def test_log_probs_of_what_is_remembered(gathered, use, scale, positions):
    """Labels and log-probabilities of the positions that are left, of the whole sequence in the head."""
    seen = []

    def ask(_, config, labels, entropy, active):
        seen.append((config.logit_scale, labels, active))
        entropy = None if entropy == "none" else torch.arange(8.0, 16.0).view(2, 4)
        return torch.arange(8.0).view(2, 4), entropy

    gathered.call.ask = ask
    left = use(gathered)
    labels = torch.arange(8).view(2, 4)[:, positions] + 1
    assert left.shape == (*labels.shape, 6)
    assert left.log_probs(labels)[1] is None
    for first, made in zip((0.0, 8.0), left.log_probs(labels, "detached"), strict=True):
        assert torch.equal(made, torch.arange(first, first + 8).view(2, 4)[:, positions])
        assert made._base is None  # pipeline schedules free no view
    asked_scale, asked_labels, active = seen[1]
    assert (asked_scale, asked_labels.shape, active) == (scale, (2, 4), None)
    assert torch.equal(asked_labels[:, positions], labels) and counts() == (2, 0)
    # Real ones after all: what the same steps make of the layer's.
    assert torch.equal(left.exp(), use(gathered.call.real.transpose(0, 1)).exp())


def test_a_batch_of_one_can_be_squeezed(deferred):
    """Of this rank's part too, for a caller who takes that; then rows are no positions any more."""
    deferred.call.real = deferred.call.real[:, :1]
    one = deferred.call.deferred(for_caller=True)
    deferred.call.ask = lambda *_: (torch.arange(4.0).view(1, 4), None)
    rows = (one.transpose(0, 1).squeeze(0) / 2).contiguous()
    assert rows.shape == (4, 6) and rows.size(-1) == 6
    assert torch.equal(rows.log_probs(torch.arange(4))[0], torch.arange(4.0)) and counts() == (1, 0)
    expected = deferred.call.real[:, 0] / 2
    for use in (lambda z: z[:2], lambda z: z[:, :3], lambda z: z.squeeze(0), lambda z: z.transpose(0, 1)):
        assert torch.equal(use(rows), use(expected))
    assert one.transpose(0, 1).squeeze().shape == (4, 6) and counts() == (1, 1)


def test_samples_share_rows(gathered):
    """A row of two samples, with one label or another; tests/parallel/test_log_probs.py has others."""
    seen = []
    gathered.call.ask = lambda _, config, labels, entropy, active: (seen.append(active) or 1.0 * labels, None)
    tokens = torch.tensor([7, 8, 9])
    gathered.log_probs_of(lambda rows: [(rows, torch.arange(8))])
    assert seen == [None]
    with pytest.raises(ValueError, match=r"\[2, 1\] rows and \[1, 2\] labels"):
        gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:1]), (rows[1, :1], tokens[1:])])
    both, _ = gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:2]), (rows[0, 1:3], tokens[1:])])
    assert both[0].tolist() == [7, 8] and both[1].tolist() == [8, 9]
    both, _ = gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:2]), (rows[0, :1], tokens[2:])])
    assert both[0].isnan().tolist() != both[1].isnan().tolist() and not both[0][1].isnan()


def test_a_sum_needs_logits_unless_it_is_times_zero(gathered):
    """As slime and miles add it to a loss without response tokens (tests/parallel/test_log_probs.py)."""
    weight = torch.ones((), requires_grad=True)
    gathered.call.ask = lambda *_: (torch.ones(2, 4) * weight, None)
    gathered.log_probs(torch.zeros(2, 4, dtype=torch.long))
    assert (gathered.mean() * 0) == (-0.0 * gathered.sum()) == 0
    assert counts() == (1, 0), "those of log_probs were taken"
    real = gathered.call.real.transpose(0, 1).contiguous()
    total, halved = gathered.sum(), gathered.mean() / 2
    gathered.mul_(2.0)  # what was summed before is not changed
    assert torch.equal(total + 0, real.sum()) and torch.equal(halved + 0, real.mean() / 2)
    assert torch.equal(gathered.sum(-1), 2 * real.sum(-1)) and (0 * gathered.sum()) == 0
    assert counts() == (1, 1)


def test_log_probs_that_only_real_logits_have(gathered, deferred):
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert gathered.log_probs(labels[:, 1:]) is None  # not one label for each position
    assert gathered.transpose(0, 1).log_probs(labels) is None
    assert deferred.log_probs(labels) is None  # of this rank's part of the vocabulary
    assert counts() == (0, 0)


def test_logits_inside_a_namedtuple(deferred):
    class Pair(NamedTuple):
        logits: object
        scale: float

    top = torch.return_types.max((deferred, torch.zeros(1)))
    for given in (Pair(deferred, 2.0), top):
        seen = []
        torch.overrides.handle_torch_function(seen.append, (deferred,), given)
        assert type(seen[0]) is type(given) and torch.equal(seen[0][0], deferred.call.real)


def test_train_rls_functions_are_patched(monkeypatch, deferred):
    """By the import hook, also where train_rl.py has one by name already; deferred logits never get out. What
    is made of them: tests/parallel/test_log_probs.py."""
    from megatron_fused_ce.adapter import caller, import_hook

    rl_utils, train_rl = types.ModuleType("megatron.rl.rl_utils"), types.ModuleType("train_rl")

    def get_logprobs(model):
        assert caller.why_caller_needs_logits() == ""
        return KnownCall(gathered=True).deferred()

    def selective_log_softmax(logits, index): ...

    rl_utils.get_logprobs = train_rl.get_logprobs = get_logprobs
    stock = types.FunctionType(selective_log_softmax.__code__, vars(rl_utils))
    rl_utils.selective_log_softmax = stock
    for module in (rl_utils, train_rl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(import_hook, "_asked_for", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_hook.install(lambda: False)
    assert rl_utils.selective_log_softmax is not stock
    for module in (train_rl, rl_utils):
        assert torch.equal(module.get_logprobs(model=torch.nn.Linear(1, 1)), deferred.call.real)
    assert "gathers the logits" in caller.why_caller_needs_logits()
