"""Random calls of the head: hypothesis draws what kind of call, a seed fills its tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.scripts.lib.reference import FLOOR, KINDS, HeadInputs, make_inputs, plain_head
from tests.support.losses import assert_within
from tests.support.op import DTYPES, STRATEGIES, Parts, open_main_grad
from tests.support.roundings import Roundings

STRIDES = ("contiguous", "transposed", "columns of more", "every second row", "expanded")


@dataclass(frozen=True)
class DrawnProblem:
    """One call over the whole vocabulary, and how it is cut and laid out."""

    seed: int
    s: int
    b: int
    hidden_size: int
    shards: tuple[int, ...]  # rows of each
    dtype: torch.dtype
    values: str = "plain"
    log2_hidden: int = 0
    log2_weight: int = 0
    labels: str = "any"
    upstream: str = "normal"
    log2_upstream: int = 0
    strides: tuple[str, str, str] = ("contiguous",) * 3  # of hidden, weight, labels and upstream
    flat: bool = False
    int32: bool = False
    temperature: str = ""  # "number", "per token", or none
    grad_weight: str = "returned"  # "frozen", or added to a "main_grad" in fp32, to a "low main_grad"
    sequence_parallel: bool = False
    names_start: bool = False
    log2_promise: int = 0  # what the upstream gradient is times the token weights, negated
    config: FusedCEConfig = field(default_factory=FusedCEConfig)

    def inputs(self, device: torch.device | str = "cpu") -> HeadInputs:
        """Contiguous, over the whole vocabulary; labels as int32 has them, too."""
        vocab = sum(self.shards)
        sizes = {"s": self.s, "b": self.b, "hidden_size": self.hidden_size, "vocab": vocab}
        made = make_inputs(self.values, **sizes, dtype=torch.float32, seed=self.seed)
        generator, shape = torch.Generator().manual_seed(self.seed + 1), made.labels.shape
        largest = torch.finfo(self.dtype).max / 2
        hidden, weight = (
            (x * 2.0**bits).clamp(-largest, largest).to(self.dtype)
            for x, bits in ((made.hidden, self.log2_hidden), (made.weight, self.log2_weight))
        )
        labels, ends = made.labels.clamp(max=2**31 - 1), torch.tensor(self.shards).cumsum(0)
        if self.labels != "any":
            edges = torch.cat((ends - 1, ends[:-1], torch.tensor([0])))
            outside = torch.tensor([-1, -100, vocab, vocab + 1, 2**31 - 1])
            ids = edges if self.labels == "edges" else outside
            labels = ids[torch.randint(0, len(ids), shape, generator=generator)]
        normal = made.grad_loss
        upstream = {
            "normal": normal,
            "mask": (torch.rand(shape, generator=generator) < 0.7).float(),
            "zeros": torch.zeros(shape),
            "equal": torch.ones(shape),
            "uneven": normal * 2.0 ** torch.randint(-12, 13, shape, generator=generator),
        }[self.upstream] * 2.0**self.log2_upstream
        temperature = None
        if self.temperature:
            drawn = torch.rand((1, 1) if self.temperature == "number" else shape, generator=generator)
            temperature = (2 * drawn - 0.7).exp().expand(shape).contiguous().to(device)
        there = (x.to(device) for x in (hidden, weight, labels, upstream))
        return HeadInputs(*there, self.config.logit_scale, self.config, temperature)


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same numbers with other strides; ``expanded`` only where the first two slices are equal."""
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "expanded" and x.shape[0] > 1 and bool((x == x[:1]).all()):
        return x[:1].expand(x.shape)
    room = x.new_full((2 * x.shape[0], *x.shape[1:-1], x.shape[-1] + 3), 7)
    placed = {"columns of more": room[: len(x), ..., 1:-2], "every second row": room[::2, ..., :-3]}.get(how)
    return x.clone() if placed is None else placed.copy_(x)


# --- a call ----------------------------------------------------------------------------------


def loss_of(*args: Any, **options: Any) -> Parts:
    return {"loss": linear_cross_entropy(Call(*args, **options)).loss}


