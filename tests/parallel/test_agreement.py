"""What one rank alone has: its memory and machine never change the collectives of its group; arguments that
differ raise on all of them."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_distillation,
    fused_linear_topk,
    fused_linear_topk_distillation,
)
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head.autograd import HeadOutputs, linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.kernels import gemm_variants
from megatron_fused_ce.logits import choose
from megatron_fused_ce.losses import Pull, Rows, Term
from megatron_fused_ce.ranks.agreement import history_of
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.collectives import Collectives
from tests.support.op import EXP_DTYPE, at_odd_offset, fresh_group
from tests.support.problems import laid_out
from tests.support.ranks import Rank, on_ranks


class OneHead:
    """One head of this rank, the same values in every call; where its tensors lie is the caller's choice."""

    def __init__(self, rank: Rank, group: Any = None, vocab: int = 128) -> None:
        # As a fresh launch has it: nothing was compared over it.
        self.group = group or dist.new_group(list(range(rank.size)))
        sizes = {"s": 24, "b": 1, "hidden_size": 32, "vocab": vocab}
        self.inputs = make_inputs("plain", **sizes, dtype=EXP_DTYPE, device=rank.device)
        self.hidden, self.weight = self.inputs.hidden, self.inputs.weight.chunk(rank.size)[rank.rank]
        self.vocab_start = {"vocab_start": rank.rank * len(self.weight)}

    def __call__(
        self, place_hidden: Any = torch.clone, place_weight: Any = torch.clone, **changes: Any
    ) -> tuple[HeadOutputs, list[torch.Tensor]]:
        """What the op gives, then loss and both gradients."""
        hidden = place_hidden(self.hidden).requires_grad_()
        weight = place_weight(self.weight).requires_grad_()
        arguments = {"config": FusedCEConfig(logits_backend="scaled_exp", num_chunks=2), **changes}
        if place_teacher := arguments.pop("place_teacher", None):
            of_teacher = None, "reverse_kl", 0.5, 0.5, None, False, False
            arguments["other_targets"] = Distillation(self.hidden, place_teacher(self.weight), *of_teacher)
        out = linear_cross_entropy(Call(hidden, weight, self.inputs.labels, tp_group=self.group, **arguments))
        out.loss.backward(self.inputs.grad_loss)
        return out, [out.loss.detach(), hidden.grad, weight.grad]


PLACES = {"odd-offset": at_odd_offset, "odd-rows": partial(laid_out, how="columns of more")}


def is_last(rank: Rank) -> bool:
    return rank.rank == rank.size - 1


def serve_everywhere() -> Any:
    """``auto`` may take the scaled-exp GEMM on a CPU too, by Triton's interpreter."""
    stock = choose.why_not_here

    def why_not_here(config: FusedCEConfig, *tensors: torch.Tensor) -> str:
        if config.logits_backend == "auto":
            config = replace(config, logits_backend="scaled_exp")
        return stock(config, *tensors)

    return patch.object(choose, "why_not_here", why_not_here)


@on_ranks(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["hidden", "weight", "teacher"])
def test_a_tensor_that_lies_badly(rank: Rank, what, place) -> None:
    """On call 2, on the last rank alone: copied there, of a weight it is said; the others' collectives are
    those of call 1. Hidden states from the start, too."""
    call, where = OneHead(rank), {"place_teacher": torch.clone} if what == "teacher" else {}
    _, first = call(**where)
    where |= {f"place_{what}": PLACES[place]} if is_last(rank) else {}
    for head in (call, OneHead(rank)) if what == "hidden" else (call,):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out, again = head(**where)
        assert out.logits_backend == "scaled_exp"
        assert all(map(torch.equal, first, again))
        copies = [str(one.message) for one in told if "is copied in every call" in str(one.message)]
        assert len(copies) == (is_last(rank) and what != "hidden")


