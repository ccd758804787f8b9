"""What is decided once for each kind of call (``call.CallSpec``) and looked up: never another call's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, call, parallel
from megatron_fused_ce.call import NOTHING_ELSE, Call
from megatron_fused_ce.losses import Term
from megatron_fused_ce.losses.label import CrossEntropy, ZLoss
from megatron_fused_ce.losses.outputs import Lse, differentiable_of
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.promise import Head
from megatron_fused_ce.scripts.lib.reference import make_inputs, make_teacher
from megatron_fused_ce.several_labels import SeveralLabels
from megatron_fused_ce.wgrad import InPlaceGradWeight
from tests.support.op import (
    EXP_DTYPE,
    HAS_EXP,
    STRATEGIES,
    at_odd_offset,
    with_odd_rows,
)
from tests.support.problems import same_bits

needs_exp = pytest.mark.skipif(not HAS_EXP, reason="the scaled-exp GEMM needs Hopper or newer")

#: Of the call before it is placed: where a tensor lies in memory.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.clone,
    "odd offset": at_odd_offset,
    "odd rows": with_odd_rows,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
HEADS = Head("a head of this test"), Head("another one")

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass(frozen=True)
class Kind:
    """A kind of call; its values follow from its shapes."""

    tokens: tuple[int, int] = (6, 2)  # s, b
    flat: bool = False
    hidden_size: int = 16
    vocab: int = 24
    dtype: torch.dtype = torch.float32
    backend: str = "gemm_rows"
    strategy: str = "store"
    cut: tuple[str, int] = ("num_chunks", 2)
    options: tuple[tuple[str, Any], ...] = ()
    places: tuple[str, str] = ("plain", "plain")  # of hidden, of weight
    needs_grad: tuple[bool, bool] = (True, True)
    mode: str = "grad"
    autocast: bool = False
    token_weights: str = "given"
    labels: torch.dtype = torch.int64
    vocab_start: int | None = None
    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    terms: tuple[tuple[str, Term], ...] = ()
    teacher: int = 0
    with_argmax: bool = False
    main_grad: torch.dtype | None = None
    uses_in_flight: int = 1
    head: int = 0
    #: a number, or how many temperatures a token has
    temperature: float | str = 1.0
    zero_unknown: bool = False
    #: which tensor is refused for its class, and which has a token less than the others
    sharded: str = ""
    shorter: str = ""

    @property
    def outputs_with_grad(self) -> tuple[str, ...]:
        return differentiable_of(self.outputs) if self.differentiable else ()

    @property
    def is_interpreted(self) -> bool:
        """Whether it may take long on a CPU."""
        return self.backend == "scaled_exp" or ("row_backend", "triton") in self.options

    def run(self, device: torch.device) -> list[Any]:
        """What the call gives and its gradients, or the words of its error."""
        try:
            return self._run(device)
        except (TypeError, ValueError) as error:
            return [type(error), str(error)]

    def _run(self, device: torch.device) -> list[Any]:
        s, b = self.tokens
        sizes = {"s": s, "b": b, "hidden_size": self.hidden_size, "vocab": self.vocab}
        inputs = make_inputs("odd-labels", **sizes, dtype=self.dtype, device=device)
        weights = inputs.grad_loss.masked_fill(inputs.grad_loss < -0.5, 0.0)
        labels, hidden, teacher = inputs.labels, inputs.hidden, None
        if self.teacher:
            teacher = SeveralLabels(*make_teacher(inputs, self.teacher))
            labels = torch.full_like(labels, -1)
        if self.flat:
            hidden = hidden.flatten(0, 1)
            labels, weights = labels.t().reshape(-1), weights.t().reshape(-1)
            if teacher is not None:
                teacher = SeveralLabels(
                    *(x.transpose(0, 1).flatten(0, 1) for x in (teacher.ids, teacher.log_probs))
                )
        hidden = PLACES[self.places[0]](hidden).requires_grad_(self.needs_grad[0])
        weight = PLACES[self.places[1]](inputs.weight).requires_grad_(self.needs_grad[1])
        tensors = {"hidden": hidden, "weight": weight, "labels": labels.to(self.labels)}
        if self.sharded:
            tensors[self.sharded] = tensors[self.sharded].as_subclass(Sharded)
        if self.shorter:
            tensors[self.shorter] = tensors[self.shorter][:-1]
        temperature = self.temperature
        if isinstance(temperature, str):
            temperature = {"per token": weights, "short": weights[:-1]}[temperature].abs() + 0.5
        main_grad = None
        if self.main_grad is not None:
            main_grad = torch.zeros(weight.shape, dtype=self.main_grad, device=device)
        with MODES[self.mode](), torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            head = linear_cross_entropy(
                Call(
                    **tensors,
                    config=FusedCEConfig(
                        strategy=self.strategy,
                        logits_backend=self.backend,
                        **dict([self.cut, *self.options]),
                    ),
                    token_weights={"given": weights, "none": None, "short": weights[:-1]}[self.token_weights],
                    vocab_start=self.vocab_start,
                    outputs=self.outputs,
                    differentiable=self.outputs_with_grad,
                    terms=self.terms,
                    other_targets=teacher or NOTHING_ELSE,
                    temperature=temperature,
                    zero_unknown=self.zero_unknown,
                    with_argmax=self.with_argmax,
                    uses_in_flight=self.uses_in_flight,
                    head=HEADS[self.head],
                    **({} if main_grad is None else {"open_grad_weight": AddsTo(main_grad)}),
                )
            )
        if head.loss.requires_grad:
            # As grad_in_forward was promised; 0 where tokens are skipped.
            names = ["loss", *self.outputs_with_grad]
            given = [head.outputs[name] for name in names]
            # log_prob of several labels is of each.
            of_each = [weights.unsqueeze(-1) if of.dim() > weights.dim() else weights for of in given]
            torch.autograd.backward(
                given, [1.5 * of.expand_as(x) for x, of in zip(given, of_each, strict=True)]
            )
        made = [*head.outputs.values(), head.local_max, head.local_argmax, main_grad]
        return [head.logits_backend, head.plan, hidden.grad, weight.grad, *made]


class Sharded(Tensor):
    """As a DTensor, which is refused."""

    placements = ("Shard(dim=0)",)


class AddsTo:
    """Opens a wgrad accumulator that adds to ``main_grad``."""

    def __init__(self, main_grad: Tensor) -> None:
        self.kind = "main_grad" if main_grad.dtype == torch.float32 else "low_main_grad"
        self._main_grad = main_grad

    def __call__(self, weight: Tensor, num_gemms: int, scaled: bool) -> InPlaceGradWeight:
        return InPlaceGradWeight(self._main_grad, scaled, lambda: None)


def same(one: list[Any], other: list[Any]) -> bool:
    """To the bit, NaN too."""
    return len(one) == len(other) and all(
        same_bits(a, b) and a.dtype == b.dtype and a.shape == b.shape
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a == b
        for a, b in zip(one, other, strict=True)
    )


def check(kinds: list[Kind], device: torch.device) -> None:
    """Bits, plans and errors of calls one after the other are those of each as the first there ever was."""
    expected = []
    for kind in kinds:
        parallel.forget()
        expected.append(kind.run(device))
    calls = list(zip(kinds, expected, strict=True))
    for in_order in (calls, calls[::-1]):
        parallel.forget()
        for kind, alone in in_order:
            assert same(kind.run(device), alone), kind
    for kind, alone in calls:
        is_error = isinstance(alone[0], type)  # found anew each time
        with contextlib.nullcontext() if is_error else patch.object(call, "_make", None):
            assert same(kind.run(device), alone), kind


OPTIONS = (
    ("logit_scale", 0.5),
    ("logit_scale", 1.5),
    ("logit_softcap", 5.0),
    ("z_loss", 1e-2),
    ("label_smoothing", 0.1),
    ("label_smoothing", 0.3),
    ("label_smoothing_form", "pytorch"),
    ("ignore_index", -100),
    ("ignore_index", 3),
    ("true_vocab_size", 20),
    ("true_vocab_size", 23),
    ("logit_precision", "activations"),
    ("logit_precision", "fp32"),
    ("skip_masked", True),
    ("memory_mb", 1),
    ("row_backend", "triton"),
)
OUTPUTS = (("lse",), ("log_prob", "entropy"), ("entropy", "log_prob"), ("predicted", "correct"))
#: Of the loss; and of an output, in the place of another of that name.
TERMS = (
    (),
    (("loss", CrossEntropy() + ZLoss(1e-2)),),
    (("loss", CrossEntropy() + ZLoss(2e-2)), ("lse", -1.0 * Lse())),
)
EXP = Kind(backend="scaled_exp", dtype=EXP_DTYPE, mode="no_grad", cut=("num_chunks", 1))


@needs_exp
@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "weight"])
@pytest.mark.filterwarnings("ignore:a weight .* is copied")
def test_calls_with_a_tensor_elsewhere(which, device):
    """Where the scaled-exp GEMM cannot load it, hidden states are copied and a weight is refused."""
    check([replace(EXP, places=(place, "plain")[:: 1 - 2 * which]) for place in PLACES], device)


@needs_exp
def test_hidden_states_and_weight_lie_each_for_itself(device):
    """Hidden states at an odd offset are copied; a weight there must not be taken for them."""
    at_odd_offsets = [
        ("odd offset", "plain"),
        ("plain", "odd offset"),
        ("odd offset", "odd offset"),
    ]
    check([replace(EXP, places=places) for places in at_odd_offsets], device)


# --- what hypothesis draws -------------------------------------------------------------------


def pairs_of(values: Any) -> Any:
    return st.tuples(st.sampled_from(values), st.sampled_from(values))


#: Field of a kind -> its values.
FIELDS = {
    "tokens": st.sampled_from([(6, 2), (2, 6), (12, 1), (4, 2), (0, 2), (64, 2)]),
    "flat": st.booleans(),
    "hidden_size": st.sampled_from([16, 8]),
    "vocab": st.sampled_from([24, 32]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "backend": st.sampled_from(["gemm_rows", "scaled_exp", "auto"]),
    "strategy": st.sampled_from([*STRATEGIES, "auto"]),
    "cut": pairs_of(["num_chunks", "chunk_tokens"]).map(lambda pair: (pair[0], len(pair[1]) - 8)),
    "options": st.lists(st.sampled_from(OPTIONS), max_size=3, unique_by=lambda o: o[0]).map(tuple),
    "places": pairs_of(list(PLACES)),
    "needs_grad": st.tuples(st.booleans(), st.booleans()),
    "mode": st.sampled_from(list(MODES)),
    "autocast": st.booleans(),
    "token_weights": st.sampled_from(["given", "none"]),
    "labels": st.sampled_from([torch.int64, torch.int32]),
    "vocab_start": st.sampled_from([None, 0, 3]),
    "outputs": st.sampled_from([(), *OUTPUTS]),
    "differentiable": st.booleans(),
    "terms": st.sampled_from(TERMS),
    "teacher": st.sampled_from([0, 2, 3]),
    "with_argmax": st.booleans(),
    "main_grad": st.sampled_from([None, torch.float32, torch.bfloat16]),
    "uses_in_flight": st.sampled_from([1, 3]),
    "head": st.sampled_from([0, 1]),
    "temperature": st.sampled_from([1.0, 2, "per token"]),
    "zero_unknown": st.booleans(),
}


#: Those that are refused; the rest of the kind may be any.
REFUSED = {
    "dtype": torch.float64,
    "token_weights": "short",
    "labels": torch.float32,
    "vocab_start": True,
    "sharded": "weight",
    "shorter": "hidden",
}


@st.composite
def sequences(draw: Any, interpreted: bool) -> list[Kind]:
    """Calls of one kind and of others that each differ from it in one field."""
    names = st.sampled_from(list(FIELDS))
    one = Kind(dtype=EXP_DTYPE, backend="scaled_exp") if interpreted else Kind()
    one = replace(one, **{name: draw(FIELDS[name]) for name in draw(st.sets(names, max_size=6))})
    others = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    kinds = [one, *(replace(one, **{name: draw(FIELDS[name])}) for name in others)]
    refused = draw(st.none() | st.sampled_from(list(REFUSED)))
    if refused is not None:
        kinds.append(replace(one, **{refused: REFUSED[refused]}))
    return [kind for kind in kinds if interpreted or not kind.is_interpreted]


@pytest.mark.parametrize(
    ("interpreted", "examples"),
    [
        (False, 40),
        pytest.param(False, 80, marks=pytest.mark.rest),
        pytest.param(True, 5, marks=pytest.mark.rest),
    ],
)
def test_a_call_that_is_looked_up_is_the_call(interpreted, examples, device):
    @settings(max_examples=examples)
    @given(sequences(interpreted))
    def looked_up(kinds: list[Kind]) -> None:
        check(kinds, device)

    looked_up()