def run(
    problem: DrawnProblem,
    head: Callable[..., Parts] = loss_of,
    upstreams: Parts | None = None,
    inputs: HeadInputs | None = None,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    earlier: float | Tensor = 0.0,
) -> Parts:
    """This rank's part: what the head gives ``[b, s]`` and the gradients of its tokens and rows.

    ``head`` is called like fused_linear_cross_entropy; gives results per token in the labels' shape.
    ``upstreams`` of the results that have one, None for the loss's own; ``inputs`` where they are not the
    problem's; ``earlier``: what a ``main_grad`` has before, of all rows.
    """
    inputs = inputs or problem.inputs()
    upstreams = {"loss": inputs.grad_loss} if upstreams is None else upstreams
    of_hidden, of_weight, of_labels = problem.strides
    options: dict[str, Any] = {"config": problem.config}
    part, start, rows = inputs.hidden, 0, inputs.weight
    if group is not None:
        options |= {"tp_group": group, "sequence_parallel": problem.sequence_parallel}
        start, rows = sum(problem.shards[:rank]), rows.split(problem.shards)[rank]
        if problem.sequence_parallel:
            part = part.chunk(len(problem.shards))[rank]
    hidden = laid_out(part, of_hidden).requires_grad_()
    weight = laid_out(rows, of_weight).requires_grad_(problem.grad_weight != "frozen")
    labels = laid_out(inputs.labels.int() if problem.int32 else inputs.labels, of_labels)
    promised = inputs.grad_loss * -(2.0**-problem.log2_promise)
    given, per_token = hidden, {"token_weights": promised, "temperature": inputs.temperature}
    if problem.flat:
        given, labels = hidden.flatten(0, 1), labels.t().reshape(-1)
        per_token = {name: x if x is None else x.t().flatten() for name, x in per_token.items()}
    if problem.config.strategy not in ("grad_in_forward", "auto") and not problem.config.skip_masked:
        del per_token["token_weights"]
    if problem.temperature == "number":
        per_token["temperature"] = float(inputs.temperature[0, 0])
    options |= {name: x for name, x in per_token.items() if x is not None}
    if problem.names_start:
        options["vocab_start"] = start
    if "main_grad" in problem.grad_weight:
        of = problem.dtype if "low" in problem.grad_weight else torch.float32
        main_grad = torch.zeros_like(inputs.weight, dtype=of).add_(earlier)[start : start + len(rows)].clone()
        options["open_grad_weight"] = functools.partial(open_main_grad, main_grad)
    made = head(given, weight, labels, **options)
    if problem.flat:
        made = {name: value.view(problem.s, problem.b).t() for name, value in made.items()}
    torch.autograd.backward(
        [made[name] for name in upstreams], [laid_out(upstream, of_labels) for upstream in upstreams.values()]
    )
    made = {name: value.detach() for name, value in made.items()} | {"grad_hidden": hidden.grad}
    grad_weight = main_grad if "open_grad_weight" in options else weight.grad
    return made if grad_weight is None else {**made, "grad_weight": grad_weight}


# --- what is held against fp64 ---------------------------------------------------------------


def check(problem: DrawnProblem, result: Parts, evaluate: Callable[..., Parts] | None = None) -> float:
    """Every part of ``result`` `assert_within`, moved roundings among its bounds.

    ``evaluate``: another definition than the loss's, in a dtype, with roundings moved or as they fall (None).
    """
    inputs, dtype = problem.inputs(), problem.dtype
    evaluate = evaluate or (lambda *how: plain_head(inputs, *how)._asdict())
    exact, eager = evaluate(torch.float64, None), evaluate(dtype, None)
    selected, floors = comparable(inputs, result, eager), {}
    for name, select in list(selected.items()):
        true = select(exact[name])
        if not true.numel() or float(true.abs().amax()) > torch.finfo(result[name].dtype).max / 4:
            del selected[name]
        elif name not in ("loss", "grad_hidden", "grad_weight"):
            # Logarithms, whose floor is that of 1.
            floors[name] = FLOOR[dtype] * max(1.0, true.numel() ** 0.5 / (float(true.norm()) or 1.0))

    def of(parts: Parts) -> Parts:
        return {name: select(parts[name]) for name, select in selected.items()}

    @functools.cache
    def drawn(seed: int) -> Parts:
        return of(evaluate(torch.float64, Roundings(inputs, seed, problem.shards)))

    return assert_within(of(result), of(exact), of(eager), dtype, floors, drawn)


def comparable(inputs: HeadInputs, result: Parts, eager: Parts) -> dict[str, Callable[[Tensor], Tensor]]:
    """Of each part the entries that have a right answer.

    A token whose logits the dtype cannot hold, or fp32 once they are scaled (smoothing: summed), has no
    gradient to be held against; its loss is right or not finite, and where eager's is not finite, free (-inf
    is a class that takes no part). For a label outside the vocabulary the loss counts the logits as large as
    the largest: free where rounding decides that.
    """
    options, labels, info = inputs.config, inputs.labels, torch.finfo(inputs.hidden.dtype)
    num_rows = inputs.weight.shape[0]
    logits, scaled = largest_logits(inputs)
    summands = num_rows if options.label_smoothing else 1
    held = (logits < info.max / 2) & (scaled < 2.0**126 / summands)
    outside = (labels < 0) | (labels >= (options.true_vocab_size or num_rows))
    selected: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, value in result.items():
        if not name.startswith("grad"):
            finite, expected = torch.isfinite(value), torch.isfinite(eager[name])
            assert bool((finite | ~held | ~expected).all()), f"{name} is not finite"
            told = finite & (held | expected)
            if name in ("loss", "log_prob"):
                told &= ~(outside & (scaled * info.eps > 1))
            selected[name] = functools.partial(torch.masked_select, mask=told)
        elif holds_gradients(inputs) and name == "grad_hidden":
            selected[name] = lambda grad: grad.transpose(0, 1)[held]
        elif holds_gradients(inputs) and bool(held.all()):
            selected[name] = lambda grad: grad
    return selected


