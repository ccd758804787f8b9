"""What log-probabilities for RL cost: beside verl's kernel, of several labels, and over the ids kept.

`python -m scripts.bench --preset rl`. Before anything is timed each row's outputs and gradients are compared
with their definition in fp64 on some of the tokens; ours may have twice eager PyTorch's error, or `FLOOR`.
Times and peaks are taken as for the other presets (measure.py). Gradients end in ``.grad``, in the operands'
dtype.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.loss import TokenLogProbs
from megatron_fused_ce.rl import masked_token_log_probs, token_log_probs
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.measure import (
    Outcome,
    Settings,
    WrongVariant,
    attempt,
    measure_peak,
    measure_times,
    rounded,
    say,
    turn,
)
from megatron_fused_ce.scripts.bench.peers import one_line, verl_linear_cross_entropy
from megatron_fused_ce.scripts.bench.problem import DTYPES, MIB, Problem, World
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import Variant, config_of
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from megatron_fused_ce.scripts.lib.results import Row

TEMPERATURE = 0.7
KEPT = (16, 512)
SEVERAL = (64, 1024)
PRODUCT, VERL, FORWARD = "product", "verl", ", forward only"
#: Tokens of a block of the bare product: its logits are not kept.
PRODUCT_TOKENS = 8192


class Inputs:
    """What a problem of RL has beside its operands; random, nothing in it repeats."""

    def __init__(self, problem: Problem, vocab: int) -> None:
        T, device = problem.num_tokens, problem.labels.device
        generator = torch.Generator(device=device).manual_seed(5)
        self.temperatures = 0.5 + torch.rand(1, T, generator=generator, device=device)
        self.of_log_prob = torch.randn(T, generator=generator, device=device)
        self.of_entropy = 0.1 * torch.randn(T, generator=generator, device=device)
        self._order = torch.randperm(vocab, generator=generator, device=device)
        self._start = torch.randint(vocab, (T, 1), generator=generator, device=device)

        self._of_labels: dict[int, tuple[Tensor, Tensor]] = {}

    def kept(self, count: int) -> Tensor:
        """``[T, count]`` ids, different ones for a token; its label is the first."""
        places = self._start + torch.arange(count, device=self._start.device)
        return self._order[places % len(self._order)]

    def several(self, count: int) -> tuple[Tensor, Tensor]:
        """Labels ``[T, count]`` and their upstream gradients, made once."""
        if count not in self._of_labels:
            labels = self.kept(count)
            generator = torch.Generator(device=labels.device).manual_seed(count)
            upstream = torch.randn(labels.shape, generator=generator, device=labels.device)
            self._of_labels[count] = labels, upstream
        return self._of_labels[count]


#: Makes both outputs with their graph; the row's gradients are on or off around it.
Made = Callable[[Problem, Inputs], TokenLogProbs]


@dataclass(frozen=True)
class Case:
    """One row. ``made`` None: the product alone, or ``why_not``."""

    name: str
    made: Made | None
    is_ours: bool = True
    backward: bool = True
    entropy_grad: bool = False
    per_token: bool = False  # its temperature
    kept: int = 0
    several: int = 0
    why_not: str | None = None

    def step(self, inputs: Inputs, problem: Problem, mark: Callable[[], None]) -> Tensor:
        problem.reset()
        mark()
        with torch.set_grad_enabled(self.backward):
            if self.made is None:
                found = _product(problem)
                self._two(mark)
                return found
            made = self.made(problem, inputs)
        if not self.backward:
            self._two(mark)
            return made.log_prob
        of_log_prob = self.upstream(inputs)
        outputs, grads = [made.log_prob.view(of_log_prob.shape)], [of_log_prob]
        if self.entropy_grad:
            assert made.entropy is not None
            outputs, grads = [*outputs, made.entropy.flatten()], [*grads, inputs.of_entropy]
        mark()
        torch.autograd.backward(outputs, grads)
        mark()
        return made.log_prob.detach()

    def upstream(self, inputs: Inputs) -> Tensor:
        return inputs.several(self.several)[1] if self.several else inputs.of_log_prob

    @staticmethod
    def _two(mark: Callable[[], None]) -> None:
        mark()
        mark()


def _product(problem: Problem) -> Tensor:
    T, V = problem.num_tokens, problem.num_rows
    size = min(T, PRODUCT_TOKENS)
    out = problem.hidden.new_empty(size, V)
    for start in range(0, T, size):
        part = problem.hidden[start : start + size]
        torch.mm(part, problem.weight.t(), out=out[: len(part)])
    return out


def _ours(strategy: str, entropy: str, memory_mb: int | None, per_token: bool = False) -> Made:
    config = config_of(strategy, **({"memory_mb": memory_mb} if strategy == "auto" else {}))

    def made(problem: Problem, inputs: Inputs) -> TokenLogProbs:
        return token_log_probs(
            problem.hidden.unsqueeze(1),
            problem.weight,
            problem.labels.unsqueeze(0),
            temperature=inputs.temperatures if per_token else TEMPERATURE,
            entropy=entropy,
            config=config,
        )

    return made


def _masked(count: int) -> Made:
    def made(problem: Problem, inputs: Inputs) -> TokenLogProbs:
        kept = inputs.kept(count)
        return masked_token_log_probs(
            problem.hidden.unsqueeze(1),
            problem.weight,
            kept[:, 0].unsqueeze(0),
            kept.flatten(),
            torch.arange(len(kept) + 1, device=kept.device) * count,
            temperature=TEMPERATURE,
            entropy="differentiable",
        )

    return made


def _several(count: int, strategy: str) -> Made:
    config = config_of(strategy)

    def made(problem: Problem, inputs: Inputs) -> TokenLogProbs:
        labels, _ = inputs.several(count)
        return token_log_probs(
            problem.hidden.unsqueeze(1),
            problem.weight,
            labels.unsqueeze(0),
            temperature=TEMPERATURE,
            config=config,
        )

    return made


def _verl() -> tuple[Made | None, str | None]:
    if not torch.cuda.is_available():
        return None, "needs a CUDA device"
    try:
        function: Any = verl_linear_cross_entropy()
    except Exception as error:  # whatever a foreign library raises at import
        return None, one_line(error)

    def made(problem: Problem, inputs: Inputs) -> TokenLogProbs:
        return TokenLogProbs(
            *function(problem.hidden, problem.weight, problem.labels, TEMPERATURE, "none", None)
        )

    return made, None


def cases_of(strategies: Sequence[str], vocab: int, memory_mb: int | None = None) -> list[Case]:
    """``auto`` within ``memory_mb``."""
    verl, why_not = _verl()
    found = [
        Case(PRODUCT, None, is_ours=False, backward=False),
        Case(VERL, verl, is_ours=False, entropy_grad=True, why_not=why_not),
        Case(VERL + FORWARD, verl, is_ours=False, backward=False, why_not=why_not),
        Case("entropy" + FORWARD, _ours(strategies[0], "detached", memory_mb), backward=False),
    ]
    for name in strategies:
        found += [
            Case(f"log-probability, {name}", _ours(name, "none", memory_mb)),
            Case(f"entropy, {name}", _ours(name, "detached", memory_mb)),
        ]
        made = _ours(name, "differentiable", memory_mb)
        found.append(Case(f"entropy with gradient, {name}", made, entropy_grad=True))
    made = _ours(strategies[0], "differentiable", memory_mb, per_token=True)
    name = f"temperature per token, {strategies[0]}"
    found.append(Case(name, made, entropy_grad=True, per_token=True))
    for k in SEVERAL:
        if k <= vocab:
            found += [
                Case(f"{k} labels, {each}", _several(k, each), several=k)
                for each in strategies
                if each in ("store", "recompute")
            ]
    masks = [k for k in KEPT if k <= vocab]
    return found + [Case(f"{k} kept ids", _masked(k), entropy_grad=True, kept=k) for k in masks]


# --- checks ----------------------------------------------------------------------------------


def plain(case: Case, problem: Problem, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The definition in plain PyTorch: the row's outputs and gradients, by name."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (problem.hidden, problem.weight))
    z = (hidden @ weight.t()).to(torch.promote_types(dtype, torch.float32))
    z = z / (inputs.temperatures.to(z.dtype).t() if case.per_token else TEMPERATURE)
    labels = problem.labels.unsqueeze(1)
    if case.kept:
        z, labels = z.gather(1, inputs.kept(case.kept)), torch.zeros_like(labels)
    log_p = z.log_softmax(-1)
    of_log_prob = case.upstream(inputs)
    labels = inputs.several(case.several)[0] if case.several else labels
    log_prob, entropy = log_p.gather(1, labels).view(of_log_prob.shape), -(log_p.exp() * log_p).sum(-1)
    found = {"log_prob": log_prob.detach(), "entropy": entropy.detach()}
    if case.backward:
        total = (log_prob * of_log_prob).sum()
        if case.entropy_grad:
            total = total + (entropy * inputs.of_entropy).sum()
        total.backward()
        assert hidden.grad is not None and weight.grad is not None
        found |= {"grad_hidden": hidden.grad, "grad_weight": weight.grad}
    return found


def errors(
    case: Case, problem: Problem, inputs: Inputs, true: dict[str, Tensor], eager: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Of each output and gradient: norm-relative error, and what ours may have beside plain PyTorch's."""
    assert case.made is not None
    problem.reset()
    with torch.set_grad_enabled(case.backward):
        made = case.made(problem, inputs)
        if case.backward:
            of_log_prob = case.upstream(inputs)
            total = (made.log_prob.view(of_log_prob.shape) * of_log_prob).sum()
            if case.entropy_grad and made.entropy is not None:
                total = total + (made.entropy.flatten() * inputs.of_entropy).sum()
            total.backward()  # type: ignore[no-untyped-call]
    found = {"log_prob": made.log_prob, "entropy": made.entropy}
    found |= {"grad_hidden": problem.hidden.grad, "grad_weight": problem.weight.grad}
    result = {}
    for name, exact in true.items():
        value = found[name]
        if value is None and name == "entropy":
            continue  # not asked for
        assert value is not None, f"{name} did not arrive"
        error = relative_error(value.detach().view(exact.shape), exact)
        result[name] = (error, max(FLOOR[problem.dtype], 2 * eager[name]))
    problem.reset()
    return result


