"""The sweep through Megatron-LM: one short launch of a real pretraining script for every cell."""

from __future__ import annotations

import platform
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.lib.launches import (
    NO_FUSED_WGRAD,
    REFERENCE,
    YARDSTICK,
    Case,
    Checkout,
    Run,
    refuse_shared_folders,
    split_plugin_words,
)
from megatron_fused_ce.scripts.lib.launches import (
    STOCK as STOCK_FLAGS,
)
from megatron_fused_ce.scripts.lib.logs import Figures
from megatron_fused_ce.scripts.lib.losses import (
    FP32_LOSS_BOUNDS,
    LOSS_BOUNDS,
    YARDSTICK_FACTOR,
    loss_difference,
)
from megatron_fused_ce.scripts.lib.results import version
from megatron_fused_ce.scripts.runs.sweep_rows import (
    AUTO,
    OK,
    OUT_OF_MEMORY,
    PRETRAIN,
    STOCK,
    Cell,
    State,
    source_digest,
)
from megatron_fused_ce.testing.provenance import commit

_SWEPT = (
    FLAG,
    "--fused-ce-strategy",
    "--fused-ce-num-chunks",
    "--fused-ce-chunk-tokens",
    "--fused-ce-memory-mb",
)
#: The stock launches have no such loss to compare with.
_OTHER_LOSS = (
    "--fused-ce-label-smoothing",
    "--fused-ce-label-smoothing-form",
    "--fused-ce-z-loss",
    "--fused-ce-logit-softcap",
    "--fused-ce-ignore-index",
    "--fused-ce-mask-padded-vocab",
)
_STOCK_FUSION = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl")


@dataclass(frozen=True)
class Launches:
    """What fixes the figures of a sweep's launches, but for the machine."""

    checkout: Checkout
    script: str
    nproc: int
    args: tuple[str, ...]  # the user's, without what the sweep sets
    plugin_args: tuple[str, ...]  # the user's flags of the plugin that are not swept
    device: str  # "cpu" or "cuda"
    iterations: int
    warmup: int
    timeout_s: float

    @staticmethod
    def of(
        megatron: str,
        words: Sequence[str],
        *,
        script: str,
        nproc: int,
        device: str,
        iterations: int,
        warmup: int,
        timeout_s: float,
    ) -> Launches:
        """Raises UsageError where the checkout or the arguments do not fit."""
        checkout = Checkout.at(megatron)
        if not (checkout.path / script).is_file():
            raise UsageError(f"--script: {checkout.label} has no {script}")
        if not words or not words[0].startswith("--"):
            raise UsageError(
                "after -- give the arguments of the training script alone, from its first --option on"
            )
        refuse_shared_folders(words)
        stock, plugin = split_plugin_words(words)
        for option in _options(plugin):
            if option[0].partition("=")[0] in _OTHER_LOSS:
                raise UsageError(
                    f"leave out {option[0]}: the stock launches have no such loss to compare with"
                )
        return Launches(
            checkout,
            script,
            nproc,
            _without(stock, _STOCK_FUSION),
            _without(plugin, _SWEPT),
            device,
            iterations,
            warmup,
            timeout_s,
        )

    def facts(self) -> dict[str, Any]:
        on_gpu = self.device == "cuda"
        return {
            "what": "pretrain",
            "megatron": self.checkout.label,
            "checkout": str(self.checkout.path),
            "script": self.script,
            "nproc": self.nproc,
            "args": shlex.join(self.args),
            "plugin_args": shlex.join(self.plugin_args),
            "iterations": self.iterations,
            "warmup": self.warmup,
            "device": _gpu_name() if on_gpu else f"{platform.machine()} CPU",
            "torch": version("torch"),
            "commit": commit(),
            "sources": source_digest(),
        }

    @property
    def loss_bound(self) -> float:
        """What a loss may differ from the stock launch's by, relative, where native differs by less."""
        bounds = FP32_LOSS_BOUNDS if self._case.is_fp32 else LOSS_BOUNDS
        return bounds.first

    @property
    def _case(self) -> Case:
        ends = ["--log-interval", "1", "--eval-iters", "0"]
        ends += ["--exit-interval", str(self.iterations)]
        args = [*self.args, *ends]
        return Case("sweep", self.script, self.nproc, args, NO_FUSED_WGRAD not in args)

    def run_of(self, cell: Cell) -> Run:
        flags = shlex.split(STOCK_FLAGS[cell.strategy] if cell.strategy in STOCK else cell.flags)
        if cell.strategy not in STOCK:
            flags += self.plugin_args
        name = cell.name.replace(" ", "")
        return Run(
            self.checkout, "gpt", self._case, name, tuple(flags), self.device, self.timeout_s
        )


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _options(words: Sequence[str]) -> list[list[str]]:
    """Each ``--option`` with its values."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not options:
            options.append([])
        options[-1].append(word)
    return options


def _without(words: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    kept = [option for option in _options(words) if option[0].partition("=")[0] not in names]
    return tuple(word for option in kept for word in option)


def cells_of(strategies: Sequence[str], chunks: Sequence[int]) -> list[Cell]:
    """``auto``, which is the reference, and the stock launches first."""
    counted = [Cell(PRETRAIN, name, num) for name in strategies for num in chunks]
    return [*(Cell(PRETRAIN, name) for name in (AUTO, *STOCK)), *counted]


def measure(
    launches: Launches,
    cells: Sequence[Cell],
    state: State,
    folder: Path,
    begin: Callable[[Cell], None],
    done: Callable[[Cell], None],
) -> None:
    """Launch the cells that ``state`` lacks, logs in ``folder``.

    The reference is launched in every call that launches anything, so that each ratio is of one call.
    Raises UsageError where it fails: then the arguments do not fit, or the GPU is too small.
    """
    if all(state.has(cell.key) for cell in cells):
        return
    reference_ms = _launch_reference(launches, cells, state, folder, begin)
    for cell in cells:
        if not state.has(cell.key):
            begin(cell)
            record = _record(launches, cell, folder)
            if record["ms"] is not None:
                record["ratio"] = record["ms"] / reference_ms
            state.add(cell.key, record)
        done(cell)


def _launch_reference(
    launches: Launches,
    cells: Sequence[Cell],
    state: State,
    folder: Path,
    begin: Callable[[Cell], None],
) -> float:
    """Its ms an iteration: ``auto``'s, else what needs least; what an earlier call took."""
    most = max(cell.num_chunks or 1 for cell in cells)
    known = [Cell(PRETRAIN, AUTO), Cell(PRETRAIN, "recompute", most)]
    if "name" in state.reference:
        known = [cell for cell in known if cell.name == state.reference["name"]]
    for cell in known:
        begin(cell)
        record = _record(launches, cell, folder)
        ms = record["ms"]
        if ms is not None:
            state.reference = {"name": cell.name, PRETRAIN: ms}
            state.add(cell.key, record | {"ratio": 1.0})
            return float(ms)
        if record["status"] != OUT_OF_MEMORY:
            raise UsageError(
                f"the launch with {cell.flags}: {record['status']}; its logs are in {folder}"
            )
        state.add(cell.key, record)
    raise UsageError(
        f"even {known[-1].name} runs out of memory: use a smaller micro-batch, more --chunks or more ranks"
    )


