"""The adapter's parts that need no model: deferred logits, flags, import hook, main_grad, launchers."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import pickle
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, autoload_start
from megatron_fused_ce.adapter import arguments, forms, say, switch
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.main_grad import open_grad_weight_for
from megatron_fused_ce.adapter.requests import MaxAndIndices, losses
from megatron_fused_ce.adapter.token_weights import TokenWeights
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight, ReturnedGradWeight

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = TokenWeights(None, "nobody said")


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

    def ask(self, request, config, *given):
        """Losses of 0, and the argmax."""
        assert request is losses
        self.asked.append((config, *given))
        top = (self.real * config.logit_scale).max(-1)
        return torch.zeros(2, 4), MaxAndIndices(top.values, top.indices)

    def deferred(self, **options):
        return DeferredLogits(self, self.real.shape, **options)


@pytest.fixture
def deferred():
    megatron_fused_ce.counters().reset()
    return KnownCall().deferred()


def materialised() -> int:
    return megatron_fused_ce.counters().materialised


def test_looking_costs_nothing(deferred):
    assert deferred.shape == deferred.size() == (4, 2, 6)
    assert (deferred.size(-1), deferred.dim(), deferred.ndim, len(deferred)) == (6, 3, 3, 4)
    assert (deferred.dtype, deferred.device.type) == (torch.float32, "cpu")
    assert not hasattr(deferred, "__cuda_array_interface__")
    assert {deferred: 1}[deferred] == 1, "hashed by identity, as tensors are"
    assert materialised() == 0


@pytest.fixture
def gathered():
    """What Megatron's models return where ``returned_to_caller`` is open: ``[b, s, V]``."""
    megatron_fused_ce.counters().reset()
    return KnownCall(gathered=True).deferred().transpose(0, 1).contiguous()


#: What no head has an answer to: real logits are made.
USES = [
    lambda z: z.transpose(0, 1)[:, :, :3].contiguous(),
    lambda z: z.transpose(dim0=1, dim1=2),
    lambda z: z.contiguous(memory_format=torch.contiguous_format),
    lambda z: z.float(memory_format=torch.preserve_format),
    lambda z: torch.log_softmax(z, dim=-1),
    lambda z: torch.cat([z, z]),
    lambda z: z[0],
    lambda z: z[:, -1],
    lambda z: z[:1, :-1],
    lambda z: z[:, :, :3],
    lambda z: z[..., :-1, :],
    lambda z: z[:, torch.tensor([0, 1])],
    lambda z: z[z > 0],
    lambda z: z + 1,
    lambda z: 1 - z,
    lambda z: -z,
    lambda z: z * torch.tensor(3.0),
    lambda z: z / torch.ones(z.shape[1], 1),
    lambda z: torch.argmax(z, dim=-1),
    lambda z: z.max(dim=-1).values,
    lambda z: torch.stack(list(z)),
    lambda z: (3 * z).sum(0),
    lambda z: (z / 2).log_softmax(-1),
    # Element by element, as of tensors; by default objects compare by identity, without an error.
    lambda z: z == z,
    lambda z: z == 0.25,
    lambda z: torch.full((2, 4, 6), z[0, 0, 0].item()).view(z.shape) == z,
    lambda z: z != torch.zeros(z.shape),
]
#: Of logits that Megatron has not transposed yet.
OF_A_PART = [lambda z: z.transpose(0, 1).contiguous(), lambda z: z.squeeze(dim=0), lambda z: z.float()]


@pytest.mark.parametrize("whole", [False, True])
def test_any_other_use_is_what_real_logits_give(whole):
    for use in USES if whole else USES + OF_A_PART:
        megatron_fused_ce.counters().reset()
        call = KnownCall(whole)
        deferred, real = call.deferred(), call.real
        if whole:
            deferred, real = deferred.transpose(0, 1).contiguous(), real.transpose(0, 1)
        assert torch.equal(use(deferred), use(real))
        assert materialised() == 1


def test_nothing_is_equal_to_none(deferred):
    assert (deferred == None) is False  # noqa: E711


class SumOfSquares(torch.autograd.Function):
    """As Megatron's own cross entropies: ``apply`` knows no ``__torch_function__``."""

    @staticmethod
    def forward(ctx, logits):
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("its logits have no gradient to give")


