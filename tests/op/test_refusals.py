"""What is refused: arguments that do not fit, of each function, and the words that say so."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import ones

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_loss,
    fused_linear_token_outputs,
    fused_linear_topk,
    fused_linear_topk_distillation,
    losses,
)
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.validation import _check_tensors
from megatron_fused_ce.ranks.collectives import VocabParallel
from megatron_fused_ce.rl import token_divergence, token_log_probs
from tests.support.losses import Focal
from tests.support.op import EXP_DTYPE, HAS_EXP

#: Of the rows below.
E, T, V = (TypeError, ValueError), TypeError, ValueError


def ids(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def trained(*shape):
    return ones(*shape).requires_grad_()


class Sharded(torch.Tensor):
    """As FSDP2's DTensors, which claim the whole shape and hold a part: a kernel would read past it."""

    placements = ("Shard(dim=0)",)


class NoHash(Focal):
    __hash__ = None


Holder = dataclasses.make_dataclass("Holder", ["by"], frozen=True)


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


class Late(Focal):
    """Equal to others, whatever its last field."""

    def __init__(self, gamma, late):
        super().__init__(gamma)
        object.__setattr__(self, "late", late)


def capture(by):
    return lambda self, rows: rows.loss * by


def _with(**attributes):
    return {"terms": {"loss": type("Odd", (Focal,), attributes)(2.0)}}


def config(**options):
    return {"config": FusedCEConfig(**options)}


def _by_exp(*outputs, **options):
    """Outputs with gradients, on GPUs too."""
    operands = {"hidden": trained(6, 2, 8).to(EXP_DTYPE), "weight": ones(8, 8, dtype=EXP_DTYPE)}
    named = config(logits_backend="scaled_exp", **options)
    return {**operands, "outputs": outputs, "differentiable": True, **named}


#: Of numbers, which the device alone knows: the host waits for them.
CHECKS = config(strategy="store", debug_checks=True)
OPERANDS = {"hidden": trained(6, 2, 4), "weight": ones(9, 4)}
LABELS = {**OPERANDS, "labels": ids(2, 6)}
TOP_K = {"teacher_ids": ids(2, 6, 3), "teacher_log_probs": -ones(2, 6, 3)}
TEACHER = {"teacher_hidden": ones(6, 2, 3), "teacher_weight": ones(9, 3)}
OUTPUTS = {"outputs": ("lse",), "token_weights": ones(2, 6)}
TERMS = {"terms": {"loss": losses.CrossEntropy()}}
ROW = {"hidden": trained(3, 4), "weight": trained(3, 4), "labels": ids(3)}
SEVERAL = {"labels": ids(3, 2)}
#: Where the GEMM can be had: else the GPU is the reason.
BY_EXP = [
    (_by_exp("lse", label_smoothing=0.1, z_loss=1e-4), V, r"the delta of LabelSmoothing \+ ZLoss;"),
    (_by_exp("entropy", logit_softcap=30.0), V, "make entropy with a gradient beside a softcap;"),
    (_by_exp("entropy", logit_precision="fp32"), V, "entropy with a gradient of fp32 logits;"),
    (_by_exp("log_prob", logit_softcap=9.0, z_loss=0.1), V, r"beside CrossEntropy \+ ZLoss beside"),
]
LARGE = {"hidden": ones(1, 1), "weight": ones(1, 1).expand(2**24 + 1, 1), "labels": ids(1)}

