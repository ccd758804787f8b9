"""Tests of Megatron-LM and RL frameworks around output layer and loss, as they are and with ours in place.

    python -m scripts.dev.upstream_tests ~/Megatron-LM ~/SkyRL ~/NeMo-RL ~/slime ~/verl

The checkouts (with their tests) are not changed: pytest plugins turn the flag on in Megatron-LM, and put our
log-probabilities in the place of a framework's own. Each file runs twice for each number of ranks; a test
counts against us only where its outcome differs. Calls are counted test by test, so that a test that never
came near the head is not taken for one that passed with it. Without a GPU, gloo stands in for NCCL.

A file that makes no progress for --test-timeout seconds (four times that until it begins), or whose processes
die, loses the test it was in; its other tests are run in new processes. That is why each rank writes a line
when a test begins and when it ends: pytest's own junit files are written at a session's end, and a process
that dies leaves none.

Writes upstream_tests.json and .md to --out, where what is done stays, and is not run again. Exit status: 0 no
difference, 1 a test that differs, 2 a mistake in the arguments. `make figures` makes docs/upstream_tests.md
of all committed results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    num_gpus,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.launches import end_launch, full_version
from megatron_fused_ce.scripts.lib.results import REPOSITORY, write_whole

PAGE = REPOSITORY / "docs" / "upstream_tests.md"
PLUGIN = "megatron_fused_ce.scripts.dev.upstream_tests_plugin"
RL_PLUGIN = "megatron_fused_ce.scripts.dev.upstream_rl"
#: What touches the output layer or the loss, in the order in which time is spent on it.
MEGATRON_FILES = (
    *("models/test_gpt_model.py", "transformer/test_multi_token_prediction.py"),
    *("tensor_parallel/test_cross_entropy.py", "transformer/test_mup.py"),
    *("extension/test_te_lmhead_column_parallel_linear.py", "pipeline_parallel/test_mtp_loss_scale.py"),
    *("models/test_hybrid_model.py", "tensor_parallel/test_layers.py"),
    *("a2a_overlap/test_schedule_chunk_1f1b.py", "test_training.py", "test_fp8_param.py"),
    "distributed/test_torch_fully_sharded_parallel.py",
    "distributed/mfsdp_v1/test_mcore_fully_sharded_data_parallel.py",
    "distributed/mfsdp_v1/test_mcore_tensor_parallelism_detect.py",
    *("distributed/test_distributed_data_parallel.py", "distributed/test_finalize_model_grads.py"),
    "dist_checkpointing/models/test_gpt_model.py",
    *("dist_checkpointing/models/test_gpt_hybrid_interop.py", "pipeline_parallel/test_schedules.py"),
    *("transformer/test_cuda_graphs.py", "a2a_overlap/test_cuda_graphed_schedule_chunk_1f1b.py"),
    *("test_fp4_param.py", "post_training/test_freeze_base_for_mtp.py", "rl/test_rl_utils.py"),
    *("rl/test_context_parallel.py", "rl/test_rl_batch_invariant.py", "rl/test_sequence_packing_utils.py"),
)


@dataclass(frozen=True)
class Project:
    """What its tests need. The plugin says what of it is replaced."""

    tests: str  # folder
    files: Mapping[str, tuple[int, ...]]  # below it; on how many ranks each is run
    #: Packages of it to enter without running their __init__, and modules to mock if they cannot be imported.
    without: tuple[str, ...] = ()


#: By the folder that shows a checkout.
PROJECTS = {
    "megatron": Project(
        "tests/unit_tests",
        dict.fromkeys(MEGATRON_FILES, (1, 2)),
        ("fastapi", "httpx", "omegaconf", "openai", "transformers", "uvicorn", "wandb"),
    ),
    "skyrl": Project(
        "tests/backends/skyrl_train/gpu/gpu_ci/megatron",
        {"test_fused_linear_logprob.py": (1, 2)},
        (
            *("skyrl.backends", "skyrl.train", "skyrl.train.config.config", "loguru", "ray"),
            *("ray.util.placement_group", "ray.util.scheduling_strategies"),
        ),
    ),
    "nemo_rl": Project("tests/unit/distributed", {"test_distributed_logprob.py": (1, 2)}, ("nemo_rl",)),
    "slime": Project("tests", {"test_ppo_logprob_entropy.py": (1,)}),
    "verl": Project(
        "tests/utils",
        {"test_linear_cross_entropy.py": (1,), "test_special_linear_cross_entropy_tp.py": (2,)},
        ("verl", "verl.utils", "tensordict", "transformers"),
    ),
}
HOOKS = ("off", "on")
#: A test that ranks disagree about counts as the first of these.
OUTCOMES = ("died", "hung", "not importable", "failed", "passed", "skipped", "not run")
#: What the page says of where the results come from: its words and ours.
SHOWN = {
    **{"commit": "commit", "Megatron-LM": "megatron", "device": "device", "torch": "torch"},
    **{"transformer-engine": "transformer_engine", "triton": "triton", "pytest": "pytest"},
    "checkouts": "checkouts",
}
#: Test timeouts that a process has before its first line: Megatron's import.
STARTING = 4
#: Processes of one file: each but the first leaves out a test that hung or died.
ATTEMPTS = 4


@dataclass(frozen=True)
class Outcome:
    """Of one test, over the ranks."""

    outcome: str
    message: str = ""
    fused: int = 0  # heads, summed over the ranks
    materialised: int = 0
    stock: int = 0
    seconds: float = 0.0


NOT_RUN = Outcome("not run")


@dataclass(frozen=True)
class Job:
    """One file on so many ranks, with ours or without."""

    of: str  # a key of PROJECTS
    checkout: Path
    file: str
    ranks: int
    hook: str
    out: Path

    @property
    def path(self) -> str:
        return f"{PROJECTS[self.of].tests}/{self.file}"

    @property
    def label(self) -> str:
        return self.file if self.of == "megatron" else f"{self.of} {self.file}"

    @property
    def name(self) -> str:
        return f"{self.label} on {self.ranks}, flag {self.hook}"

    @property
    def folder(self) -> Path:
        slug = self.file.removesuffix(".py").replace("/", ".")
        return self.out / f"{slug}-{self.ranks}-{self.hook}"

    def command(self, deselected: Iterable[str]) -> list[str]:
        python, megatron = [sys.executable, "-m"], self.of == "megatron"
        # The others' tests of one process make process groups of their own.
        if self.ranks > 1 or self.of in ("megatron", "nemo_rl"):
            python += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks), "-m"]
        ours = ["-p", PLUGIN, "--fused-ce-hook", self.hook]
        ours += ["--fused-ce-results", str(self.folder), "-o", "addopts=", "-p", "no:cacheprovider"]
        ours += ["--rootdir", str(self.checkout), "--fused-ce-project", self.of]
        ours += [] if megatron else ["-p", RL_PLUGIN, "--noconftest"]
        ours += [] if num_gpus() else ["--fused-ce-cpu"]
        left_out = [word for test in deselected for word in ("--deselect", test)]
        return [*python, "pytest", *ours, "-q", *left_out, self.path]

    def environment(self, device: int | None) -> dict[str, str]:
        folders = [str(self.checkout), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Upstream's checkpoints go to one folder below it, whoever runs beside this job.
        scratch = self.folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        gpu = {} if device is None or self.ranks > 1 else {"CUDA_VISIBLE_DEVICES": str(device)}
        ours = {"PYTHONPATH": os.pathsep.join(folders), "PYTEST_DEBUG_TEMPROOT": str(scratch)}
        return {**os.environ, **gpu, **ours, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}

    def lines(self) -> list[list[dict[str, Any]]]:
        """What each rank wrote, in order."""
        return [
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            for file in sorted(self.folder.glob("rank*.jsonl"))
        ]

    def unfinished(self) -> set[str]:
        """Tests that a rank began and did not end."""
        begun = {line["began"] for rank in self.lines() for line in rank if "began" in line}
        ended = [{line["test"] for line in rank if "test" in line} for rank in self.lines()]
        return begun - set.intersection(*ended) if ended else begun

    def outcomes(self) -> dict[str, Outcome]:
        """Of every test that was begun."""
        made: dict[str, Outcome] = {}
        for line in (line for rank in self.lines() for line in rank if "test" in line):
            this = Outcome(**{name: value for name, value in line.items() if name != "test"})
            made[line["test"]] = _over_ranks(made.get(line["test"], NOT_RUN), this)
        done = self.done()
        for test, words in done.get("lost", {}).items():
            made[test] = Outcome(words.partition(":")[0], words.partition(": ")[2])
        return made

    def done(self) -> dict[str, Any]:
        """What :meth:`run` left; empty before."""
        file = self.folder / "done.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {}

    def run(self, device: int | None, deadline: float, test_timeout: float) -> None:
        """All tests of the file; writes ``done.json`` unless time ran out before its last test."""
        began = time.monotonic()
        lost: dict[str, str] = {}
        for attempt in range(ATTEMPTS):
            ended = {line["test"] for rank in self.lines() for line in rank if "test" in line}
            skipped = ended | lost.keys() if attempt else set(lost)
            if not attempt:
                for file in self.folder.glob("rank*.jsonl"):
                    file.unlink()
            how = self._launch(device, deadline, test_timeout, sorted(skipped))
            if how == "time":
                return
            unfinished = self.unfinished() - lost.keys()
            # Before its first test or after its last: that is the file's own.
            of_none = [self.path] if how != "ended" else []
            for test in unfinished or of_none:
                lost[test] = f"{how}: see {self.folder.name}/log"
            if not unfinished:
                break
        facts = {"seconds": round(time.monotonic() - began, 1), "lost": lost, "ended": how}
        write_whole(self.folder / "done.json", json.dumps(facts, indent=1).encode())

    def _launch(
        self, device: int | None, deadline: float, test_timeout: float, deselected: Sequence[str]
    ) -> str:
        """``ended``, ``died``, ``hung``, or ``time`` where the deadline came."""
        where: Any = {"cwd": self.checkout, "env": self.environment(device), "start_new_session": True}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(self.command(deselected), stdout=log, stderr=log, **where)
        began = time.time()
        while process.poll() is None:
            time.sleep(0.25)
            files = self.folder.glob("rank*.jsonl")
            moved = max((file.stat().st_mtime for file in files), default=0.0)
            allowed = test_timeout if moved > began else STARTING * test_timeout
            late = time.monotonic() > deadline
            if late or time.time() - max(moved, began) > allowed:
                end_launch(process, grace_s=1.0)
                return "time" if late else "hung"
        return "ended" if process.returncode == 0 else "died"


def _over_ranks(one: Outcome, other: Outcome) -> Outcome:
    first, second = sorted((one, other), key=lambda outcome: OUTCOMES.index(outcome.outcome))
    heads = one.fused + other.fused, one.materialised + other.materialised, one.stock + other.stock
    longest = round(max(one.seconds, other.seconds), 2)
    return Outcome(first.outcome, first.message or second.message, *heads, longest)


@dataclass(frozen=True)
class Row:
    """One test on so many ranks."""

    file: str
    test: str
    ranks: int
    off: Outcome
    on: Outcome

    @property
    def verdict(self) -> str:
        pair = (self.off.outcome, self.on.outcome)
        if "not run" in pair:
            return "not run"
        if pair[0] != pair[1]:
            return "differs"
        return pair[0] if pair[0] in ("passed", "skipped") else f"{pair[0]} in both"

    def record(self) -> dict[str, Any]:
        off, on = (dict(vars(outcome)) for outcome in (self.off, self.on))
        names = {"shape": f"{self.ranks} ranks", "variant": f"{self.file}::{self.test}"}
        return {**names, **vars(self), "off": off, "on": on, "verdict": self.verdict}


def rows_of(jobs: Sequence[Job]) -> list[Row]:
    """A row a test, in the order of the jobs and of the tests in their files."""
    made = []
    for off, on in zip(jobs[::2], jobs[1::2], strict=True):
        without, with_flag = off.outcomes(), on.outcomes()
        for test in dict.fromkeys([*without, *with_flag]):
            name = test.removeprefix(off.path).removeprefix("::") or "(the file)"
            pair = without.get(test, NOT_RUN), with_flag.get(test, NOT_RUN)
            made.append(Row(off.label, name, off.ranks, *pair))
    return made


def markdown(rows: Sequence[Row], sources: Sequence[dict[str, Any]]) -> str:
    """Counts of each file, then the tests that differ, and why others fail without the flag too."""
    verdicts = sorted({row.verdict for row in rows})
    told = []
    for name, key in SHOWN.items():
        values = dict.fromkeys(str(source[key] or "absent") for source in sources if key in source)
        told += [f"{name} {' and '.join(values)}"] * bool(values)
    lines = [", ".join(told) + ".", ""]
    files = []
    for file, ranks in dict.fromkeys((row.file, row.ranks) for row in rows):
        here = [row for row in rows if (row.file, row.ranks) == (file, ranks)]
        counted = Counter(row.verdict for row in here)
        counts = [counted[verdict] or "" for verdict in verdicts]
        met = sum(bool(row.on.fused or row.on.materialised) for row in here)
        heads = [sum(row.on.fused for row in here), sum(row.on.materialised for row in here)]
        files.append([file, ranks, len(here), *counts, met or "", *(count or "" for count in heads)])
    head = ["file", "ranks", "tests", *verdicts, "reached the head", "heads fused", "logits materialised"]
    lines += [tables.markdown(head, files, left=len(head))]
    different = [row for row in rows if row.verdict == "differs"]
    lines += ["", f"Different with the flag: {len(different)}", ""]
    if different:
        header = ["file", "test", "ranks", "off", "on", "fused / materialised / stock", "message"]
        cells = []
        for row in different:
            used = f"{row.on.fused} / {row.on.materialised} / {row.on.stock}"
            outcomes = row.off.outcome, row.on.outcome
            cells.append([row.file, row.test, row.ranks, *outcomes, used, row.on.message[:160]])
        lines += [tables.markdown(header, cells, left=len(header))]
    failing = [row for row in rows if row.verdict.endswith("in both")]
    lines += ["", f"Fail without the flag too: {len(failing)}", ""]
    if failing:
        words = (row.off.message.partition(": ")[2] or row.off.message or row.verdict for row in failing)
        reasons = Counter(message.split(". ")[0][:110] for message in words)
        said = [[count, reason] for reason, count in reasons.most_common()]
        lines += [tables.markdown(["tests", "message"], said, left=2)]
    if incomplete := [name for source in sources for name in source["incomplete"]]:
        lines += ["", f"Not done within the time limit: {'; '.join(incomplete)}."]
    return "\n".join(lines) + "\n"


def page_of(files: Sequence[Path]) -> str:
    """The page of results written before; of a test that is in several files the last one's row."""
    sources: list[dict[str, Any]] = []
    rows: dict[tuple[str, str, int], Row] = {}
    for file in files:
        content = results.read(file)
        sources.append(content["made_by"])
        for record in content["rows"]:
            of = record["file"], record["test"], record["ranks"]
            rows[of] = Row(*of, off=Outcome(**record["off"]), on=Outcome(**record["on"]))
    return markdown(list(rows.values()), sources)