def _record(launches: Launches, cell: Cell, folder: Path) -> dict[str, Any]:
    """What the state keeps of a launch; ``ms`` None where it did not run to its end."""
    run = launches.run_of(cell)
    figures = run.finish(run.start(folder))
    times = figures.iteration_times_ms[launches.warmup :]
    status = figures.status
    if status == OK and not times:
        status = f"ended after {len(figures.iteration_times_ms)} iterations"
    elif status == OK and cell.strategy not in STOCK and not _is_fused(figures):
        status = "the head was not fused"
    elif status not in (OK, OUT_OF_MEMORY):
        status = f"{status}: {figures.error}".removesuffix(": ")
    record: dict[str, Any] = {"status": status, "ms": None, "command": run.command}
    if status == OK:
        ms = statistics.median(times)
        record |= {"ms": ms, "spread": round((max(times) - min(times)) / ms, 4)}
        record |= {"peak_mib": figures.max_allocated_mb, "losses": figures.losses}
    return record


def _is_fused(figures: Figures) -> bool:
    return bool(figures.heads_fused) and not figures.logits_materialised


def judged(
    launches: Launches, cells: Sequence[Cell], state: State
) -> tuple[dict[Cell, dict[str, Any]], float]:
    """Records with their ``error``, the largest relative difference of any loss from the stock launch's.

    A launch of ours above the bound is no longer "ok". The bound, which is returned too: twice what native
    differs from unfused by, or what `compare_loss` allows a run's first iterations, whichever is larger.
    Where neither stock launch ran, the reference stands for it.
    """
    records = {cell: dict(state.cells[cell.key]) for cell in cells}
    losses = {
        cell.name: Figures(losses=r["losses"]) for cell, r in records.items() if "losses" in r
    }
    stock = next(name for name in (*STOCK, state.reference["name"]) if name in losses)
    bound = launches.loss_bound
    if {REFERENCE, YARDSTICK} <= losses.keys():
        noise = loss_difference(losses[YARDSTICK], losses[REFERENCE])
        bound = max(bound, YARDSTICK_FACTOR * noise)
    for cell, record in records.items():
        if cell.name in losses and cell.name != stock:
            record["error"] = loss_difference(losses[cell.name], losses[stock])
            if cell.strategy not in STOCK and not record["error"] <= bound:
                record["status"] = f"losses differ from {stock}'s by {record['error']:.1e}"
    return records, bound
