"""Random calls of the head: hypothesis draws what kind of call, a seed fills its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight
from megatron_fused_ce.scripts.lib.reference import FLOOR, KINDS, HeadInputs, make_inputs, relative_error
from tests.support.op import DTYPES
from tests.support.ranks import Rank, Ranks, outcomes, results
from tests.support.roundings import Roundings

LABELS = ("any", "one", "edges", "outside")
UPSTREAMS = ("normal", "mask", "one token", "zeros", "equal", "uneven")
STRATEGIES = ("store", "grad_in_forward", "recompute", "auto")
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
    main_grad: str = ""  # grad_weight is added to one, in fp32 or in the operands' dtype
    sequence_parallel: bool = False
    names_start: bool = False
    log2_promise: int = 0  # what the upstream gradient is times the token weights, negated
    config: FusedCEConfig = field(default_factory=FusedCEConfig)

    @property
    def vocab(self) -> int:
        return sum(self.shards)

    def inputs(self) -> HeadInputs:
        """Contiguous, over the whole vocabulary."""
        sizes = {"s": self.s, "b": self.b, "hidden_size": self.hidden_size, "vocab": self.vocab}
        made = make_inputs(self.values, **sizes, dtype=torch.float32, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed + 1)
        largest = torch.finfo(self.dtype).max / 2
        hidden, weight = (
            (x * 2.0**bits).clamp(-largest, largest).to(self.dtype)
            for x, bits in ((made.hidden, self.log2_hidden), (made.weight, self.log2_weight))
        )
        labels, upstream = self._labels(made.labels, generator), self._upstream(made.grad_loss, generator)
        temperature = None
        if self.temperature:
            drawn = torch.rand((1, 1) if self.temperature == "number" else labels.shape, generator=generator)
            temperature = (2 * drawn - 0.7).exp().expand(labels.shape).contiguous()
        upstream = upstream * 2.0**self.log2_upstream
        return HeadInputs(hidden, weight, labels, upstream, self.config.logit_scale, self.config, temperature)

    def token_weights(self, inputs: HeadInputs) -> Tensor:
        """What ``grad_in_forward`` is promised."""
        return inputs.grad_loss * -(2.0**-self.log2_promise)

    def _labels(self, drawn: Tensor, generator: torch.Generator) -> Tensor:
        """As int32 has them, too."""
        firsts = torch.tensor(self.shards).cumsum(0)
        ids = {
            "one": drawn.flatten()[:1],
            "edges": torch.cat((firsts - 1, firsts[:-1], torch.tensor([0]))),
            "outside": torch.tensor([-1, -100, self.vocab, self.vocab + 1, 2**31 - 1]),
        }.get(self.labels, drawn.flatten())
        if self.labels != "any":
            drawn = ids[torch.randint(0, len(ids), drawn.shape, generator=generator)]
        return drawn.clamp(max=2**31 - 1)

    def _upstream(self, normal: Tensor, generator: torch.Generator) -> Tensor:
        one = torch.zeros_like(normal)
        one.view(-1)[self.seed % one.numel()] = 1.5
        return {
            "normal": normal,
            "mask": (torch.rand(normal.shape, generator=generator) < 0.7).float(),
            "one token": one,
            "zeros": torch.zeros_like(normal),
            "equal": torch.ones_like(normal),
            "uneven": normal * 2.0 ** torch.randint(-12, 13, normal.shape, generator=generator),
        }[self.upstream]


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same numbers with other strides; ``expanded`` only where the first two slices are equal."""
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "columns of more":
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 7.0 if x.is_floating_point() else 7)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if how == "every second row":
        tall = x.new_full((2 * x.shape[0], *x.shape[1:]), 7)
        tall[::2] = x
        return tall[::2]
    if how == "expanded" and x.shape[0] > 1 and bool((x == x[:1]).all()):
        return x[:1].expand(x.shape)
    return x.clone()


# --- a call ----------------------------------------------------------------------------------