@on_ranks(2)
@pytest.mark.parametrize("place", [*PLACES, "no kernel"])
def test_no_scaled_exp_on_one_rank_from_the_start(rank: Rank, place) -> None:
    """A weight that lies badly, a kernel that does not compile: ``auto`` takes the row kernels everywhere, in
    later calls too."""
    call = OneHead(rank)
    config = FusedCEConfig(num_chunks=2)
    fails = None, "scaled_exp does not compile here (a test)"
    with serve_everywhere(), contextlib.ExitStack() as stack:
        assert OneHead(rank)(config=config)[0].logits_backend == "scaled_exp", "the case tests nothing"
        if is_last(rank) and place == "no kernel":
            stack.enter_context(patch.object(gemm_variants, "compiled", lambda device: fails))
        for moved in (is_last(rank), False):
            where = PLACES.get(place, torch.clone) if moved else torch.clone
            out, made = call(place_weight=where, config=config)
            assert out.logits_backend == "gemm_rows"
            assert out.why_not_scaled_exp
    exact = OneHead(rank)(config=FusedCEConfig(logits_backend="gemm_rows", num_chunks=2))[1]
    assert all(map(torch.equal, exact, made))


@on_ranks(2)
def test_later_calls_exchange_nothing(rank: Rank) -> None:
    """One exchange per head and group; other lengths, options and places of the same head need none."""
    call = OneHead(rank)
    other = OneHead(rank, call.group, vocab=256)

    def exchanges(head: OneHead, **given: Any) -> int:
        with Collectives({call.group: "tp"}) as issued:
            head(**head.vocab_start, **given)
        return sum(made.dtype == "int64" and made.name == "all_gather" for made in issued.calls)

    scaled = FusedCEConfig(logits_backend="scaled_exp", num_chunks=3, logit_scale=0.5)
    where = at_odd_offset if is_last(rank) else torch.clone
    assert [exchanges(call), exchanges(call)] == [1, 0]
    assert exchanges(call, config=scaled, place_hidden=where) == 0
    assert [exchanges(other), exchanges(other), exchanges(call)] == [1, 0, 0]
    # One rank alone has lost its specs, and makes them again; they are bounded.
    history = history_of(call.group)
    assert history.specs
    if is_last(rank):
        history.specs.clear()
    with patch("megatron_fused_ce.head.spec.MAX_SPECS", 4):
        for scale in range(2, 8):
            config = replace(scaled, logit_scale=1 / scale)
            assert exchanges(call, config=config) == 0
    assert len(history.specs) == 4


@on_ranks(2)
def test_a_destroyed_group_is_let_go(rank: Rank) -> None:
    """Its history, whose specs name it, does not keep it."""
    call = OneHead(rank)
    hidden, weight = call.hidden.clone().requires_grad_(), call.weight.clone().requires_grad_()
    loss = linear_cross_entropy(Call(hidden, weight, call.inputs.labels, tp_group=call.group)).loss
    assert history_of(call.group).specs
    group = weakref.ref(call.group)
    dist.destroy_process_group(call.group)
    del call
    gc.collect()  # Triton's interpreter leaves cycles that hold its arguments
    assert group() is None
    with pytest.raises(RuntimeError, match="destroyed after its forward"):
        loss.sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("words", ["rows of weight that are contiguous", "there is no triton"])
def test_a_backend_that_one_rank_cannot_have(rank: Rank, words) -> None:
    """Named: an error on every rank, whose call goes on without that request."""
    call, missing = OneHead(rank), None
    where = {"place_weight": at_odd_offset} if is_last(rank) and "weight" in words else {}
    if is_last(rank) and "triton" in words:
        missing = ImportError(words)
    for _ in range(2):
        with (
            patch.object(choose, "choose", side_effect=missing, wraps=choose.choose),
            pytest.raises((ImportError, ValueError), match=words),
        ):
            call(**where)
    call(config=FusedCEConfig(num_chunks=2))


