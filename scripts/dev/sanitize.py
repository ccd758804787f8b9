"""Every kernel under compute-sanitizer: memcheck, racecheck, initcheck.

    python -m scripts.dev.sanitize

One process for each tool and group of kernels runs sanitize_workload.py: odd sizes, results against fp64,
and at its end a control, a kernel with the error that the tool looks for. A tool that misses its
control, a result that is wrong or a kernel that was not launched fails as much as a finding does.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` throughout: torch's caching allocator cuts tensors out of large blocks,
and the tools know whole blocks only. An access behind a tensor's end would land in its neighbour, and
memory of an earlier tensor would count as initialised.

What the tools do not follow (their documentation, and what the report names kernel by kernel):
racecheck sees accesses of threads to shared memory, and not those of the TMA unit
(``cp.async.bulk.tensor``) nor of ``wgmma``; initcheck does not see what the TMA unit writes to global
memory, so where kernels use it every ``torch.empty`` is filled with NaN first: a read of what nobody wrote
then spoils a result instead. memcheck does not check addresses of tensor copies, which the hardware bounds
by their descriptors.

Writes sanitize.json and .md, and the tools' logs, to --out.
Exit status: 0 clean, 1 a finding or a run that proves nothing, 2 a mistake in the arguments.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.command_line import (
    Parser,
    UsageError,
    command,
    require_gpus,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.scripts.dev.sanitize_workload import CONTROLS, GROUPS, MODULES, entry_kernels
from megatron_fused_ce.scripts.lib import tables
from megatron_fused_ce.scripts.lib.results import REPOSITORY, made_by, write, write_whole

#: A run of the workload by itself.
ALONE = "alone"
TOOLS = tuple(CONTROLS)
#: How a finding begins; lines below it are indented.
FINDING = re.compile(
    r"(?i)^(Invalid|Uninitialized|Misaligned|Potential|Barrier error|Deadlock|"
    r"(Error|Warning): .*(race|hazard))"
)
#: What a tool says when it could not do all of its work.
BROKEN = re.compile(r"^(Internal|Fatal|Device not supported|Warning: Detected overflow)")
#: Where: "at NAME+0x10", "at 0x10 in NAME(...)".
WHERE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?([^\n]+?)(?:\(|\+0x| in |$)")
#: What the page says of where the figures come from.
SHOWN = ("commit", "device", "torch", "triton", "compute-sanitizer")
#: Groups whose kernels write by TMA.
WRITE_BY_TMA = ("portable", "hopper")


@dataclass(frozen=True)
class Finding:
    kernel: str
    what: str


def findings(log: str) -> list[Finding]:
    """What a tool reported, each with the kernel it happened in."""
    made: list[Finding] = []
    header, kernel = "", ""
    lines = [line.removeprefix("=========") for line in log.splitlines() if line.startswith("=====")]
    for line in [*lines, " end"]:
        words = line.strip()
        if header and not kernel and (found := WHERE.search(words)):
            kernel = found[1].split("<")[0].strip()
        if line.startswith(" ") and not line.startswith("  "):
            if header:
                made.append(Finding(kernel or "?", header))
            header, kernel = (words if FINDING.match(words) else ""), ""
            if header and (found := WHERE.search(words)):
                kernel = found[1].split("<")[0].strip()
    return made


def broken(log: str) -> str:
    """Why the tool could not work, or empty."""
    for line in log.splitlines():
        words = line.removeprefix("=========").strip()
        if line.startswith("=====") and BROKEN.match(words):
            return words
    return ""


@dataclass
class Child:
    """The workload of one group under one tool."""

    tool: str
    group: str
    out: Path
    sanitizer: str
    seconds: float = 0.0
    ended: str = "not run"

    @property
    def stem(self) -> Path:
        return self.out / f"{self.tool}-{self.group}"

    def command(self, port: int) -> list[str]:
        results = self.stem.with_suffix(".json")
        words = [sys.executable, "-m", "megatron_fused_ce.scripts.dev.sanitize_workload", self.group]
        words += ["--results", str(results)]
        if self.tool == ALONE:
            return words
        tool = [self.sanitizer, "--tool", self.tool, "--show-backtrace", "no"]
        tool += ["--print-limit", "10000", "--port", str(port)]
        # The compilers that Triton starts have nothing to be checked.
        tool += ["--target-processes", "application-only"]
        # torch asks CUDA for what may be missing; results are compared anyway.
        tool += ["--report-api-errors", "no"] if self.tool == "memcheck" else []
        poison = ["--poison"] if self.tool == "initcheck" and self.group in WRITE_BY_TMA else []
        return [*tool, *words, "--control", self.tool, *poison]

    def run(self, port: int, deadline: float) -> None:
        environment = {
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        }
        for suffix in (".json", ".log"):
            self.stem.with_suffix(suffix).unlink(missing_ok=True)
        began = time.monotonic()
        with self.stem.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                self.command(port),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(max(1.0, deadline - began))
                self.ended = f"status {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.ended = "cut by the time limit"
        self.seconds = time.monotonic() - began
        text = "; ".join(self.problems()) or "clean"
        print(f"{self.tool:10} {self.group:9} {self.seconds:5.0f} s  {text}", flush=True)

    @property
    def log(self) -> str:
        file = self.stem.with_suffix(".log")
        return file.read_text(errors="replace") if file.is_file() else ""

    @property
    def results(self) -> dict[str, Any]:
        file = self.stem.with_suffix(".json")
        return dict(json.loads(file.read_text())) if file.is_file() else {}

    @property
    def found(self) -> list[Finding]:
        """Without the control's and those of the right kernels beside it."""
        return [one for one in findings(self.log) if not one.kernel.startswith(("_control_", "_right_"))]

    @property
    def reported_right(self) -> Counter[str]:
        """Kernels of sanitize_right.py that the tool reported, and how often."""
        return Counter(one.kernel for one in findings(self.log) if one.kernel.startswith("_right_"))

    @property
    def control_seen(self) -> bool:
        return any(one.kernel == CONTROLS.get(self.tool) for one in findings(self.log))

    def problems(self) -> list[str]:
        """Everything that keeps this run from being clean."""
        said = []
        if reason := broken(self.log):
            said.append(reason)
        if not self.results:
            said.append(f"no results ({self.ended})")
        said += [f"{name}: {why}" for name, why in self.results.get("failed", {}).items()]
        counted = Counter(one.kernel for one in self.found)
        said += [f"{count} findings in {kernel}" for kernel, count in counted.items()]
        if self.tool != ALONE and not self.control_seen:
            said.append(f"the control {CONTROLS[self.tool]} was not reported")
        return said

    def record(self) -> dict[str, Any]:
        kinds = Counter((one.kernel, one.what) for one in self.found)
        return {
            "shape": self.group,
            "variant": self.tool,
            "seconds": round(self.seconds, 1),
            "ended": self.ended,
            "control_seen": self.control_seen,
            "reported_right": self.reported_right,
            "poisoned": "--poison" in self.command(0),
            "findings": [[kernel, what, count] for (kernel, what), count in kinds.items()],
            "problems": self.problems(),
            **self.results,
        }