#: Results by name: ``grad_hidden``, ``grad_weight``, and per token ``[b, s]`` whatever else.
Parts = dict[str, Tensor]
#: Called like fused_linear_cross_entropy; gives results per token in the labels' shape.
HeadFunction = Callable[..., Parts]


def run(
    problem: DrawnProblem,
    head: HeadFunction,
    upstreams: Parts | None = None,
    inputs: HeadInputs | None = None,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Parts:
    """This rank's part: what the head gives ``[b, s]`` and the gradients of its tokens and rows.

    ``upstreams`` of the results that have one, None for the loss's own; ``inputs`` where they are not the
    problem's.
    """
    inputs = inputs or problem.inputs()
    size = len(problem.shards) if group is not None else 1
    of_hidden, of_weight, of_labels = problem.strides
    hidden = inputs.hidden.chunk(size if problem.sequence_parallel else 1)
    hidden = laid_out(hidden[rank if problem.sequence_parallel else 0], of_hidden).requires_grad_()
    rows = inputs.weight.split(problem.shards if size > 1 else problem.vocab)
    weight = laid_out(rows[rank], of_weight).requires_grad_()
    labels = laid_out(inputs.labels.int() if problem.int32 else inputs.labels, of_labels)
    weights, given, temperature = problem.token_weights(inputs), hidden, inputs.temperature
    if problem.flat:
        given, labels, weights = hidden.flatten(0, 1), labels.t().reshape(-1), weights.t().flatten()
        temperature = None if temperature is None else temperature.t().flatten()
    options: dict[str, Any] = {"config": problem.config}
    if temperature is not None:
        one_number = problem.temperature == "number"
        options["temperature"] = float(temperature.flatten()[0]) if one_number else temperature
    if size > 1:
        options |= {"tp_group": group, "sequence_parallel": problem.sequence_parallel}
    if problem.names_start:
        options["vocab_start"] = sum(problem.shards[:rank]) if size > 1 else 0
    if problem.config.strategy in ("grad_in_forward", "auto"):
        options["token_weights"] = weights
    main_grad = None
    if problem.main_grad:
        dtype = torch.float32 if problem.main_grad == "fp32" else problem.dtype
        main_grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        options["open_grad_weight"] = partial(open_main_grad, main_grad)
    made = head(given, weight, labels, **options)
    if problem.flat:
        made = {name: value.view(problem.s, problem.b).t() for name, value in made.items()}
    upstreams = {"loss": inputs.grad_loss} if upstreams is None else upstreams
    torch.autograd.backward(
        [made[name] for name in upstreams], [laid_out(upstream, of_labels) for upstream in upstreams.values()]
    )
    grad_weight = weight.grad if main_grad is None else main_grad
    assert hidden.grad is not None and grad_weight is not None
    made = {name: value.detach() for name, value in made.items()}
    return {**made, "grad_hidden": hidden.grad, "grad_weight": grad_weight}


def loss_of(*args: Any, **options: Any) -> Parts:
    return {"loss": linear_cross_entropy(Call(*args, **options)).loss}


def run_part(rank: Rank, problem: DrawnProblem) -> dict[str, Any]:
    """This rank's part of the loss and gradients, to be sent."""
    made = run(problem, loss_of, rank=rank.rank, group=rank.group)
    # As arrays: a tensor would travel as a file descriptor.
    return {name: (value.dtype, value.float().numpy()) for name, value in made.items()}


def run_on_shards(problem: DrawnProblem) -> Parts:
    """The whole result of a problem, each shard on a rank of its own."""
    sent = results(outcomes(Ranks(len(problem.shards)), run_part, problem))
    return joined(problem, [
        {name: torch.from_numpy(array).to(dtype) for name, (dtype, array) in part.items()} for part in sent
    ])  # fmt: skip


def joined(problem: DrawnProblem, received: list[Parts]) -> Parts:
    """The whole result of the ranks' parts; what all ranks have is equal."""
    first, *others = received
    whole = ["loss"] if problem.sequence_parallel else ["loss", "grad_hidden"]
    for name in whole:
        for other in others:
            assert same_bits(first[name], other[name]), f"the ranks' {name} differs"
    parts = {name: [one[name] for one in received] for name in ("grad_hidden", "grad_weight", "loss")}
    cut = {name: torch.cat(values) for name, values in parts.items() if name not in whole}
    return {**{name: first[name] for name in whole}, **cut}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN too is equal to itself."""
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


def open_main_grad(main_grad: Tensor, weight: Tensor, num_gemms: int, scaled: bool) -> InPlaceGradWeight:
    return InPlaceGradWeight(main_grad, scaled, lambda: None)


# --- what is held against fp64 ---------------------------------------------------------------

#: Evaluates the definition: in a dtype, with roundings moved at random or as they fall.
Evaluate = Callable[[torch.dtype, Roundings | None], Parts]
#: Draws of roundings: the first number, and more where the error is above what they allow.
DRAWS = (8, 64, 512)


def check(problem: DrawnProblem, result: Parts, evaluate: Evaluate) -> float:
    """Every part within the bound of its dtype; gives the largest error over its bound.

    The bound is the one of every test: twice eager PyTorch's error or the dtype's floor. Where a problem is
    so small that eager's error is luck, twice the largest error of some draws of the roundings that the
    definition has in that dtype.
    """
    inputs, dtype = problem.inputs(), problem.dtype
    exact, eager = evaluate(torch.float64, None), evaluate(dtype, None)
    drawn: list[Parts] = []
    worst = 0.0
    for name, select in comparable(inputs, result, eager).items():
        value, true, yardstick = (select(parts[name]) for parts in (result, exact, eager))
        if not value.numel() or float(true.abs().amax()) > torch.finfo(value.dtype).max / 4:
            continue
        error, of_eager = relative_error(value, true), relative_error(yardstick, true)
        bound = max(2 * of_eager if math.isfinite(of_eager) else 0.0, floor(name, true, dtype))
        if not error <= bound:
            for seed in range(DRAWS[-1]):
                if seed in DRAWS and error <= bound:
                    break
                if seed == len(drawn):
                    roundings = Roundings(inputs, seed, problem.shards)
                    drawn.append(evaluate(torch.float64, roundings))
                bound = max(bound, 2 * relative_error(select(drawn[seed][name]), true))
        if error > bound >= 1:  # zeros would pass: the roundings leave no digit
            assert value.isfinite().all()
            continue
        assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"
        worst = max(worst, error / bound)
    return worst


def floor(name: str, true: Tensor, dtype: torch.dtype) -> float:
    """The dtype's; log-probabilities and their like are logarithms, and their floor is that of 1."""
    if name in ("loss", "grad_hidden", "grad_weight"):
        return FLOOR[dtype]
    return FLOOR[dtype] * max(1.0, true.numel() ** 0.5 / (float(true.norm()) or 1.0))


def comparable(inputs: HeadInputs, result: Parts, eager: Parts) -> dict[str, Callable[[Tensor], Tensor]]:
    """Of each part the entries that have a right answer.

    A token whose logits the dtype cannot hold has no gradient to be held against; its loss is right or not
    finite, and where eager's is not finite, free (-inf is a class that takes no part). For a label outside
    the vocabulary the loss counts the logits as large as the largest: free where rounding decides that.
    """
    held = holds_logits(inputs)
    selected: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, value in result.items():
        if not name.startswith("grad"):
            finite = torch.isfinite(value)
            expected = held & torch.isfinite(eager[name])
            assert bool((finite | ~expected).all()), f"{name} is not finite"
            told = finite & (held | torch.isfinite(eager[name]))
            if name in ("loss", "log_prob"):
                told &= ~_ties_by_rounding(inputs)
            selected[name] = partial(torch.masked_select, mask=told)
        elif holds_gradients(inputs) and name == "grad_hidden":
            selected[name] = lambda grad: grad.transpose(0, 1)[held]
        elif holds_gradients(inputs) and bool(held.all()):
            selected[name] = lambda grad: grad
    return selected


def _ties_by_rounding(inputs: HeadInputs) -> Tensor:
    """Tokens ``[b, s]`` with a label that is no class and logits that are rounded by 1 or more."""
    num_classes = inputs.config.true_vocab_size or inputs.weight.shape[0]
    outside = (inputs.labels < 0) | (inputs.labels >= num_classes)
    _, scaled = largest_logits(inputs)
    return outside & (scaled * torch.finfo(inputs.hidden.dtype).eps > 1)


def largest_logits(inputs: HeadInputs) -> Tensor:
    """Of each token ``[b, s]``, before and after scale and temperature ``[2, b, s]``; fp64."""
    logits = (inputs.hidden.double() @ inputs.weight.double().t()).abs().amax(-1).t()
    return torch.stack((logits, logits * abs(inputs.logit_scale) * _inv_temperature(inputs)))


def _inv_temperature(inputs: HeadInputs) -> Tensor:
    """``[b, s]``, or 1."""
    return torch.ones(()) if inputs.temperature is None else inputs.temperature.double().reciprocal()


def holds_logits(inputs: HeadInputs) -> Tensor:
    """Tokens ``[b, s]`` whose logits are finite in their dtype and, scaled (smoothing: summed), in fp32."""
    logits, scaled = largest_logits(inputs)
    summands = inputs.weight.shape[0] if inputs.config.label_smoothing else 1
    return (logits < torch.finfo(inputs.hidden.dtype).max / 2) & (scaled < 2.0**126 / summands)


def holds_gradients(inputs: HeadInputs) -> bool:
    """Whether there is room for what is on the way to the gradients (docs/math.md, Precision)."""
    options = inputs.config
    largest = float(inputs.weight.abs().max())
    scale = abs(inputs.logit_scale) * float(_inv_temperature(inputs).max())
    upstream = float(inputs.grad_loss.abs().max()) * max(1.0, scale)
    waits = options.strategy in ("grad_in_forward", "auto")
    lse = float(largest_logits(inputs)[1].max()) + math.log(inputs.weight.shape[0])
    if inputs.hidden.dtype != torch.float16:
        # Shards' parts, which may cancel; eager's are of upstream gradients of about 1.
        summed = inputs.labels.numel() * float(inputs.hidden.abs().max())
        factor = (1 + 2 * options.z_loss * lse) * max(upstream, float(waits))
        return factor * max(1.0, scale) * max(largest, summed) < 2.0**126
    fits = 2 * upstream * largest < 2.0**14 and (largest <= 2.0**8 or not waits)
    return fits and 2 * options.z_loss * min(lse, options.logit_softcap or lse) <= 2


# --- what hypothesis draws -------------------------------------------------------------------

#: Mostly 0; then towards where numbers vanish and where they overflow.
LOG2 = st.just(0) | st.integers(-8, 8) | st.sampled_from((-140, -100, -24, 15, 40, 62))
#: Of shards; one-token shards are the second most likely.
ROWS = st.integers(1, 24) | st.just(1) | st.integers(60, 150)


@st.composite
def problems(draw: Any, max_shards: int = 1) -> DrawnProblem:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    num_shards = draw(st.integers(min(2, max_shards), max_shards))
    shards = tuple(draw(ROWS) for _ in range(num_shards))
    sequence_parallel = num_shards > 1 and draw(st.booleans())
    classes, chunks = draw(st.integers(1, sum(shards))), draw(st.integers(1, 30))
    masked = one(False, False, True)
    config = FusedCEConfig(
        strategy=one(*STRATEGIES),
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
        labels=one(*LABELS),
        upstream=one(*UPSTREAMS),
        # Not below fp32's normal numbers: eager's check calls that nothing.
        log2_upstream=draw(LOG2.filter(lambda bits: bits > -126)),
        strides=(one(*STRIDES), one(*STRIDES), one(*STRIDES)),
        flat=draw(st.booleans()),
        int32=draw(st.booleans()),
        temperature=one("", "", "number", "per token"),
        main_grad=one("", "fp32", "low"),
        sequence_parallel=sequence_parallel,
        names_start=draw(st.booleans()),
        log2_promise=one(0, 0, 16, -24),
        config=config,
    )