def fills(z):
    z[..., 4:] = -9.0


def copies_a_part(z):
    half = z * 0.5
    z.zero_()
    return half


#: What callers do to logits in place, or to others that share memory with them; and what they go on with.
CHANGES = {
    "div_": lambda z: z.div_(3.0),
    "setitem": fills,
    "relu": lambda z: (torch.nn.functional.relu(z, inplace=True), None)[1],
    "mul out": lambda z: (torch.mul(z, 0.3, out=z), None)[1],
    "copy_": lambda z: (z.copy_(torch.ones_like(z)), None)[1],
    "data": lambda z: (z.data.mul_(0.3), None)[1],
    "other data": lambda z: setattr(z, "data", z.data * 0.3),
    "a detached alias": lambda z: (z.detach().mul_(0.3), None)[1],
    "a part": lambda z: (z[:, 1:3].mul_(0.3), None)[1],
    "a transposed alias": lambda z: (z.transpose(0, 1).mul_(0.3), None)[1],
    "a copy made before": copies_a_part,
    "a copy of a copy": lambda z: (z / 2).float().transpose(0, 1).transpose(0, 1).mul_(3.0),
    "a copy left behind": lambda z: ((z / 2).mul_(3.0), None)[1],
    "a number of numpy's": lambda z: np.float32(0.5) * z,
    "a power of": lambda z: 2.0**z,
    "plus": lambda z: +z,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_not_lost(deferred, change):
    """Of logits for the caller, whose log-probabilities would not know of it."""
    gathered = KnownCall(gathered=True).deferred(needs_grad=False)

    def log_probs(logits):
        logits = logits.transpose(0, 1)  # as the model returns them, but of the same memory
        changed = CHANGES[change](logits)
        logits = (logits if changed is None else changed) / 0.7
        labels = torch.zeros(2, 4, dtype=torch.int64)
        made = logits.log_probs(labels) if isinstance(logits, DeferredLogits) else None
        assert made is None
        return torch.log_softmax(logits, -1)[..., 0]

    stock = gathered.call.real.clone()
    assert torch.equal(log_probs(gathered), log_probs(stock))
    assert torch.equal(gathered.call.real, stock)  # what the layer's own became
    assert materialised() == 1


def test_a_hook_on_the_logits_is_called(gathered):
    seen = []
    gathered.call.real.requires_grad_()
    gathered.register_hook(seen.append)
    left = gathered.transpose(0, 1)
    assert isinstance(left, torch.Tensor)
    left.sum().backward()
    assert len(seen) == 1


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
    expected = deferred.call.real.square().sum((0, 1)) / 2
    torch.testing.assert_close(weight.grad, expected)
    with torch.no_grad():
        made = deferred.call.deferred(needs_grad=False)
        made.float().mean()
    assert not made.float().requires_grad


def test_a_loss_of_logits_made_without_gradients_has_none(deferred):
    """As of real ones, wherever it is computed."""
    weight = torch.ones(3, 2, requires_grad=True)
    made = []

    def ask(*_):
        made.append(torch.is_grad_enabled())
        return weight.sum(), None

    deferred.call.ask = ask
    without = deferred.call.deferred(needs_grad=False)
    assert not without.loss(torch.zeros(2, 4), UNKNOWN).requires_grad
    assert deferred.loss(torch.zeros(2, 4), UNKNOWN).requires_grad


def test_scales_are_remembered_and_reach_the_loss(deferred):
    scaled = 0.5 * (deferred * 3)
    assert materialised() == 0
    scaled.loss(torch.zeros(2, 4), UNKNOWN)
    assert deferred.call.asked[0][0].logit_scale == 1.5
    assert torch.equal(scaled.float(), deferred.call.real * 3 * 0.5)


def test_acceptance_counts_are_served_from_the_fused_pass(deferred):
    """The two ways in which Megatron asks for a head's argmax."""
    deferred.loss(torch.zeros(2, 4), UNKNOWN)
    expected = deferred.call.real.max(dim=-1)
    values, indices = deferred.max(dim=-1)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)
    for dim in (-1, 2):
        assert torch.equal(torch.argmax(deferred, dim), expected.indices)
        assert torch.equal(torch.max(deferred, dim).values, expected.values)
    assert (materialised(), megatron_fused_ce.counters().fused) == (0, 1)
    assert torch.equal(deferred.max(dim=0).values, deferred.call.real.max(dim=0).values)
    assert materialised() == 1


