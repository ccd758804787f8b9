"""What one rank alone has: its memory and machine never change the collectives of its group; arguments that
differ raise on all of them."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig, fused_linear_distillation, fused_linear_topk_distillation
from megatron_fused_ce.head.autograd import HeadOutputs, linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.kernels import gemm_variants
from megatron_fused_ce.logits import choose
from megatron_fused_ce.losses import Pull, Rows, Term
from megatron_fused_ce.ranks.agreement import RankDisagreement, history_of
from megatron_fused_ce.rl import token_log_probs
from tests.support.collectives import Collectives
from tests.support.head import fresh_group
from tests.support.op import at_odd_offset, with_odd_rows
from tests.support.ranks import Rank, on_ranks

SEQUENCE, HIDDEN, ROWS = 24, 32, 64


class OneHead:
    """One head of this rank, the same values in every call; where its tensors lie is the caller's choice."""

    def __init__(self, rank: Rank, rows: int = ROWS) -> None:
        self.rank = rank
        # As a fresh launch has it: nothing was compared over it.
        self.group = dist.new_group(list(range(rank.size)))
        random = torch.Generator().manual_seed(rank.rank)
        same = torch.Generator().manual_seed(77)
        # By Triton's interpreter in fp32.
        dtype = torch.bfloat16 if rank.device.type == "cuda" else torch.float32
        hidden = torch.randn(SEQUENCE, HIDDEN, generator=same).to(rank.device, dtype)
        self.hidden = hidden
        self.weight = torch.randn(rows, HIDDEN, generator=random).to(rank.device, dtype)
        labels = torch.randint(0, rows * rank.size, (SEQUENCE,), generator=same)
        self.labels = labels.to(rank.device)
        self.grad_loss = torch.randn(SEQUENCE, generator=same).to(rank.device)

    def __call__(
        self, place_hidden: Any = torch.clone, place_weight: Any = torch.clone, **changes: Any
    ) -> tuple[HeadOutputs, list[torch.Tensor]]:
        """What the op gives, then loss and both gradients."""
        hidden = place_hidden(self.hidden).requires_grad_()
        weight = place_weight(self.weight).requires_grad_()
        arguments = {"config": FusedCEConfig(logits_backend="scaled_exp", num_chunks=2), **changes}
        out = linear_cross_entropy(Call(hidden, weight, self.labels, tp_group=self.group, **arguments))
        out.loss.backward(self.grad_loss)
        return out, [out.loss.detach(), hidden.grad, weight.grad]


PLACES = {"odd-offset": at_odd_offset, "odd-rows": with_odd_rows}

everywhere = pytest.mark.parametrize("place", PLACES)


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
@everywhere
@pytest.mark.parametrize("what", ["hidden", "weight"])
def test_a_tensor_that_lies_badly(rank: Rank, what, place) -> None:
    """On call 2, on the last rank alone: copied there, of a weight it is said; the others' collectives are
    those of call 1. Hidden states from the start, too."""
    call = OneHead(rank)
    _, first = call()
    where = {f"place_{what}": PLACES[place]} if is_last(rank) else {}
    for head in (call, OneHead(rank)) if what == "hidden" else (call,):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out, again = head(**where)
        assert out.logits_backend == "scaled_exp"
        assert all(map(torch.equal, first, again))
        copies = [str(one.message) for one in told if "is copied in every call" in str(one.message)]
        assert len(copies) == (is_last(rank) and what == "weight")


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
    call, other = OneHead(rank), OneHead(rank, rows=2 * ROWS)
    other.group = call.group

    def exchanges(head: OneHead, **given: Any) -> int:
        with Collectives({call.group: "tp"}) as issued:
            head(**given)
        return sum(made.dtype == "int64" and made.name == "all_gather" for made in issued.calls)

    given = {"vocab_start": rank.rank * ROWS}
    assert exchanges(call, **given) == 1
    assert exchanges(call, **given) == 0
    scaled = FusedCEConfig(logits_backend="scaled_exp", num_chunks=3, logit_scale=0.5)
    where = at_odd_offset if is_last(rank) else torch.clone
    assert exchanges(call, **given, config=scaled, place_hidden=where) == 0
    given = {"vocab_start": rank.rank * 2 * ROWS}
    assert exchanges(other, **given) == 1
    assert exchanges(other, **given) == 0
    assert exchanges(call, vocab_start=rank.rank * ROWS) == 0
    # One rank alone has lost its specs, and makes them again; they are bounded.
    history = history_of(call.group)
    assert history.specs
    if is_last(rank):
        history.specs.clear()
    with patch("megatron_fused_ce.head.spec.MAX_SPECS", 4):
        for scale in range(2, 8):
            config = replace(scaled, logit_scale=1 / scale)
            assert exchanges(call, vocab_start=rank.rank * ROWS, config=config) == 0
    assert len(history.specs) == 4