@on_ranks(2)
@pytest.mark.parametrize("what", ["main_grad", "device", "shard"])
def test_one_plan_for_all_ranks(rank: Rank, what) -> None:
    """``main_grad`` on one rank alone, a Hopper beside another GPU, a larger shard: in later calls, too."""
    from megatron_fused_ce.adapter.main_grad import open_grad_weight_for

    in_mb = {"memory_mb": 4, "logits_backend": "gemm_rows"}
    num_tokens, size, rows, options = {
        "main_grad": (2048, 512, 1024, in_mb),
        "device": (16384, 16, 32, {"strategy": "recompute"}),
        "shard": (4096, 64, 32 + 992 * is_last(rank), in_mb),
    }[what]
    hidden = torch.ones(num_tokens, size, device=rank.device, dtype=torch.bfloat16)
    labels = torch.zeros(num_tokens, device=rank.device, dtype=torch.int64)
    weight = torch.ones(rows, size, device=rank.device, dtype=torch.bfloat16, requires_grad=True)
    if what == "main_grad" and is_last(rank):
        weight.main_grad = torch.zeros(rows, size, device=rank.device)
    name = "cpu" if what != "device" else "Hopper" if is_last(rank) else "other GPU"

    def plan(group: Any) -> Any:
        opens = open_grad_weight_for(weight, gradient_accumulation_fusion=True)
        given = {"tp_group": group, "config": FusedCEConfig(**options), "open_grad_weight": opens}
        made = linear_cross_entropy(Call(hidden, weight, labels, **given))
        made.loss.sum().backward()
        return made.plan.strategy, made.plan.count, made.plan.stored_chunks

    with fresh_group(rank) as group, patch("megatron_fused_ce.head.spec.device_in_plans", lambda _: name):
        plans: list[Any] = [None] * rank.size
        for over in (None, group, group):
            dist.all_gather_object(plans, plan(over))
            assert (len(set(plans)) > 1) == (over is None), (over, plans)


# --- arguments that differ -----------------------------------------------------------------------


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loss": (lambda **given: linear_cross_entropy(Call(**given)), {"labels": whole_numbers(1, 8)}),
    "divergence": (
        fused_linear_distillation,
        {
            "hidden": ones(8, 1, 4).requires_grad_(),
            "teacher_hidden": ones(8, 1, 3),
            "teacher_weight": ones(5, 3),
        },
    ),
    "top-k distillation": (
        fused_linear_topk_distillation,
        {"teacher_ids": whole_numbers(1, 8, 1), "teacher_log_probs": -ones(1, 8, 1)},
    ),
    "log-probs": (token_log_probs, {"labels": whole_numbers(1, 8, 2)}),
    "top-k": (fused_linear_topk, {"k": 2, "batch_first": False}),
}


def small_call(rank: Rank, group: Any, kind: str = "loss", grads: bool = True, **changes: Any) -> None:
    call, given = KINDS[kind]
    given = {"hidden": ones(8, 1, 4), "weight": ones(5, 4), "config": FusedCEConfig(num_chunks=2), **given}
    given |= {"tp_group": group, **changes}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            given[name] = value.to(rank.device)
    with torch.set_grad_enabled(grads):
        call(**given)


@dataclass(frozen=True)
class Shaped(Term):
    """A user's, of a function."""

    shape: Any
    gives = ("at",)

    def value(self, rows: Rows) -> torch.Tensor:
        return rows.loss

    def pull(self, rows: Rows, upstream: Any) -> Pull:
        return Pull(at=upstream)


def shaped(shape: Any) -> dict[str, Any]:
    return {"terms": (("loss", Shaped(shape)),)}


def power(of: Any) -> Any:
    return lambda x: x**of


@dataclass(frozen=True)
class Row:
    #: of every rank's error
    words: str
    #: what one rank gives otherwise
    changes: dict[str, Any]
    kind: str = "loss"
    #: what all of them give
    base: dict[str, Any] = field(default_factory=dict)
    #: all ranks give the changes
    everywhere: bool = False


def config(**options: Any) -> dict[str, Any]:
    return {"config": FusedCEConfig(num_chunks=2, **options)}


def of_kind(kind: str, **rows: tuple[Any, ...]) -> dict[str, Row]:
    return {f"{kind}: {name}".replace("_", " "): Row(*row[:2], kind, *row[2:]) for name, row in rows.items()}