def check(cases: list[Case], cell: Cell, given: argparse.Namespace, world: World) -> dict[str, Row]:
    """What is known of each row before it is timed. Raises ArithmeticError where ours is wrong."""
    tokens = min(cell.num_tokens, given.check_tokens)
    problem = _problem(cell, given, world, tokens)
    inputs = Inputs(problem, cell.vocab)
    rows: dict[str, Row] = {}
    true: dict[str, Tensor] = {}
    eager: dict[str, float] = {}
    kind: tuple[Any, ...] | None = None
    for case in cases:
        row: Row = {"error": case.why_not}
        if case.made is not None:
            if kind != (kind := (case.backward, case.entropy_grad, case.per_token, case.kept, case.several)):
                true.clear()  # the weight's gradient in fp64 is large: one at a time
                true = plain(case, problem, inputs, torch.float64)
                rough = plain(case, problem, inputs, problem.dtype)
                eager = {name: relative_error(rough.pop(name), exact) for name, exact in true.items()}
            found, why_not = attempt(partial(errors, case, problem, inputs, true, eager), world)
            row["error"] = why_not
            if why_not is None:
                row["errors"] = {name: error for name, (error, _) in found.items()}
                wrong = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
                if case.is_ours and wrong:
                    raise ArithmeticError(f"{case.name}: (error, bound) {wrong}")
            elif case.is_ours:
                raise ArithmeticError(f"{case.name}: {why_not}")
        rows[case.name] = row
    return rows