#: Of each function: arguments that fit, and what takes the place of some of them, the error and its words.
REFUSED = {
    fused_linear_cross_entropy: (
        LABELS,
        [
            ({"hidden": ones(6, 2, 9)}, E, "H = 9"),
            ({"hidden": ones(6, 4)}, E, r"hidden has shape \(6, 4\) .*expected hidden \[s, b, H\]"),
            ({"hidden": ones(12, 4)}, E, r"hidden has shape \(12, 4\) .*\[T, H\] with \[T\]"),
            ({"hidden": ones(2, 6, 4)}, E, r"hidden has shape \(2, 6, 4\) .*is transposed"),
            ({"hidden": ones(4)}, E, r"hidden has shape \(4,\); expected"),
            ({"hidden": ones(6, 2, 4).double()}, E, "float64"),
            ({"hidden": ones(6, 2, 4).bfloat16()}, E, "one dtype"),
            ({"hidden": [1.0]}, E, "hidden is a list; expected a torch.Tensor"),
            ({"weight": ones(0, 4)}, E, "at least one row"),
            ({"weight": ones(4)}, E, "expected \\[V, H\\]"),
            ({"labels": ids(6, 2)}, E, "one of them is transposed"),
            ({"labels": ids(2, 5)}, E, r"labels \(2, 5\); expected .* here labels \(2, 6\)"),
            ({"labels": ones(2, 6)}, E, "expected int64"),
            ({"token_weights": ones(3)}, E, "token_weights"),
            ({"vocab_start": -1}, E, "vocab_start"),
            ({"vocab_start": 10}, V, "without a tensor-parallel group"),
            ({"tp_group": "tp"}, T, "tp_group must be a torch.distributed.ProcessGroup"),
            ({"config": "store"}, T, r"FusedCEConfig, got 'store': .* FusedCEConfig\(strategy='store'\)"),
            ({"config": {"num_chunks": 4}}, T, "must be a FusedCEConfig, got {'num_chunks': 4}"),
            (config(true_vocab_size=10), V, "is 10, and the vocabulary has 9 rows"),
            (config(strategy="grad_in_forward"), V, r"token_weights.*'store' or 'recompute'"),
            ({"token_weights": 0 * ones(2, 6) / 0, **CHECKS}, V, "token_weights have a NaN"),
            ({"token_weights": ones(2, 6).to("meta")}, V, "token_weights on meta"),
            *(({name: x.detach().to("meta")}, V, f"{name} is on the meta") for name, x in LABELS.items()),
            *(
                ({name: x.detach().as_subclass(Sharded)}, T, f"{name} is a Sharded, placed .*full_tensor")
                for name, x in LABELS.items()
            ),
        ],
    ),
    fused_linear_token_outputs: (
        {**LABELS, **OUTPUTS},
        [
            ({"outputs": ("accuracy",)}, V, "no such output: 'accuracy'"),
            ({"outputs": ("lse", "lse")}, V, "name each once"),
            ({"outputs": "lse"}, T, r"outputs is 'lse'; expected .* \('lse',\)"),
            ({"outputs": True}, T, "outputs is True; expected a sequence"),
            ({**LARGE, "outputs": ("predicted",), "token_weights": None}, V, "exact below"),
            *(BY_EXP if HAS_EXP else []),
        ],
    ),
    fused_linear_topk_distillation: (
        {**OPERANDS, **TOP_K},
        [
            ({"teacher_ids": ids(2, 6, 2)}, V, "expected both"),
            (
                {"teacher_ids": ids(12, 3), "teacher_log_probs": ones(12, 3)},
                V,
                r"are \(\d+, \d+\) for hidden",
            ),
            ({"teacher_ids": ones(2, 6, 3)}, T, "expected int64"),
            ({"teacher_log_probs": ids(2, 6, 3)}, T, "floats"),
            ({"teacher_ids": ids(2, 6, 0), "teacher_log_probs": ones(2, 6, 0)}, V, "K of 1 to"),
            ({"teacher_log_probs": ones(2, 6, 3), **CHECKS}, V, "teacher_log_probs are above 0"),
            ({"loss": "jsd"}, V, "choose cross_entropy or kl"),
            (config(label_smoothing=0.1), V, "belong to labels"),
            (config(ignore_index=-100), V, "belong to labels"),
        ],
    ),
    fused_linear_topk: (
        {**OPERANDS, "k": 2, "batch_first": False},
        [
            ({"hidden": ones(1, 6, 2, 4)}, V, r"hidden has shape \(1, 6, 2, 4\); expected"),
            ({"k": 0}, V, "k is 0; expected a whole number"),
            ({"k": 10}, V, "k is 10; expected at most the 9 ids"),
        ],
    ),
    fused_linear_loss: (
        {**LABELS, **TERMS},
        [
            ({"terms": losses.CrossEntropy()}, T, "expected a dict"),
            ({"terms": {}}, T, "expected a dict"),
            ({"terms": {"loss": "ce"}}, T, "expected names and losses.Term"),
            ({"terms": {"loss": NoHash(2.0)}}, T, "dataclass"),
            (_with(needs=("entropy",)), T, "expected a tuple of logit_sum"),
            (_with(keeps=("weighted",)), T, "expected a tuple of nothing"),
            (_with(gives=("beta",)), T, "expected a tuple of at, alpha"),
            ({"terms": {"loss": 0.5 * Focal(ones(())) + losses.CrossEntropy()}}, T, "has a tensor"),
            ({"terms": {"loss": Focal((ones(()),))}}, T, "has a tensor"),
            ({"terms": {"loss": Focal(Holder(torch.nn.Linear(1, 1)))}}, T, "has a tensor"),
            ({"terms": {"loss": Focal(Slotted(Holder(trained(1))))}}, T, "has a tensor"),
            ({"terms": {"loss": Focal(torch.nn.Linear(1, 1).forward)}}, T, "has a tensor"),
            ({"terms": {"loss": 0.5 * Focal(capture(trained(1)))}}, T, "has a tensor"),
            (_with(value=capture(trained(1))), T, "has a tensor"),
            ({"terms": {"loss": Late(2.0, 3.0)}}, T, "is equal to terms with another late"),
            (
                {"terms": {"best": losses.Predicted(), "loss": losses.CrossEntropy()}},
                V,
                "has no gradient",
            ),
            (config(z_loss=0.1), V, "which are terms here"),
        ],
    ),
    token_log_probs: (
        ROW,
        [
            (config(skip_masked=True), V, "out the tokens labelled ignore_index, and config has none"),
            ({"temperature": 0}, V, "above 0 and finite"),
            ({"temperature": float("nan")}, V, "above 0 and finite"),
            ({"temperature": "1"}, T, "expected a number"),
            ({"temperature": torch.tensor([1.0, 1.0, 0.0])}, V, "not all above 0"),
            ({"temperature": torch.tensor([1.0, torch.inf, 1.0])}, V, "not all above 0"),
            ({"temperature": torch.ones(2)}, V, "one a token"),
            ({"temperature": torch.tensor(0.0)}, V, "temperature must be above 0"),
            ({"temperature": ids(3) + 1}, T, "expected floats"),
            ({"entropy": True}, V, "choose one of none, detached"),
            ({"entropy": "differentiable", "config": "store"}, T, "config must be a FusedCEConfig"),
            ({"active_mask": ones(3)}, V, r"active_mask is torch.float32 \[3\]"),
            ({"active_mask": ones(1, 3).bool()}, V, r"expected bool, one a token: \[3\]"),
            (
                {"labels": ids(3, 2), "active_mask": ones(3, 2).bool()},
                V,
                r"expected bool, one a token: \[3\]",
            ),
            ({"active_mask": [True]}, V, "active_mask is list"),
            (config(strategy="grad_in_forward"), V, "needs token_weights"),
            ({"labels": ids(3, 0)}, V, "expected .* K of 1 to 32768"),
            ({"labels": ids(2, 2)}, V, r"here labels \("),
            ({"labels": ones(3, 2)}, T, "expected int64"),
            ({**SEVERAL, **config(ignore_index=-100)}, V, "-1 is an empty entry"),
            ({**SEVERAL, **config(skip_masked=True)}, V, "have no such label"),
            ({**SEVERAL, **config(logits_backend="scaled_exp")}, V, "cannot serve here"),
            ({**SEVERAL, **config(strategy="grad_in_forward")}, V, "needs token_weights"),
        ],
    ),
    fused_linear_distillation: (
        {**LABELS, **TEACHER},
        [
            ({"teacher_hidden": [[1.0]]}, T, "teacher_hidden is a list; expected"),
            ({"teacher_hidden": ids(6, 2, 3)}, T, "fused_linear_topk_distillation"),
            ({"teacher_weight": ones(9, 3).half()}, T, "teacher_weight torch.float16; expected one"),
            ({"hidden": ones(4), "labels": None}, V, r"expected \[s, b, H\] or \[T, H\]"),
            ({"hidden": None, "labels": None}, T, "hidden is a NoneType; expected"),
            ({"labels": ids(2, 6, 2)}, V, r"with labels \[b, s\]"),
            ({"teacher_weight": ones(())}, V, r"teacher_weight \(\); expected"),
            ({"teacher_weight": ones(9)}, V, r"expected \[s, b, H_t\] and \[V, H_t\]"),
            ({"teacher_hidden": ones(12, 3)}, V, r"expected \[s, b, H_t\] and \[V, H_t\]"),
            ({"teacher_hidden": ones(5, 2, 3)}, V, r"of the student's tokens \(6, 2\)"),
            ({"teacher_hidden": ones(6, 2, 4)}, V, r"of the student's tokens \(6, 2\)"),
            ({name: x.to("meta") for name, x in TEACHER.items()}, V, "is on the meta device"),
            ({"teacher_hidden": trained(6, 2, 3)}, V, r"torch.no_grad\(\), or pass teacher_hidden.detach"),
            ({"teacher_weight": trained(9, 3)}, V, "or pass teacher_weight.detach"),
            ({"divergence": "kl"}, V, "choose one of forward_kl, reverse_kl, jsd"),
            ({"divergence": "jsd", "beta": 1.0}, V, "take forward_kl or reverse_kl for the ends"),
            ({"divergence": "jsd", "beta": "1"}, T, "beta is '1'; expected a number"),
            ({"teacher_logit_scale": ones(1)}, T, "teacher_logit_scale is tensor"),
            ({"teacher_logit_softcap": "5"}, T, "teacher_logit_softcap is '5'"),
            ({"teacher_logit_scale": 0.0}, V, "expected a finite number that is not 0"),
            ({"teacher_logit_softcap": -1.0}, V, "None or a finite number above 0"),
            ({"labels": None, "label_weights": 1.0}, V, "without labels; give both"),
            ({"label_weights": ones(6, 2)}, V, r"floats in the labels' shape \(2, 6\)"),
            ({"label_weights": ids(2, 6)}, V, "expected a number, or floats"),
            ({"label_weights": "1"}, T, "expected a number or a tensor"),
            ({"label_weights": trained(2, 6)}, V, r"pass label_weights.detach\(\)"),
            (config(label_smoothing=0.1), V, "do not go with a divergence"),
            (config(z_loss=0.1), V, "do not go with a divergence"),
            (config(skip_masked=True), V, "none are given"),
            ({"temperature": ones(2, 6)}, V, "one temperature for all tokens"),
            ({"temperature": 0.0}, V, "above 0 and finite"),
            ({"teacher_weight": ones(8, 3)}, V, "teacher_weight has 8 rows and weight 9"),
            (
                {"teacher_weight": ones(6, 3), **config(true_vocab_size=7)},
                V,
                "true_vocab_size is 7; expected one cut",
            ),
            (config(strategy="grad_in_forward"), V, "needs token_weights"),
        ],
    ),
    token_divergence: (
        {**{f"student_{name}": x for name, x in OPERANDS.items()}, **TEACHER, "batch_first": False},
        [
            ({"batch_first": None}, V, "give batch_first=True for"),
            ({"entropy": "differentiable"}, V, "choose one of none, detached"),
            ({"active_mask": ones(2, 6)}, V, r"active_mask is torch\.float32"),
        ],
    ),
    FusedCEConfig: (
        {},
        [
            ({"label_smoothing": 1.0}, V, "label_smoothing must be"),
            ({"label_smoothing": -0.1}, V, "label_smoothing must be"),
            ({"label_smoothing": float("nan")}, V, "label_smoothing must be"),
            ({"label_smoothing_form": "keras"}, V, "choose one of megatron, pytorch"),
            ({"z_loss": -1.0}, V, "z_loss must be"),
            ({"z_loss": float("inf")}, V, "z_loss must be"),
            ({"logit_softcap": 0.0}, V, "logit_softcap must be"),
            ({"logit_softcap": float("inf")}, V, "logit_softcap must be"),
            ({"logit_softcap": 1e39}, V, "finite, also in fp32"),
            ({"logit_scale": 1e39}, V, "finite, also in fp32"),
            ({"logit_scale": float("nan")}, V, "logit_scale must be"),
            ({"ignore_index": 2**70}, V, "ignore_index must be between"),
            ({"true_vocab_size": 0}, V, "true_vocab_size must be 1 or more"),
            ({"true_vocab_size": 1, "label_smoothing": 0.1}, V, "two classes"),
            ({"ignore_index": 1.5}, V, "ignore_index must be a whole number"),
            ({"ignore_index": "none"}, V, "ignore_index must be a whole number, None or 'auto'"),
            ({"num_chunks": 0}, V, "1 or more"),
            ({"chunk_tokens": -3}, V, "1 or more"),
            ({"num_chunks": 2.5}, V, "whole number"),
            ({"num_chunks": 2, "chunk_tokens": 8}, V, "give one of them"),
            ({"strategy": "fastest"}, V, "choose one of"),
            ({"logit_scale": 0.0}, V, "not 0"),
            *(
                ({name: "yes"}, V, f"{name} must be True or False, got 'yes'")
                for name in ("skip_masked", "debug_checks")
            ),
        ],
    ),
}
SAID_OF_OPTIONS = r"num_chunks belongs to the config: give config=FusedCEConfig\(num_chunks=4\)"
for of_function, (_, rows_of_function) in REFUSED.items():
    rows_of_function.append(({"stratgy": "store"}, T, "unexpected keyword argument 'stratgy'"))
    if of_function is not FusedCEConfig:
        rows_of_function.append(({"num_chunks": 4}, T, SAID_OF_OPTIONS))
        rows_of_function.append(({"sequence_parallel": True}, V, "sequence_parallel=True without tp_group"))


def on(device, given):
    """The trainable ones are leaves there."""
    return {
        name: x.detach().to(device).requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.device.type == "cpu"
        else x
        for name, x in given.items()
    }


@pytest.mark.parametrize(
    ("function", "change", "error", "words"),
    [
        pytest.param(function, *row, id=f"{function.__name__}-{row[-1]}")
        for function, (_, rows) in REFUSED.items()
        for row in rows
    ],
)
def test_refused(function, change, error, words, device):
    """After a call that fits, and again: nothing is kept that a call which is refused could find."""
    fit = REFUSED[function][0]
    function(**on(device, fit))
    for _ in range(2):
        with pytest.raises(error, match=words):
            function(**on(device, {**fit, **change}))


def test_all_tokens_where_a_part_is_expected():
    for hidden, labels in ((ones(8, 2, 4), ids(2, 8)), (ones(8, 4), ids(8))):
        with pytest.raises(ValueError, match=r"hidden has shape .* expected this rank's part"):
            _check_tensors(Call(hidden, ones(11, 4), labels), VocabParallel(None, 2, 0, True))