CHECKED, LABELS = config(debug_checks=True), {"labels": whole_numbers(1, 8)}
DISAGREE, CUT = "disagree on labels or teacher", "one cut of the vocabulary|teacher's shard does not fit"
TERMS = "disagree on terms"
ADDRESS = "by its address alone, which ranks cannot compare"
#: As many tokens on each rank, but others: their statistics would be merged.
FIRST, LAST = (torch.tensor([[*first, 1, 1, 0, 1, 0, 0]]).bool() for first in ((0, 1), (1, 0)))
MASKS = "leave out different tokens: 2 are masked on one"
#: What is looked at without debug_checks, too.
OF_EVERY_CALL = (MASKS, "not all")
TRAINED = {"hidden": ones(8, 1, 4).requires_grad_()}
PART = {"sequence_parallel": True, "hidden": ones(4, 1, 4)}
WEIGHTS = config(skip_masked=True)
DIFFERENCES = {
    **of_kind(
        "loss",
        outputs=(r"disagree on outputs: \(\);", {"outputs": ("lse", "entropy")}),
        tokens=(
            r"disagree on hidden: float32 \[8, 1, 4\]",
            {"hidden": ones(6, 1, 4), "labels": whole_numbers(1, 6)},
        ),
        merge=("disagree on merge", config(merge="all_reduce")),
        z_loss=("disagree on z_loss", config(z_loss=1e-4)),
        temperature=("disagree on temperature", {"temperature": 0.5}),
        reduction=("disagree on reduce_grad_hidden", {"reduce_grad_hidden": False}),
        temperature_below_0=("above 0 and finite", {"temperature": -1.0}),
        bad_shape=("H = 3", {"hidden": ones(8, 1, 3)}),
        bad_dtype_of_hidden=("has dtype", {"hidden": ones(8, 1, 4).double()}),
        weights_elsewhere=("token_weights on meta", {"token_weights": ones(1, 8).to("meta")}),
        no_grad=(
            "grad mode: on; off", {"grads": False},
            {"token_weights": ones(1, 8), **TRAINED, **config(strategy="grad_in_forward")},
        ),
        a_function_within=(TERMS, shaped({"of": [power(torch.cos)]}), shaped({"of": [power(torch.sin)]})),
        a_method=(TERMS, shaped((3.0).hex), shaped((2.0).hex)),
        a_closure=(TERMS, shaped(power(3)), shaped(power(2))),
        a_partial=(TERMS, shaped(partial(power, of=3)), shaped(partial(power, of=2))),
        address_of_an_object=(ADDRESS, shaped(object()), shaped(max), True),
        address_in_a_closure=(ADDRESS, shaped(power(object())), shaped(max), True),
        address_in_a_list=(ADDRESS, shaped([torch.Generator()]), shaped(max), True),
        shards_that_overlap=("overlap", {"vocab_start": 0}, {}, True),
        more_real_tokens_than_rows=(
            "the vocabulary has 10 rows", config(true_vocab_size=11), config(true_vocab_size=10), True
        ),
        mask=(MASKS, {"token_weights": LAST.float()}, {"token_weights": FIRST.float(), **WEIGHTS}),
        mask_of_parts=(
            MASKS, {"token_weights": LAST.float()}, {"token_weights": FIRST.float(), **WEIGHTS, **PART}
        ),
    ),
    **of_kind(
        "divergence",
        no_tensor=("teacher_hidden is a list", {"teacher_hidden": [1.0]}),
        a_gradient=("the teacher gets none", {"teacher_hidden": ones(8, 1, 3).requires_grad_()}),
        size=(DISAGREE, {"teacher_hidden": ones(8, 1, 2), "teacher_weight": ones(5, 2)}),
        dtype=(DISAGREE, {"teacher_hidden": ones(8, 1, 3).half(), "teacher_weight": ones(5, 3).half()}),
        divergence=(DISAGREE, {"divergence": "jsd"}),
        beta=(DISAGREE, {"beta": 0.25}),
        scale=(DISAGREE, {"teacher_logit_scale": 2.0}),
        split=(DISAGREE, {"teacher_hidden": ones(4, 1, 3), "teacher_sequence_parallel": True}),
        labels=("disagree on outputs", LABELS),
        more_rows=(CUT, {"teacher_weight": ones(6, 3)}),
        a_label_weight=("0.7", {"label_weights": 0.7}, {**LABELS, "label_weights": 0.5}),
        label_weights=(
            "numbers in label_weights",
            {"label_weights": 2 * ones(1, 8)}, {**LABELS, **CHECKED, "label_weights": ones(1, 8)},
        ),
    ),
    **of_kind("top-k distillation", ids=("must be tensors", {"teacher_ids": [1]})),
    **of_kind(
        "log-probs",
        temperature_of_0=("not all", {"temperature": 0 * ones(1, 8)}, {"temperature": ones(1, 8)}),
        temperature_of_nan=("not all", {"temperature": torch.nan * ones(1, 8)}, {"temperature": ones(1, 8)}),
        temperatures=(
            "numbers in temperature", {"temperature": 2 * ones(1, 8)}, {"temperature": ones(1, 8), **CHECKED}
        ),
        entropy=("choose one of none", {"entropy": "yes"}),
        partial=("that the caller has gathered", {"reduce_grad_hidden": False, **PART}),
        other_labels=(
            rf"{DISAGREE}: labels int64 \[1, 8, 2\]; labels int64 \[1, 8, 3\]",
            {"labels": whole_numbers(1, 8, 3)},
        ),
        no_labels=(r"expected \[\.\., K\] with K of 1", {"labels": whole_numbers(1, 8, 0)}),
        numbers_of_labels=("numbers in labels", {"labels": 1 + whole_numbers(1, 8, 2)}, CHECKED),
        active_mask=(MASKS, {"active_mask": LAST}, {"active_mask": FIRST, **LABELS}),
        active_mask_of_parts=(MASKS, {"active_mask": LAST}, {"active_mask": FIRST, **LABELS, **PART}),
        active_mask_of_several_labels=(MASKS, {"active_mask": LAST}, {"active_mask": FIRST, **PART}),
    ),
    **of_kind(
        "top-k",
        too_many_ids=("expected at most the 10 ids|disagree on k", {"k": 11}),
        another_number=("disagree on k", {"k": 3}),
        a_mask_of_numbers=("active_mask is torch.float32", {"active_mask": ones(1, 8)}),
        a_temperature_of_0=("temperature must be above 0", {"temperature": 0.0}),
    ),
}  # fmt: skip