@pytest.mark.parametrize(
    ("use", "scale", "positions", "dtype"),
    [
        (lambda z: z, 1.0, slice(None), torch.float32),
        (lambda z: z[:, :-1], 1.0, slice(-1), torch.float32),
        (lambda z: (z * 3)[:, :-1, :] / 1.5, 2.0, slice(-1), torch.float32),
        (lambda z: z.float()[:, 1:][:, ::2], 1.0, slice(1, None, 2), torch.float32),
    ],
)
def test_log_probs_of_what_is_remembered(gathered, use, scale, positions, dtype):
    """Labels and log-probabilities of the positions that are left, of the whole sequence in the head."""
    seen = []

    def ask(_, config, labels, entropy, active):
        seen.append((config.logit_scale, labels))
        assert active is None
        entropy = None if entropy == "none" else torch.arange(8.0, 16.0).view(2, 4)
        return torch.arange(8.0).view(2, 4), entropy

    gathered.call.ask = ask
    left = use(gathered)
    labels = torch.arange(8).view(2, 4)[:, positions] + 1
    assert left.shape == (*labels.shape, 6) and left.dtype == dtype
    assert left.log_probs(labels)[1] is None
    seen.clear()
    megatron_fused_ce.counters().reset()
    for first, made in zip((0.0, 8.0), left.log_probs(labels, "detached"), strict=True):
        assert torch.equal(made, torch.arange(first, first + 8).view(2, 4)[:, positions])
        assert made._base is None  # pipeline schedules free no view
    (given,) = seen
    assert given[0] == scale and given[1].shape == (2, 4) and torch.equal(given[1][:, positions], labels)
    assert (materialised(), megatron_fused_ce.counters().fused) == (0, 1)
    # Real ones after all: what the same steps make of the layer's.
    assert torch.equal(left.exp(), use(gathered.call.real.transpose(0, 1)).exp())
    assert materialised() == 1


def test_a_batch_of_one_can_be_squeezed(deferred):
    """Of this rank's part too, for a caller who takes that; then rows are no positions any more."""
    deferred.call.real = deferred.call.real[:, :1]
    one = deferred.call.deferred(for_caller=True)
    deferred.call.ask = lambda *_: (torch.arange(4.0).view(1, 4), None)
    rows = (one.transpose(0, 1).squeeze(0) / 2).contiguous()
    assert rows.shape == (4, 6) and rows.size(-1) == 6
    made, _ = rows.log_probs(torch.arange(4))
    assert torch.equal(made, torch.arange(4.0)) and materialised() == 0
    expected = deferred.call.real[:, 0] / 2
    for use in (lambda z: z[:2], lambda z: z[:, :3], lambda z: z.squeeze(0), lambda z: z.transpose(0, 1)):
        assert torch.equal(use(rows), use(expected))
    assert materialised() == 1
    assert one.transpose(0, 1).squeeze().shape == (4, 6) and materialised() == 1


def test_samples_are_computed_alone(gathered):
    """The head gets the rows of samples as active; labels of no rows are not read."""
    seen = []

    def ask(_, config, labels, entropy, active):
        seen.append((labels, active))
        return labels.float(), None

    gathered.call.ask = ask
    tokens = torch.tensor([7, 8, 9])

    def samples(rows):
        return [(rows[0, 1:3], tokens[-2:]), (rows[0, :0], tokens[-0:]), (rows[1, 3:], tokens[-1:])]

    log_probs, _ = gathered.log_probs_of(samples)
    assert [x.tolist() for x in log_probs] == [[8, 9], [], [9]]
    assert seen[0][0].tolist() == [[0, 8, 9, 0], [0, 0, 0, 9]]
    assert torch.equal(seen[0][1], seen[0][0] > 0)
    gathered.log_probs_of(lambda rows: [(rows, torch.arange(8))])
    assert seen[1][1] is None
    with pytest.raises(ValueError, match=r"\[2, 1\] rows and \[1, 2\] labels"):
        gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:1]), (rows[1, :1], tokens[1:])])
    # A row of two samples with a label of each.
    both, _ = gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:2]), (rows[0, 1:3], tokens[1:])])
    assert both[0].tolist() == [7, 8] and both[1].tolist() == [8, 9]
    both, _ = gathered.log_probs_of(lambda rows: [(rows[0, :2], tokens[:2]), (rows[0, :1], tokens[2:])])
    assert both[0].isnan().tolist() != both[1].isnan().tolist() and not both[0][1].isnan()