def scale_of(inputs: HeadInputs) -> Tensor:
    """What a logit is multiplied by, in size: of each token ``[b, s]``, or one number."""
    temperature = 1.0 if inputs.temperature is None else inputs.temperature.double()
    return torch.as_tensor(abs(inputs.logit_scale) / temperature)


def largest_logits(inputs: HeadInputs) -> Tensor:
    """Of each token ``[b, s]``, before and after scale and temperature ``[2, b, s]``; fp64."""
    logits = (inputs.hidden.double() @ inputs.weight.double().t()).abs().amax(-1).t()
    return torch.stack((logits, logits * scale_of(inputs)))


def holds_gradients(inputs: HeadInputs) -> bool:
    """Whether there is room for what is on the way to the gradients (docs/math.md, Precision)."""
    options = inputs.config
    largest = float(inputs.weight.abs().max())
    scale = max(1.0, float(scale_of(inputs).max()))
    upstream = float(inputs.grad_loss.abs().max()) * scale
    waits = options.strategy in ("grad_in_forward", "auto")
    lse = float(largest_logits(inputs)[1].max()) + math.log(inputs.weight.shape[0])
    if inputs.hidden.dtype != torch.float16:
        # Shards' parts, which may cancel; eager's are of upstream gradients of about 1.
        summed = inputs.labels.numel() * float(inputs.hidden.abs().max())
        factor = (1 + 2 * options.z_loss * lse) * max(upstream, float(waits))
        return factor * scale * max(largest, summed) < 2.0**126
    fits = 2 * upstream * largest < 2.0**14 and (largest <= 2.0**8 or not waits)
    return fits and 2 * options.z_loss * min(lse, options.logit_softcap or lse) <= 2


# --- what hypothesis draws -------------------------------------------------------------------

#: Mostly 0; then towards where numbers vanish and where they overflow.
LOG2 = st.just(0) | st.integers(-8, 8) | st.sampled_from((-140, -100, -24, 15, 40, 62))


@st.composite
def problems(draw: Any, max_shards: int = 1) -> DrawnProblem:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    num_shards = draw(st.integers(min(2, max_shards), max_shards))
    rows = st.integers(1, 24) | st.just(1) | st.integers(60, 150)  # 1 is the second most likely
    shards = tuple(draw(rows) for _ in range(num_shards))
    sequence_parallel = num_shards > 1 and draw(st.booleans())
    classes, chunks = draw(st.integers(1, sum(shards))), draw(st.integers(1, 30))
    masked = one(False, False, True)
    config = FusedCEConfig(
        strategy=one(*STRATEGIES, "auto"),
        **one({}, {"num_chunks": chunks}, {"chunk_tokens": chunks}),
        z_loss=one(0.0, 0.0, 1e-4, 1e-2),
        logit_softcap=one(None, None, None, 0.5, 5.0, 30.0),
        true_vocab_size=classes if masked else None,
        label_smoothing=one(0.0, 0.0, 0.1, 0.5) if (classes if masked else sum(shards)) > 1 else 0.0,
        label_smoothing_form=one("megatron", "pytorch"),
        ignore_index=one(None, None, None, -100, -1, 0, sum(shards) - 1),
        logit_scale=one(1.0, 1.0, 0.25, -1.5, 2.0**-20),
        merge=one("packed", "all_reduce"),
        debug_checks=len(set(shards)) > 1,
    )
    return DrawnProblem(
        seed=draw(st.integers(0, 10**6)),
        s=draw(st.integers(1, 12)) * (num_shards if sequence_parallel else 1),
        b=draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 24)),
        shards=shards,
        dtype=one(*DTYPES),
        values=one(*KINDS),
        log2_hidden=draw(LOG2),
        log2_weight=draw(LOG2),
        labels=one("any", "edges", "outside"),
        upstream=one("normal", "mask", "zeros", "equal", "uneven"),
        # Not below fp32's normal numbers: eager's check calls that nothing.
        log2_upstream=draw(LOG2.filter(lambda bits: bits > -126)),
        strides=(one(*STRIDES), one(*STRIDES), one(*STRIDES)),
        flat=draw(st.booleans()),
        int32=draw(st.booleans()),
        temperature=one("", "", "number", "per token"),
        grad_weight=one("returned", "main_grad", "low main_grad"),
        sequence_parallel=sequence_parallel,
        names_start=draw(st.booleans()),
        log2_promise=one(0, 0, 16, -24),
        config=config,
    )