def call_of(rank: Rank, group: Any, row: Row, differs: bool = True, debug: bool = False) -> None:
    """``differs``: the last rank gives it, and every rank raises."""
    given = {**row.base, **(row.changes if differs and (row.everywhere or is_last(rank)) else {})}
    if debug:
        given["config"] = replace(given.get("config", FusedCEConfig(num_chunks=2)), debug_checks=True)
    words = f"{row.words}|disagree on the numbers" if debug else row.words
    raises = pytest.raises((TypeError, ValueError), match=words) if differs else contextlib.nullcontext()
    with raises:
        small_call(rank, group, row.kind, **given)


@on_ranks(2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_one_rank_differs(rank: Rank, name) -> None:
    """In a group's first call; in one that knows another head all compare the new one, the bad one too; in a
    later one under debug_checks. The next call is in step."""
    row = DIFFERENCES[name]
    with fresh_group(rank) as group:
        call_of(rank, group, row)
    with fresh_group(rank) as group:
        small_call(rank, group, weight=ones(9, 4))
        call_of(rank, group, row)
        call_of(rank, group, row, differs=False)
        if row.words in OF_EVERY_CALL:
            call_of(rank, group, row)
        call_of(rank, group, row, differs=False, debug=True)
        call_of(rank, group, row, debug=True)
        call_of(rank, group, row, differs=False)


@on_ranks(1)
def test_an_address_is_refused_on_one_rank_too(rank: Rank) -> None:
    for name in DIFFERENCES:
        if "address" in name:
            call_of(rank, rank.group, DIFFERENCES[name])


@on_ranks(2)
def test_another_teacher_of_one_student(rank: Rank) -> None:
    """A cut that does not fit is found in the call that brings it; other lengths are not compared."""
    with fresh_group(rank) as group, patch.object(dist, "get_backend", lambda _: "fake"):
        small_call(rank, group, vocab_start=0)  # Megatron's --fake-process-group compares nothing
    with fresh_group(rank) as group:
        small_call(rank, group, "divergence")
        with pytest.raises(ValueError, match="expected one cut of the vocabulary"):
            small_call(rank, group, "divergence", teacher_weight=ones(6, 3))
        with Collectives({group: "tp"}) as seen:
            small_call(rank, group, "divergence", hidden=ones(6, 1, 4), teacher_hidden=ones(6, 1, 3))
        assert [call.name for call in seen.calls] == ["all_gather"] * 2 + ["all_reduce"]