def test_zero_times_the_sum_needs_no_logits(gathered):
    """As slime and miles add it to a loss without response tokens; another use of a sum makes real ones."""
    weight, nan = torch.ones((), requires_grad=True), torch.tensor(1.0)

    def ask(*_):  # for zeros, or for log-probabilities
        return (torch.ones(2, 4) * weight).where(torch.arange(4) > 0, nan), None

    gathered.call.ask = ask
    for zero in (0, 0.0, -0.0):
        loss = torch.zeros(())
        loss += zero * (gathered.float()[:, :-1] / 3).sum()
        assert loss == 0 and loss.dtype == torch.float32
        assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.zeros(()))
    assert megatron_fused_ce.counters().fused == 3
    nan.fill_(torch.nan)
    gathered.log_probs(torch.zeros(2, 4, dtype=torch.long))
    assert (gathered.mean() * 0).isnan() and not (gathered.detach().mean() * 0).requires_grad
    assert (materialised(), megatron_fused_ce.counters().fused) == (0, 4)  # those of log_probs were taken
    real = gathered.call.real.transpose(0, 1).contiguous()
    total, halved = gathered.sum(), gathered.mean() / 2
    gathered.mul_(2.0)  # what was summed before is not changed
    assert torch.equal(total + 0, real.sum()) and torch.equal(halved + 0, real.mean() / 2)
    assert torch.equal(gathered.sum(-1), 2 * real.sum(-1)) and (0 * gathered.sum()) == 0
    assert materialised() == 1


def test_log_probs_that_only_real_logits_have(gathered, deferred):
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert gathered.log_probs(labels[:, 1:]) is None  # not one label for each position
    assert gathered.transpose(0, 1).log_probs(labels) is None
    assert deferred.log_probs(labels) is None  # of this rank's part of the vocabulary
    assert materialised() == 0


def test_train_rls_functions_are_patched(monkeypatch, deferred):
    """By the import hook, also where train_rl.py has one by name already; deferred logits never get out."""
    from megatron_fused_ce.adapter import caller, import_hook

    rl_utils, train_rl = types.ModuleType("megatron.rl.rl_utils"), types.ModuleType("train_rl")
    model = torch.nn.Linear(1, 1)

    def get_logprobs(model, gathers):
        assert caller.why_caller_needs_logits() == ""
        made = KnownCall(gathers).deferred()
        return rl_utils.selective_log_softmax(made, None) if gathers else made

    rl_utils.get_logprobs = train_rl.get_logprobs = get_logprobs

    def selective_log_softmax(logits, index):
        return logits.log_softmax(-1)

    rl_utils.selective_log_softmax = types.FunctionType(selective_log_softmax.__code__, vars(rl_utils))
    for module in (rl_utils, train_rl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(DeferredLogits, "log_probs", lambda self, index: ("served", None))
    monkeypatch.setattr(import_hook, "_asked_for", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_hook.install(lambda: False)
    for module in (train_rl, rl_utils):
        assert module.get_logprobs(model, gathers=True) == "served"
        assert torch.equal(module.get_logprobs(model=model, gathers=False), deferred.call.real)
    monkeypatch.setattr(DeferredLogits, "log_probs", lambda self, index: None)
    expected = deferred.call.real.log_softmax(-1)
    assert torch.equal(train_rl.get_logprobs(model, True), expected)
    assert torch.equal(rl_utils.selective_log_softmax(deferred.call.real, None), expected)
    assert "gathers the logits" in caller.why_caller_needs_logits()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lr 1 --fused-ce-num-chunks 4", None),
        ("--fused-chunked-ce", FusedCEConfig()),
        ("--fused-chunked-ce --fused-ce-memory-mb 512", FusedCEConfig(memory_mb=512)),
        (
            "--x --fused-ce-num-chunks 64 --fused-chunked-ce --fused-ce-strategy store --y 3",
            FusedCEConfig("store", num_chunks=64),
        ),
        (
            "--fused-chunked-ce --fused-ce-merge packed --fused-ce-label-smoothing 0.1 "
            "--fused-ce-z-loss 1e-4 --fused-ce-logit-softcap 30 --fused-ce-ignore-index -100",
            FusedCEConfig(
                merge="packed", label_smoothing=0.1, z_loss=1e-4, logit_softcap=30.0, ignore_index=-100
            ),
        ),
    ],
)
def test_config_from_a_command_line(line, expected):
    assert arguments.config_from_args(arguments.args_from_argv(line.split())) == expected