def parts() -> dict[str, str]:
    """What `PAGE` has of it, by the name of its markers."""
    folder = REPOSITORY / results.RESULTS
    files = {"upstream's tests": "*-upstream-*.json", "RL frameworks' tests": "*-frameworks*.json"}
    return {name: page_of(sorted(folder.glob(pattern))) for name, pattern in files.items()}


def source_of(jobs: Sequence[Job], words: Sequence[str]) -> dict[str, Any]:
    """What ran, and what did not."""
    import torch

    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else ""
    checkouts = {job.of: job.checkout for job in jobs}
    megatron = {"megatron": full_version(checkouts["megatron"])} if "megatron" in checkouts else {}
    return results.made_by(device, ["scripts.dev.upstream_tests", *words], **megatron) | {
        "checkouts": ", ".join(f"{name} {_commit(checkout)}" for name, checkout in checkouts.items()),
        "pytest": importlib.metadata.version("pytest"),
        "incomplete": [job.name for job in jobs if not job.done()],
    }


def _commit(checkout: Path) -> str:
    git = ["git", f"--git-dir={checkout}/.git", "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout[:7] or "(no git)"


def run_all(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """``options.jobs`` at a time, in order, until the deadline."""
    began = time.monotonic()
    deadline = began + options.time_limit
    gpus = num_gpus()

    def run(job: Job) -> None:
        if job.done() or time.monotonic() >= deadline:
            return
        job.run(jobs.index(job) % gpus if gpus else None, deadline, options.test_timeout)
        counted = Counter(outcome.outcome for outcome in job.outcomes().values())
        told = ", ".join(f"{counted[name]} {name}" for name in OUTCOMES if counted[name])
        cut = "" if job.done() else " (cut by the time limit)"
        print(f"{time.monotonic() - began:5.0f} s  {job.name}: {told}{cut}", flush=True)

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(run, jobs))


def planned(options: argparse.Namespace) -> list[Job]:
    """An off and an on for each file and number of ranks."""
    out = writable_folder(options.out.resolve())
    jobs = []
    for checkout in (path.resolve() for path in options.checkouts):
        of = next((name for name in PROJECTS if (checkout / name).is_dir()), None)
        if of is None:
            raise UsageError(f"{checkout} is no checkout of {', '.join(PROJECTS)}")
        project = PROJECTS[of]
        for file in options.files or project.files:
            if (checkout / project.tests / file).is_file():
                ranks = options.ranks or project.files.get(file, (1,))
                jobs += [Job(of, checkout, file, count, hook, out) for count in ranks for hook in HOOKS]
    missing = set(options.files or ()) - {job.file for job in jobs}
    if missing or not jobs:
        raise UsageError(f"no {', '.join(sorted(missing)) or 'known file'} among the checkouts' tests")
    return jobs


@command("upstream_tests")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.dev.upstream_tests", __doc__ or "")
    add = parser.add_argument
    add("checkouts", type=Path, nargs="+", metavar="CHECKOUT", help=f"of {', '.join(PROJECTS)}")
    add("--ranks", type=whole(most=4096), nargs="+", metavar="R", help="[those of each file]")
    add("--files", nargs="+", metavar="F", help="below the checkouts' tests [those known]")
    add("--out", type=Path, default=Path("build/upstream_tests"), metavar="DIR")
    add("--jobs", type=whole(most=1024), default=2, metavar="N", help="at a time [2]")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S")
    add("--test-timeout", type=seconds, default=120.0, metavar="S", help="[120]")
    options = parser.parse_args(words)
    jobs = planned(options)
    run_all(jobs, options)
    rows, source = rows_of(jobs), source_of(jobs, words)
    text = markdown(rows, [source])
    print(text, flush=True)
    write_whole(options.out / "upstream_tests.md", text)
    results.write(options.out / "upstream_tests.json", [row.record() for row in rows], source)
    return 1 if any(row.verdict == "differs" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