@on_ranks(2)
def test_a_destroyed_group_is_let_go(rank: Rank) -> None:
    """Its history, whose specs name it, does not keep it."""
    call = OneHead(rank)
    hidden, weight = call.hidden.clone().requires_grad_(), call.weight.clone().requires_grad_()
    loss = linear_cross_entropy(Call(hidden, weight, call.labels, tp_group=call.group)).loss
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


def small_call(rank: Rank, group: Any, kind: str = "loss", **changes: Any) -> None:
    """A small call that one rank makes with other arguments than the rest."""
    labels, teacher = ones(1, 8).long(), {"teacher_hidden": ones(8, 1, 3), "teacher_weight": ones(5, 3)}
    call, beside = {
        "loss": (lambda **given: linear_cross_entropy(Call(**given)), {"labels": labels}),
        "top-k": (
            fused_linear_topk_distillation,
            {"teacher_ids": labels[..., None], "teacher_log_probs": -ones(1, 8, 1)},
        ),
        "divergence": (fused_linear_distillation, teacher),
    }[kind]
    config = FusedCEConfig(num_chunks=2)
    given = {"hidden": ones(8, 1, 4).requires_grad_(kind == "divergence"), "weight": ones(5, 4)}
    given |= {"config": config, "tp_group": group, **beside, **changes}
    placed = {
        name: x.to(rank.device) if isinstance(x, torch.Tensor) and not x.is_meta else x
        for name, x in given.items()
    }
    call(**placed)  # type: ignore[operator]


#: What one rank gives otherwise, and the words of every rank's error.
OF_A_LOSS: dict[str, tuple[dict[str, Any], str]] = {
    "outputs": ({"outputs": ("lse", "entropy")}, r"disagree on outputs: \(\);"),
    "tokens": (
        {"hidden": ones(6, 1, 4), "labels": ones(1, 6).long()}, r"disagree on hidden: float32 \[8, 1, 4\]"
    ),
    "merge": ({"config": FusedCEConfig(num_chunks=2, merge="all_reduce")}, "disagree on merge"),
    "z-loss": ({"config": FusedCEConfig(num_chunks=2, z_loss=1e-4)}, "disagree on z_loss"),
    "temperature": ({"temperature": 0.5}, "disagree on temperature"),
    "reduction": ({"reduce_grad_hidden": False}, "disagree on reduce_grad_hidden"),
    "temperature below 0": ({"temperature": -1.0}, "above 0 and finite"),
    "bad shape": ({"hidden": ones(8, 1, 3)}, "H = 3"),
    "bad dtype of hidden": ({"hidden": ones(8, 1, 4).double()}, "has dtype"),
    "weights elsewhere": ({"token_weights": ones(1, 8).to("meta")}, "token_weights on meta"),
}  # fmt: skip
DISAGREE, CUT = "disagree on labels or teacher", "one cut of the vocabulary|teacher's shard does not fit"
OF_A_TEACHER: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"teacher_hidden": [1.0]}, "teacher_hidden is a list"),
    "a gradient": ({"teacher_hidden": ones(8, 1, 3).requires_grad_()}, "the teacher gets none"),
    "H_t": ({"teacher_hidden": ones(8, 1, 2), "teacher_weight": ones(5, 2)}, DISAGREE),
    "dtype": ({"teacher_hidden": ones(8, 1, 3).half(), "teacher_weight": ones(5, 3).half()}, DISAGREE),
    "divergence": ({"divergence": "jsd"}, DISAGREE),
    "beta": ({"beta": 0.25}, DISAGREE),
    "scale": ({"teacher_logit_scale": 2.0}, DISAGREE),
    "split": ({"teacher_hidden": ones(4, 1, 3), "teacher_sequence_parallel": True}, DISAGREE),
    "labels": ({"labels": ones(1, 8).long()}, "disagree on outputs"),
    "more rows": ({"teacher_weight": ones(6, 3)}, CUT),
}
OF_IDS = {"ids": ({"teacher_ids": [1]}, "must be tensors")}
KINDS = {"loss": OF_A_LOSS, "divergence": OF_A_TEACHER, "top-k": OF_IDS}
DIFFERENCES = {name: (kind, *row) for kind, rows in KINDS.items() for name, row in rows.items()}


def differs(rank: Rank, group: Any, what: str, **everywhere: Any) -> None:
    """The last rank gives it; every rank raises."""
    kind, changes, words = DIFFERENCES[what]
    with pytest.raises((TypeError, ValueError), match=words):
        small_call(rank, group, kind, **{**everywhere, **(changes if is_last(rank) else {})})


@on_ranks(2)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_one_rank_differs(rank: Rank, what) -> None:
    """In a group's first call; in one that knows another head all compare the new one, the bad one too."""
    with fresh_group(rank) as group:
        differs(rank, group, what)
    with fresh_group(rank) as group:
        small_call(rank, group, weight=ones(9, 4))
        differs(rank, group, what)
        small_call(rank, group, DIFFERENCES[what][0])