def test_masked_padding_begins_where_the_tokenizer_ends(monkeypatch):
    tokenizer = types.SimpleNamespace(vocab_size=50257)
    name = "megatron.training.global_vars"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(_GLOBAL_TOKENIZER=tokenizer))
    words = ["--fused-chunked-ce", "--fused-ce-mask-padded-vocab"]
    assert arguments.config_from_args(arguments.args_from_argv(words)) == FusedCEConfig(true_vocab_size=50257)
    assert arguments.config_from_args(arguments.args_from_argv(words[:1])) == FusedCEConfig()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--fused-ce-num-chunks 0", "a whole number from 1 to"),
        ("--fused-ce-label-smoothing 1", "below 1, got '1'"),
        ("--fused-ce-z-loss=-1e-4", "a number of 0 or more"),
        ("--fused-ce-z-loss nan", "a number of 0 or more"),
        ("--fused-ce-logit-softcap 0", "a number above 0"),
        ("--fused-ce-num-chunks x", "a whole number from 1 to"),
        ("--fused-ce-strategy fast", "invalid choice"),
        ("--fused-ce-merge ring", "invalid choice"),
        ("--fused-ce-memory-mb=0", "1 to 1000000000, got '0'"),
        ("--fused-ce-memory-mb=2G", "1 to 1000000000, got '2G'"),
    ],
)
def test_bad_flags_end_with_status_2(line, words, capsys):
    """One line after argparse's usage, with the flag and what was expected."""
    with pytest.raises(SystemExit) as end:
        arguments.config_from_args(arguments.args_from_argv(["--fused-chunked-ce", *line.split()]))
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert re.split("[ =]", line)[0] in said and words in said


def test_megatrons_arguments_come_before_the_command_line(monkeypatch):
    """Those of --yaml-cfg and of an older checkpoint do not have the names: then the command line counts, or
    the default. enable() without a config takes what counts."""
    monkeypatch.setattr(sys, "argv", ["x", "--fused-chunked-ce", "--fused-ce-num-chunks", "5"])
    parsed = argparse.Namespace(fused_chunked_ce=True, fused_ce_num_chunks=2)
    monkeypatch.setattr(arguments, "megatron_args", lambda: parsed)
    assert switch.active_config() == FusedCEConfig(num_chunks=2)
    parsed.fused_ce_trust = ["0123456789abcdef"]
    try:
        megatron_fused_ce.enable(trust="f" * 16)
        assert switch.active_config() == FusedCEConfig(num_chunks=2)
        assert switch.trusted() == {"0123456789abcdef", "f" * 16}
        megatron_fused_ce.enable(FusedCEConfig(), trust="f" * 16)
        assert switch.active_config() == FusedCEConfig() and switch.trusted() == {"f" * 16}
    finally:
        megatron_fused_ce.disable()
    for yaml in ({}, {"fused_chunked_ce": False}):
        monkeypatch.setattr(arguments, "megatron_args", lambda y=yaml: argparse.Namespace(**y))
        assert switch.active_config() == FusedCEConfig(num_chunks=5)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert switch.active_config() is None


def weight_with(main_grad_dtype=torch.float32, **attributes):
    weight = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
    weight.main_grad = torch.ones(7, 3, dtype=main_grad_dtype)
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def add_three_chunks(accumulator):
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(7, 3, dtype=torch.float64)
    for _ in range(3):
        grad_logits = torch.randn(5, 7, generator=generator).bfloat16()
        hidden = torch.randn(5, 3, generator=generator).bfloat16()
        accumulator.add(grad_logits, hidden)
        total += grad_logits.double().t() @ hidden.double()
    return total


