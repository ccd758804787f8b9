"""The sweep through Megatron-LM: one short launch of a real pretraining script for every cell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.cli.command_line import UsageError
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
from megatron_fused_ce.scripts.lib.launches import STOCK as STOCK_FLAGS
from megatron_fused_ce.scripts.lib.logs import Figures
from megatron_fused_ce.scripts.lib.losses import (
    FP32_LOSS_BOUND,
    LOSS_BOUND,
    YARDSTICK_FACTOR,
    loss_difference,
)
from megatron_fused_ce.scripts.runs.sweep_rows import OK, OUT_OF_MEMORY, STOCK, Cell

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
        return {
            "what": "pretrain",
            "megatron": self.checkout.label,
            "script": self.script,
            "nproc": self.nproc,
            "args": shlex.join(self.args),
            "plugin_args": shlex.join(self.plugin_args),
            "iterations": self.iterations,
            "warmup": self.warmup,
        }

    @property
    def loss_bound(self) -> float:
        """What a loss may differ from the stock launch's by, relative, where native differs by less."""
        return FP32_LOSS_BOUND if self._case.is_fp32 else LOSS_BOUND

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
        return Run(self.checkout, "gpt", self._case, name, tuple(flags), self.device, self.timeout_s)


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


def measure(
    launches: Launches, cells: Sequence[Cell], folder: Path, fresh: bool, say: Callable[[str], None]
) -> dict[Cell, dict[str, Any]]:
    """What became of each cell's launch, logs in ``folder``; those there from an earlier call are kept.

    Raises UsageError where the first one fails: then the arguments do not fit.
    """
    records: dict[Cell, dict[str, Any]] = {}
    for cell in cells:
        run = launches.run_of(cell)
        figures, was_there = run.execute(folder, fresh)
        came = " (kept; --fresh launches again)" if was_there else ""
        record = records[cell] = _record(launches, cell, figures)
        if len(records) == 1 and record["status"] not in (OK, OUT_OF_MEMORY):
            raise UsageError(f"the launch with {cell.flags}: {record['status']}; its logs are in {folder}")
        record["command"] = run.command
        say(f"{cell.name}: {record['status']}{came}")
    return _judged(launches, records)


def _record(launches: Launches, cell: Cell, figures: Figures) -> dict[str, Any]:
    """What is known of a launch; no ``time_ms`` where it did not run to its end."""
    time_ms, spread = figures.time_ms(launches.warmup)
    status = figures.status
    if status == OK and time_ms is None:
        status = f"ended after {len(figures.iteration_times_ms)} iterations"
    elif status == OK and cell.strategy not in STOCK and not figures.is_fused:
        status = "the head was not fused"
    elif status not in (OK, OUT_OF_MEMORY):
        status = f"{status}: {figures.error}".removesuffix(": ")
    if status != OK:
        return {"status": status}
    return {
        "status": status,
        "time_ms": time_ms,
        "spread": spread,
        "peak_mib": figures.max_allocated_mb,
        "figures": figures,
        **figures.gpu,
    }


def _judged(launches: Launches, records: dict[Cell, dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """With ``error``, the largest relative difference of any loss from the stock launch's.

    A launch of ours above the bound is no longer "ok". The bound: twice what native differs from unfused
    by, or what `compare` allows a run's first iterations, whichever is larger. Where neither stock launch
    ran, the first that did stands for it.
    """
    losses = {cell.name: r.pop("figures") for cell, r in records.items() if "figures" in r}
    stock = next((name for name in (*STOCK, *losses) if name in losses), None)
    bound = launches.loss_bound
    if {REFERENCE, YARDSTICK} <= losses.keys():
        noise = loss_difference(losses[YARDSTICK], losses[REFERENCE])
        bound = max(bound, YARDSTICK_FACTOR * noise)
    for cell, record in records.items():
        record["loss_bound"] = bound
        if stock is not None and cell.name in losses and cell.name != stock:
            record["error"] = loss_difference(losses[cell.name], losses[stock])
            if cell.strategy not in STOCK and not record["error"] <= bound:
                record["status"] = f"losses differ from {stock}'s by {record['error']:.1e}"
    return records