# --- times -----------------------------------------------------------------------------------


def _problem(cell: Cell, given: argparse.Namespace, world: World, tokens: int) -> Problem:
    return Problem(
        world,
        num_tokens=tokens,
        hidden_size=cell.hidden_size,
        vocab=cell.vocab,
        dtype=DTYPES[given.dtype],
        wgrad_accumulator="returned",
    )


def measure(given: argparse.Namespace, cell: Cell, world: World, started: float) -> list[Row]:
    cases = cases_of(given.strategies, cell.vocab, given.memory_mb)
    if given.options:
        cases = [case for case in cases if case.name in (PRODUCT, *given.options)]
    rows = check(cases, cell, given, world)
    problem = _problem(cell, given, world, cell.num_tokens)
    inputs = Inputs(problem, cell.vocab)
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        rows[case.name] |= {"shape": cell.shape, "tokens": cell.num_tokens, "variant": case.name}
        variant = Variant(case.name, "ours" if case.is_ours else "peer", partial(case.step, inputs))
        outcome = outcomes[case.name] = Outcome(variant, rows[case.name]["error"])
        for step in (
            partial(turn, variant, problem, world, 1, 1),
            partial(measure_peak, outcome, problem, world),
        ):
            if outcome.reason is None:  # the first compiles
                _, outcome.reason = attempt(step, world)
        if outcome.peak_mib is not None and not case.backward:
            outcome.peak_mib += problem.output_bytes() / MIB  # no gradients, so none to leave out
    settings = Settings(blocks=given.blocks, sample_ms=given.sample_ms, seed=given.seed)
    settings = replace(settings, deadline=started + given.time_limit)
    measure_times(outcomes, {}, Roof(problem, world), problem, settings, world)
    for name, outcome in outcomes.items():
        rows[name]["error"] = outcome.reason
        if outcome.reason is None:
            forward, backward, time_ms = (statistics.median(ms) for ms in zip(*outcome.samples, strict=True))
            totals = [sample[-1] for sample in outcome.samples]
            rows[name] |= {
                "forward_ms": rounded(forward, 3),
                "backward_ms": rounded(backward, 3),
                "time_ms": rounded(time_ms, 3),
                "spread": rounded((max(totals) - min(totals)) / time_ms, 4),
                "peak_mib": rounded(outcome.peak_mib, 1),
                "host_ms": rounded(statistics.median(outcome.host), 3),
                "blocks": len(totals),
            }
    for case in cases:
        row, beside = rows[case.name], rows.get(VERL if case.backward else VERL + FORWARD, {})
        for key, other in (("ratio", rows[PRODUCT]), ("over_verl", beside)):
            own, its = row.get("time_ms"), other.get("time_ms")
            row[key] = None if own is None or its is None else round(own / its, 4)
    return [rows[case.name] for case in cases]