@on_ranks(2, pytest.param(4, marks=pytest.mark.rest))
@pytest.mark.parametrize("what", ["outputs", "tokens", "bad shape"])
def test_one_rank_differs_later(rank: Rank, what) -> None:
    """In a later call, under debug_checks, which all ranks give."""
    debug = {"config": FusedCEConfig(num_chunks=2, debug_checks=True)}
    with fresh_group(rank) as group:
        small_call(rank, group, **debug)
        differs(rank, group, what, **debug)


@on_ranks(2)
def test_another_teacher_of_one_student(rank: Rank) -> None:
    """A cut that does not fit is found in the call that brings it; other lengths are not compared."""
    with fresh_group(rank) as group:
        small_call(rank, group, "divergence")
        with pytest.raises(ValueError, match="expected one cut of the vocabulary"):
            small_call(rank, group, "divergence", teacher_weight=ones(6, 3))
        with Collectives({group: "tp"}) as seen:
            small_call(rank, group, "divergence", hidden=ones(6, 1, 4), teacher_hidden=ones(6, 1, 3))
        assert [call.name for call in seen.calls] == ["all_gather"] * 2 + ["all_reduce"]


@on_ranks(2)
def test_shards_that_overlap(rank: Rank) -> None:
    with fresh_group(rank) as group, pytest.raises(ValueError, match="overlap"):
        small_call(rank, group, vocab_start=0)


@on_ranks(1, 2)
def test_more_real_tokens_than_rows(rank: Rank) -> None:
    """Five rows a rank."""
    words = f"the vocabulary has {5 * rank.size} rows"
    with fresh_group(rank) as group:
        small_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size))
    with fresh_group(rank) as group, pytest.raises(ValueError, match=words):
        small_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size + 1))


# --- numbers that differ ---------------------------------------------------------------------------

CHECKED = FusedCEConfig(debug_checks=True)


def graded(head: OneHead, differs: bool) -> Any:
    with torch.set_grad_enabled(not differs):
        return head(token_weights=head.grad_loss, config=FusedCEConfig("grad_in_forward"))


def distilled(head: OneHead, **given: Any) -> Any:
    teacher = head.hidden, head.weight
    given = {"labels": head.labels, "tp_group": head.group, **given}
    return fused_linear_distillation(head.hidden, head.weight, *teacher, **given)


@dataclass(frozen=True)
class Shaped(Term):
    """A user's, of a function."""

    shape: Any
    gives = ("at",)

    def value(self, rows: Rows) -> torch.Tensor:
        return rows.loss

    def pull(self, rows: Rows, upstream: Any) -> Pull:
        return Pull(at=upstream)


def power(of: Any) -> Any:
    return lambda x: x**of


def shaped(head: OneHead, shape: Any) -> Any:
    return head(terms=(("loss", Shaped(shape)),))


#: A call, told whether it is to differ on this rank, and what the error says.
DIFFERENT: dict[str, tuple[Any, str]] = {
    "no_grad": (graded, "grad mode: on; off"),
    "a label weight": (lambda head, differs: distilled(head, label_weights=0.7 if differs else 0.5), "0.7"),
    "temperatures": (
        lambda head, differs: token_log_probs(
            head.hidden, head.weight, head.labels, tp_group=head.group, config=CHECKED,
            temperature=torch.ones_like(head.grad_loss) + differs,
        ),
        "numbers in temperature",
    ),
    "label weights": (
        lambda head, differs: distilled(
            head, config=CHECKED, label_weights=torch.ones_like(head.grad_loss) + differs
        ),
        "numbers in label_weights",
    ),
    "several labels": (
        lambda head, differs: token_log_probs(
            head.hidden, head.weight, torch.stack((head.labels, head.labels.roll(int(differs))), 1),
            tp_group=head.group, config=CHECKED,
        ),
        "numbers in labels",
    ),
    "a function within": (
        lambda head, differs: shaped(head, {"of": [power(torch.cos if differs else torch.sin)]}),
        "disagree on terms",
    ),
    "a method": (
        lambda head, differs: shaped(head, (3.0 if differs else 2.0).hex), "disagree on terms"
    ),
    "a closure": (lambda head, differs: shaped(head, power(3 if differs else 2)), "disagree on terms"),
    "a partial": (
        lambda head, differs: shaped(head, partial(power, of=3 if differs else 2)), "disagree on terms"
    ),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_what_one_rank_has_of_its_own_is_named(rank: Rank, what) -> None:
    """On all ranks, whose next call is in step again."""
    made, words = DIFFERENT[what]
    call = OneHead(rank)
    with pytest.raises(RankDisagreement, match=words):
        made(call, is_last(rank))
    made(call, False)


ADDRESSES = {"an object": object(), "a closure": power(object()), "a list": [torch.Generator()]}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ADDRESSES)
def test_what_has_nothing_but_an_address_is_refused(rank: Rank, name) -> None:
    """Over one rank, too; the next call is in step."""
    call = OneHead(rank)
    with pytest.raises(TypeError, match="by its address alone, which ranks cannot compare"):
        shaped(call, ADDRESSES[name])
    shaped(call, max)