@pytest.mark.parametrize("main_grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_main_grad_takes_the_gradient(main_grad_dtype, scaled):
    weight = weight_with(main_grad_dtype, grad_added_to_main_grad=False)
    opens = open_grad_weight_for(weight, True)
    assert opens.kind == ("main_grad" if main_grad_dtype == torch.float32 else "low_main_grad")
    accumulator = opens(weight, 3, scaled)
    assert isinstance(accumulator, InPlaceGradWeight)
    total = add_three_chunks(accumulator)
    dummy = accumulator.close(torch.tensor(0.5) if scaled else None)
    expected = 1 + total * (0.5 if scaled else 1.0)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[main_grad_dtype]
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=tolerance, atol=tolerance)
    assert weight.grad_added_to_main_grad is True
    assert dummy.shape == weight.shape and dummy.dtype == weight.dtype


def test_what_autograd_gets_beside_main_grad():
    """Zeros where a tied embedding adds to it, nothing where nobody waits for it."""
    weight = weight_with(grad_added_to_main_grad=False, zero_out_wgrad=True)
    accumulator = open_grad_weight_for(weight, True)(weight, 1, False)
    add_three_chunks(accumulator)
    # Where Transformer Engine is installed its shared dummy lies on the GPU.
    assert torch.equal(accumulator.close(None).to(weight), torch.zeros_like(weight))
    weight = weight_with()
    assert open_grad_weight_for(weight, True)(weight, 1, False).close(None) is None


@pytest.mark.parametrize(
    "attributes", [{"fusion": False}, {"__fsdp_param__": True}, {"main_grad": None}], ids=str
)
def test_plain_gradient_elsewhere(attributes):
    fusion = attributes.pop("fusion", True)
    assert open_grad_weight_for(weight_with(**attributes), fusion) is ReturnedGradWeight


#: A stand-in for Megatron's parser module, and a script that parses with it.
PARSER = """import argparse
def add_megatron_arguments(parser):
    parser.add_argument('--lr', type=float)
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
SCRIPT = """import sys, os
from megatron.training.arguments import parse_args
if __name__ == '__main__':
    args = parse_args()
    print(args.lr, args.fused_chunked_ce, args.fused_ce_num_chunks)
    print(os.path.basename(sys.argv[0]), __file__ == sys.argv[0])