def table(rows: list[Row]) -> str:
    head = ["shape", "tokens", "row", "forward ms", "backward ms", "ms", "over verl", "over one product"]
    head += ["spread", "peak MiB", "largest error"]
    lines = []
    for row in rows:
        found: Any = row["error"]
        if found is None:
            found = format(max(row["errors"].values()), ".1e") if "errors" in row else ""
        forms = {"forward_ms": ".2f", "backward_ms": ".2f", "time_ms": ".2f", "over_verl": ".3f"}
        forms |= {"ratio": ".3f", "spread": ".3f", "peak_mib": ".0f"}
        values = [tables.cell(row.get(key), form, "") for key, form in forms.items()]
        lines.append([row["shape"], row["tokens"], row["variant"], *values, found])
    return tables.markdown(head, lines, left=3) + "\n"


def run(given: argparse.Namespace, world: World, source: Row, started: float) -> int:
    """`--preset rl`: what the command line asks for, on one rank."""
    known = [case.name for case in cases_of(given.strategies, max(*KEPT, *SEVERAL))]
    if unknown := set(given.options or ()) - set(known):
        raise UsageError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if world.size > 1:
        raise UsageError("--preset rl knows no tensor parallelism: leave out --tp")
    rows: list[Row] = []
    for cell in given.cells:
        try:
            found = measure(given, cell, world, started)
        except (ArithmeticError, WrongVariant) as wrong:
            say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        rows += found
        print(table(found), flush=True)
        if given.path:
            results.write(given.path, rows, source)
            head = f"# Log-probabilities for RL\n\n{source['device']}, commit {source['commit']}.\n\n"
            results.write_whole(given.path.with_suffix(".md"), head + table(rows))
            print(f"written: {given.path}")
    return 0