def _cell(child: Child, kernel: str) -> str:
    launches = child.results.get("launches", {}).get(kernel)
    if launches is None:
        return child.ended
    count = sum(one.kernel.startswith(kernel) for one in child.found)
    return f"{launches} / {count}"


def markdown(children: Sequence[Child], facts: dict[str, Any]) -> str:
    """By kernel and tool: launches and findings."""
    tools = list(dict.fromkeys(child.tool for child in children))
    kernels = []
    for group in dict.fromkeys(child.group for child in children):
        here = [child for child in children if child.group == group]
        for module in MODULES[group]:
            for kernel in entry_kernels()[module]:
                seen = [child.results.get("asynchronous", {}).get(kernel, []) for child in here]
                kinds = ", ".join(sorted({kind for kinds in seen for kind in kinds}))
                cells = [_cell(child, kernel) for child in here]
                kernels.append([f"`{module}.{kernel}`", *cells, kinds])
    runs = []
    for child in children:
        control = "" if child.tool == ALONE else ("reported" if child.control_seen else "MISSED")
        problems = "; ".join(child.problems())[:300] or "clean"
        poison = " (NaN in fresh memory)" if child.record()["poisoned"] else ""
        checks = child.results.get("checks", 0)
        seconds_taken = round(child.seconds)
        runs.append([child.tool, child.group + poison, checks, control, seconds_taken, problems])
    titles = [f"{tool}: launches / findings" for tool in tools]
    head = ["tool", "group", "checks against fp64", "control", "seconds", ""]
    lines = [
        ", ".join(f"{name} {facts[name]}" for name in SHOWN if name in facts) + ".",
        "",
        tables.markdown(["kernel", *titles, "asynchronous"], kernels, left=len(tools) + 2),
        "",
        tables.markdown(head, runs, left=len(head)),
    ]
    lines += [
        "",
        "Asynchronous: what runs beside the threads that issued it. racecheck follows accesses of threads to "
        "shared memory, and not those of TMA (`cp.async.bulk.tensor`) and `wgmma`.",
    ]
    right = [
        f"{child.tool} ({child.group}): {count} in `{kernel}`"
        for child in children
        for kernel, count in child.reported_right.items()
    ]
    lines += ["", f"Reported though right (scripts/dev/sanitize_right.py): {'; '.join(right) or 'none'}."]
    return "\n".join(lines) + "\n"


def _parser() -> Parser:
    parser = Parser("python -m scripts.dev.sanitize", __doc__ or "")
    add = parser.add_argument
    add("--tools", nargs="+", choices=(ALONE, *TOOLS), default=[ALONE, *TOOLS])
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    add("--sanitizer", help="[compute-sanitizer on PATH or in /usr/local/cuda/bin]")
    add("--out", type=Path, default=Path("build/sanitize"), metavar="DIR")
    add("--jobs", type=whole(most=1024), default=12, metavar="N", help="at a time [12]")
    add("--time-limit", type=seconds, default=600.0, metavar="S", help="[600]")
    return parser


def sanitizer(named: str | None) -> str:
    """The tool's path."""
    places = [named] if named else ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
    for place in places:
        if path := shutil.which(place):
            return path
    raise UsageError(f"no {places[0]} here; it comes with the CUDA toolkit: name it with --sanitizer")


def environment(tool: str, words: Sequence[str]) -> dict[str, Any]:
    import torch

    told = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    said = re.search(r"Version ([0-9.]+)", told)
    source = made_by(torch.cuda.get_device_name(), ["scripts.dev.sanitize", *words])
    return {**source, "compute-sanitizer": said[1] if said else "unknown"}


@command("sanitize")
def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    require_gpus()
    tool = sanitizer(options.sanitizer)
    writable_folder(options.out).mkdir(parents=True, exist_ok=True)
    children = [Child(name, group, options.out, tool) for group in options.groups for name in options.tools]
    deadline = time.monotonic() + options.time_limit
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(child.run, 49152 + 32 * index, deadline) for index, child in enumerate(children)]
    for run in runs:
        run.result()
    facts = environment(tool, words)
    text = markdown(children, facts)
    print(text, flush=True)
    write_whole(options.out / "sanitize.md", text)
    write(options.out / "sanitize.json", [child.record() for child in children], facts)
    return 1 if any(child.problems() for child in children) else 0


if __name__ == "__main__":
    sys.exit(main())