"""


def fake_megatron(tmp_path: Path) -> Path:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "arguments.py").write_text(PARSER)
    script = tmp_path / "pretrain_fake.py"
    script.write_text(SCRIPT)
    return script


def run_python(*words, python=sys.executable, **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [str(python), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")


FLAGS = ("--lr", "0.5", "--fused-chunked-ce", "--fused-ce-num-chunks", "6")


ALONE = ("--fused-ce-z-loss", "1e-4", "--fused-ce-skip-masked", "--fused-ce-merge", "auto")
REFUSED = "error: --fused-ce-z-loss, --fused-ce-skip-masked: no effect without --fused-chunked-ce"
#: Words behind ``python -m megatron_fused_ce.launch``, status, and what is said.
LAUNCHES = [
    ("SCRIPT --lr 0.5 --fused-chunked-ce --fused-ce-num-chunks 6", 0, "0.5 True 6\npretrain_fake.py True\n"),
    ("SCRIPT --help", 0, "fused chunked cross-entropy"),
    # Options without the flag, unless they have their defaults, whatever comes first.
    (f"SCRIPT --lr 0.5 {' '.join(ALONE)}", 2, REFUSED),
    (f"SCRIPT --lr 0.5 --fused-chunked-ce {' '.join(ALONE)}", 0, ""),
    (f"SCRIPT --lr 0.5 {' '.join(ALONE)} --fused-chunked-ce", 0, ""),
    (f"SCRIPT --lr 0.5 {' '.join(ALONE[-2:])}", 0, ""),
    ("--help", 0, "usage: torchrun "),
    ("--help", 0, "--fused-ce-memory-mb"),
    ("no_such.py --fused-chunked-ce", 2, "no such script: no_such.py"),
]


@pytest.mark.parametrize(("words", "status", "said"), LAUNCHES)
def test_launch(words, status, said, tmp_path):
    script = fake_megatron(tmp_path)
    given = [script if word == "SCRIPT" else word for word in words.split()]
    done = run_python("-m", "megatron_fused_ce.launch", *given)
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [("launch x.py", "launch is torchrun's module"), ("no_such", "no command 'no_such'")],
)
def test_what_is_no_command(words, error):
    done = run_python("-m", "megatron_fused_ce", *words.split())
    assert done.returncode == 2 and error in done.stderr


@pytest.mark.parametrize(
    ("defaults", "file", "line", "words"),
    [
        ({"fused_ce_z_loss": 1e-4}, "", "", "--fused-ce-z-loss: no effect without"),
        ({"fused_ce_z_loss": 1e-4}, "", "--fused-chunked-ce", ""),
        ({}, "fused_ce_z_loss: 1e-4\n", "--fused-chunked-ce", "fused_ce_z_loss has no effect there"),
        ({}, "model:\n  fused_chunked_ce: true\n", "", "fused_chunked_ce has no effect there"),
        ({}, "lr: 1 # fused_ce_z_loss: 1\n", "", ""),
        ({}, None, "", ""),  # none to be read: Megatron says so
    ],
)
def test_options_of_a_script_and_of_a_file(defaults, file, line, words, tmp_path, capsys):
    """Defaults that a script sets count as given; Megatron reads a file and tells nobody what it left out."""
    yaml = tmp_path / "model.yaml"
    if file is not None:
        yaml.write_text(file)
    parser = arguments.add_arguments(argparse.ArgumentParser())
    parser.add_argument("--yaml-cfg")
    parser = arguments.refuse_options_without_flag(parser)
    parser.set_defaults(**defaults)
    with pytest.raises(SystemExit) if words else contextlib.nullcontext():
        parser.parse_args([*line.split(), "--yaml-cfg", str(yaml)])
    assert words in capsys.readouterr().err


def test_autoload_makes_the_plain_command_work(tmp_path):
    """In an environment of its own: two files in site-packages, active only with the flag."""
    assert autoload_start.FLAGS == (arguments.FLAG, arguments.PREFIX)
    env_dir, script = tmp_path / "env", fake_megatron(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env_dir], check=True, capture_output=True)
    installed = sysconfig.get_paths()["purelib"]
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), installed))}

    def run(*words):
        return run_python(*words, python=env_dir / "bin" / "python", **env)

    assert run(script, *FLAGS).returncode == 2
    assert "not installed" in run("-m", "megatron_fused_ce.autoload", "status").stdout
    assert "nothing removed" in run("-m", "megatron_fused_ce.autoload", "remove").stdout
    assert run("-m", "megatron_fused_ce.autoload", "install").returncode == 0
    assert run(script, *FLAGS).stdout.splitlines()[0] == "0.5 True 6"
    assert REFUSED in run(script, *ALONE).stderr
    loaded = "import sys; print('megatron_fused_ce' in sys.modules)"
    assert run("-c", loaded).stdout.strip() == "False"
    # Uninstalled, and the line stays behind: one line where the flag is, and Megatron's parser ends the run.
    env["PYTHONPATH"] = installed
    (file,) = env_dir.rglob("*.pth")
    assert file.with_suffix(".py").read_text() == Path(autoload_start.__file__).read_text()
    gone = run(script, *FLAGS)
    assert gone.returncode == 2 and "unrecognized arguments" in gone.stderr
    assert "Traceback" not in gone.stderr and "Error processing line" not in gone.stderr
    said = "megatron_fused_ce is not installed any more, so --fused-chunked-ce is unknown: "
    said += f"install it again, or delete {file}"
    assert [line for line in gone.stderr.splitlines() if "not installed" in line] == [said]
    assert run("-c", "pass").stderr == ""
    env["TORCHELASTIC_RUN_ID"] = "1"  # a worker: its launcher has said so
    assert said not in run(script, *FLAGS).stderr
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
    assert run("-m", "megatron_fused_ce.autoload", "remove").stdout.startswith("removed: ")
    assert not list(env_dir.rglob("megatron_fused_ce*"))
    assert run(script, *FLAGS).returncode == 2


def test_two_flags_are_for_all_and_the_rest_stand_under_advanced():
    parser = arguments.add_arguments(argparse.ArgumentParser(add_help=False))
    groups = {
        group.title.rpartition("cross-entropy")[2]: {
            action.option_strings[-1] for action in group._group_actions
        }
        for group in parser._action_groups
    }
    assert groups[""] == {"--fused-chunked-ce", "--fused-ce-memory-mb"} and len(groups[", advanced"]) == 12
    page = (ROOT / "docs" / "options.md").read_text().split("## Strategies")[0]
    for title, text in zip(("", ", advanced"), page.split("### Advanced"), strict=True):
        assert groups[title] == set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        *((what, TypeError, "config must be a FusedCEConfig, got ") for what in ("store", FusedCEConfig)),
        # Megatron's layer would not apply it where it makes real logits.
        (FusedCEConfig(logit_scale=0.5), ValueError, "under Megatron the model scales its logits"),
    ],
)
def test_what_enable_refuses(config, error, words):
    with pytest.raises(error, match=words):
        megatron_fused_ce.enable(config)
    assert switch.active_config() is None


def test_a_model_that_was_built_before_enable_says_so(monkeypatch):
    """Its loss comes with real logits, and would end in "heads: 0 fused" without a word."""
    pytest.importorskip("megatron.core")
    from megatron_fused_ce.adapter import language_module

    class LanguageModule(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = torch.nn.Identity()
            self.post_process = False
            self.setup_embeddings_and_output_layer()

        def setup_embeddings_and_output_layer(self):
            pass

        def compute_language_model_loss(self, labels, logits):
            return logits.sum()

    lines = []
    monkeypatch.setattr(say, "line", lines.append)
    monkeypatch.setattr(say, "_said", set())
    early = LanguageModule()
    language_module.patch(types.SimpleNamespace(LanguageModule=LanguageModule, __name__=__name__))
    later, logits = LanguageModule(), torch.zeros(2)
    for asks in (False, True):
        if asks:
            megatron_fused_ce.enable()
        try:
            for model in (early, early, later):
                model.compute_language_model_loss(None, logits)
        finally:
            megatron_fused_ce.disable()
        assert bool(lines) == asks
    assert lines == [
        "the head of LanguageModule stays on Megatron's own path: it was built before "
        "megatron_fused_ce.enable(): call that before the model is built. --fused-chunked-ce has no effect "
        "on this head"
    ]


def test_an_adopted_layer_can_be_copied_and_pickled():
    pytest.importorskip("megatron.core")
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.ones(3, 2))
    layer.sequence_parallel = False
    held = forms.Held("", frozenset())
    ColumnParallelLinear.adopt(layer, FusedCEConfig(num_chunks=2), False, "GPTModel", held)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is ColumnParallelLinear
        assert copied.fused_ce_config == layer.fused_ce_config
        assert copied.fused_ce_held.of == copied.fused_ce_held.changed() == ""


def test_logits_inside_a_namedtuple(deferred):
    class Pair(NamedTuple):
        logits: object
        scale: float

    seen = []

    def first(pair):
        seen.append(pair)
        return pair.logits

    assert torch.overrides.has_torch_function((deferred,))
    made = torch.overrides.handle_torch_function(first, (deferred,), Pair(deferred, 2.0))
    assert torch.equal(made, deferred.call.real)
    assert type(seen[0]) is Pair and seen[0].scale == 2.0
    top = torch.return_types.max((deferred, torch.zeros(1)))
    torch.overrides.handle_torch_function(lambda top: seen.append(top), (deferred,), top)
    assert type(seen[1]) is type(top) and torch.equal(seen[1].values, deferred.call.real)


def test_what_is_imported_already_or_reloaded_is_patched(tmp_path):
    """Once. A reload executes a module in the old one's dictionary, the mark of the patch included."""
    fake_megatron(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['x', *{FLAGS!r}]\n"
        "import importlib\n"
        "import megatron.training.arguments as a\n"
        "from megatron_fused_ce.adapter import import_hook\n"
        "for reloads in (False, True, True):\n"
        "    assert not reloads or importlib.reload(a) is a\n"
        "    import_hook.install(); import_hook.install()\n"
        "    print(a.parse_args().fused_ce_num_chunks)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["6"] * 3, done.stderr
