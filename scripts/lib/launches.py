"""Launches of Megatron-LM's training scripts: the one place that starts torchrun for them and ends it.

A launch is a command line and a folder. Each process of torchrun writes a log of its own there, so lines of
ranks do not mix; `logs` reads them back. `Command` is a launch that a user wrote, `Run` one that a program
here puts together from a checkout, a case and a variant.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import gpu
from megatron_fused_ce.scripts.lib.logs import LAUNCHER_LOG, Figures, last_iteration, log_texts, parse_logs
from megatron_fused_ce.scripts.lib.results import PACKAGE, REPOSITORY, SCRIPTS, version, write_whole

#: Stands where torchrun expects the training script, and runs that one with something changed.
RUNNER = SCRIPTS / "lib" / "runner.py"
REFERENCE, YARDSTICK = "unfused", "native"
LOSS_FUSION = "--cross-entropy-loss-fusion"
#: Megatron's own ways of computing the loss.
STOCK = {
    REFERENCE: "",
    YARDSTICK: f"{LOSS_FUSION} --cross-entropy-fusion-impl native",
    "te": f"{LOSS_FUSION} --cross-entropy-fusion-impl te",
}
UNTIED = "--untie-embeddings-and-output-weights"
NO_FUSED_WGRAD = "--no-gradient-accumulation-fusion"
_PLUGIN_WORDS = re.compile(r"--fused-(chunked-ce|ce-.+)")
#: Every launch would write there, and the next could go on from the first's checkpoint.
WRITTEN_BY_LAUNCHES = ("--save", "--tensorboard-dir", "--wandb-save-dir")
#: In the folder of every launch: the command line, and what came of it.
RECORD = "run.json"
POLL_S = 1.0
_LAUNCH_MODULE = ["-m", "megatron_fused_ce.launch"]


# --- processes -------------------------------------------------------------------------------


def _descendants(pid: int) -> list[int]:
    """The processes below ``pid``, from /proc."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", where the name may hold spaces and parentheses.
            parent = file.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(file.parent.name))
    found, below = [], [pid]
    while below:
        below = [child for parent in below for child in children.get(parent, [])]
        found += below
    return found


def end_launch(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """End torchrun and its ranks, which it gives a session each: a signal to its group misses them.

    SIGTERM first, which torchrun passes on; SIGKILL for whatever is left after the grace.
    """
    ranks = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    for pid in (process.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@dataclass
class Started:
    """A launch under way."""

    process: subprocess.Popen[bytes]
    folder: Path

    def finish(self, timeout_s: float, progress: Callable[[str], None] = lambda _: None) -> Figures:
        """Wait for its end; ``progress`` is told of each new iteration."""
        began, looked = time.monotonic(), len(gpu.readings)
        status, told = "", ""
        try:
            while not status:
                left = timeout_s - (time.monotonic() - began)
                try:
                    code = self.process.wait(max(0.0, min(POLL_S, left)))
                    status = "failed" if code else "ok"
                except subprocess.TimeoutExpired:
                    gpu.look_at_others_work()
                    if left <= POLL_S:
                        status = f"timed out after {timeout_s:.0f} s"
                    if (now := last_iteration(self.folder)) != told:
                        progress(now)
                        told = now
        finally:
            if self.process.poll() is None:
                end_launch(self.process)
        figures = parse_logs(log_texts(self.folder))
        figures.wall_s = round(time.monotonic() - began, 1)
        figures.gpu = gpu.medians(gpu.readings[looked:])
        if status == "ok":
            figures.status, figures.error = status, ""
        elif figures.status != "out of memory":
            figures.status = status
        return figures


def start(
    words: Sequence[str], folder: Path, environment: dict[str, str] | None = None, *, cwd: Path | None = None
) -> Started:
    """Start a launch, its ranks' logs in the folder, which loses what an earlier launch left.

    Raises UsageError where the folder holds something else, or there is no such program.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / LAUNCHER_LOG).is_file():
        raise UsageError(f"{folder} holds something that is no launch of this tool: choose another --out")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"command": shlex.join(words)}) + "\n")
    # So that the ranks are ended, too, where this process is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    search = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # torchrun's own options, which stand in the environment where the command line lacks them.
    torchrun = {"PET_LOG_DIR": str(folder / "logs"), "PET_REDIRECTS": "3"}
    env = {**os.environ, "PYTHONPATH": search, **torchrun, **(environment or {})}
    with open(folder / LAUNCHER_LOG, "w") as log:
        how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        try:
            process = subprocess.Popen(words, cwd=cwd, env=env, **how)
        except OSError as error:
            raise UsageError(f"{words[0]}: {error.strerror}") from None
    return Started(process, folder)


def launch(words: Sequence[str], folder: Path, timeout_s: float, what: str) -> None:
    """Run a user's launch to its end; on a terminal its iterations are told. Then a line of its time.

    Raises UsageError, with the log's own error, where it fails, or has the flag and no head was fused.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with console.status(f"launch {what}") as status_line:
        started = start(words, folder)
        figures = started.finish(timeout_s, lambda now: status_line.update(f"launch {what}: {now}"))
    if status := started.process.returncode:
        ended = f"failed with status {status}" if status > 0 else figures.status
        reason = f": {figures.error}" if figures.error else ""
        raise UsageError(f"the launch in {folder} {ended}{reason}; its logs are there")
    if FLAG in words and not figures.heads_fused:
        raise UsageError(f"the launch with the flag evaluated no head fused: see its logs in {folder}")
    console.print(f"launch {what}: {figures.wall_s:.0f} s, logs in {folder}", soft_wrap=True)


# --- a launch that a user wrote --------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A launch's command line, in its parts."""

    launcher: list[str]  # torchrun and its options
    runner: list[str]  # ``-m MODULE ...`` that runs the script, where the user gave one
    script: list[str]  # the training script and its arguments, without the plugin's
    plugin: list[str]  # the plugin's flags, the one that turns it on among them

    @staticmethod
    def of(words: Sequence[str]) -> Command:
        """Raises UsageError where no training script can be found or the launches would meet in a folder."""
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
        if not at:
            raise UsageError(
                "after -- give the launch itself, such as: torchrun --nproc-per-node 8 pretrain_gpt.py ..."
            )
        if not Path(words[at]).is_file():
            raise UsageError(f"no training script {words[at]}")
        refuse_shared_folders(words[at:])
        options = pairwise(words[:at])
        runs = [word in ("-m", "--module") and not of.startswith("torch.distributed") for word, of in options]
        runner = runs.index(True) if True in runs else at
        script, plugin = split_plugin_words(words[at:])
        plugin += [FLAG] * (FLAG not in plugin)
        return Command(list(words[:runner]), list(words[runner:at]), script, plugin)

    def off(self) -> list[str]:
        return [*self.launcher, *self.runner, *self.script]

    def on(self) -> list[str]:
        return [*self.launcher, *(self.runner or _LAUNCH_MODULE), *self.script, *self.plugin]

    def other_stock(self) -> list[str]:
        """The stock launch with the loss computed another way: native, or unfused where it is fused."""
        if LOSS_FUSION in self.script:
            return [word for word in self.off() if word != LOSS_FUSION]
        return [*self.off(), *shlex.split(STOCK[YARDSTICK])]

    def through(self, *runner: str, flag: bool) -> list[str]:
        """With `runner.py` in the place of the user's, and these options of its own.

        Raises UsageError where the user's own module runs the script.
        """
        if self.runner not in ([], _LAUNCH_MODULE):
            raise UsageError(f"leave out {' '.join(self.runner)}: give the training script alone")
        return [*self.launcher, str(RUNNER), *runner, *self.script, *(self.plugin if flag else [])]


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A program's own words, and the command after ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def refuse_shared_folders(words: Sequence[str]) -> None:
    """Raises UsageError where launches with these arguments would meet in a folder."""
    for name in WRITTEN_BY_LAUNCHES:
        if any(word == name or word.startswith(f"{name}=") for word in words):
            raise UsageError(f"leave out {name}: all launches would write to the same place")


def split_plugin_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A launch's arguments without the plugin's flags, and those flags."""
    rest, plugin = list[str](), list[str]()
    into = rest
    for word in words:
        if word.startswith("--"):
            into = plugin if _PLUGIN_WORDS.match(word) else rest
        into.append(word)
    return rest, plugin


# --- a launch that is put together here ------------------------------------------------------


@dataclass(frozen=True)
class Checkout:
    """A folder with Megatron-LM."""

    path: Path
    label: str
    version: tuple[int, int]

    @staticmethod
    def at(path: str) -> Checkout:
        folder = Path(path).expanduser().resolve()
        info = folder / "megatron" / "core" / "package_info.py"
        if not (folder / "pretrain_gpt.py").is_file() or not info.is_file():
            raise UsageError(f"no Megatron-LM checkout at {path}: pretrain_gpt.py is not there")
        major, minor, _ = full_version(folder).split(".")
        return Checkout(folder, folder.name, (int(major), int(minor)))


def full_version(checkout: Path) -> str:
    """As Megatron's package_info.py has it, '?' for a part that it lacks."""
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(parts.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


@dataclass(frozen=True)
class Case:
    """A script, its arguments and its number of processes."""

    name: str
    script: str
    num_processes: int
    args: list[str]
    num_tokens: int | None = None  # of an iteration, where the case is a sequence length
    warmup: int = 1  # logged iterations left out of the time


#: The variant that Megatron's arguments refuse, and the runner's option that lifts the refusal.
LIFTED, LIFTING = "te-lifted", "--te-loss"


@dataclass(frozen=True)
class Run:
    """One launch: a variant of a case."""

    checkout: Checkout
    model: str
    case: Case
    variant: str
    variant_args: tuple[str, ...]
    device: str
    timeout_s: float

    @property
    def uses_plugin(self) -> bool:
        return FLAG in self.variant_args

    def words(self, megatron: str, torchrun: Sequence[str]) -> list[str]:
        """The command line, with `megatron` for the checkout's folder."""
        own, module = list[str](), list[str]()
        if self.device == "cpu":
            module = ["-m", "megatron_fused_ce.scripts.lib.megatron_cpu"]
        elif self.variant == LIFTED:
            own.append(LIFTING)
        elif self.uses_plugin:
            module = _LAUNCH_MODULE
        start = [*torchrun, "--nproc-per-node", str(self.case.num_processes)]
        start += [str(RUNNER), *own] if own else []
        script = f"{megatron}/{self.case.script}"
        return [*start, *module, script, *self.case.args, *self.variant_args]

    @property
    def max_connections(self) -> str:
        """CUDA_DEVICE_MAX_CONNECTIONS: tensor parallelism asks for 1, either FSDP refuses it."""
        return "8" if "fsdp" in " ".join(self.variant_args) else "1"

    @property
    def command(self) -> str:
        command = shlex.join(self.words("MEGATRON_LM", ["torchrun"])).replace(f"{REPOSITORY}/", "")
        connections = f"CUDA_DEVICE_MAX_CONNECTIONS={self.max_connections} "
        return connections * (self.max_connections != "1") + command

    @property
    def title(self) -> str:
        return f"{self.checkout.label} {self.model} {self.case.name} {self.variant}"

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.-]+", "_", self.title.replace(" ", "-"))

    def fingerprint(self) -> str:
        """Changes with anything the run's figures depend on."""
        files = [SCRIPTS / "lib" / "megatron_cpu.py"]
        if self.uses_plugin:  # kernels/ is a link in a checkout
            sources = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
            files += [file for file in sources if "scripts" not in file.relative_to(PACKAGE).parts]
        names = ("torch", "triton", "transformer-engine")
        allocator = [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
        software = f"{sys.version} {[version(name) for name in names]} {allocator}"
        digest = hashlib.sha256(f"{self.checkout.path} {self.command} {software}".encode())
        for file in sorted(files):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def earlier(self, output: Path) -> Figures | None:
        """The figures of an earlier, complete run of the same."""
        record = output / self.folder_name / RECORD
        content = json.loads(record.read_text()) if record.is_file() else {}
        figures = content.get("figures", {})
        complete = figures.get("status") in ("ok", "out of memory")
        return Figures(**figures) if complete and content["fingerprint"] == self.fingerprint() else None

    def execute(self, output: Path, fresh: bool = False) -> tuple[Figures, bool]:
        """Its figures, and whether they were there from an earlier run of the same, unless ``fresh``."""
        if not fresh and (earlier := self.earlier(output)) is not None:
            return earlier, True
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": self.max_connections}
        if self.device == "cpu":
            environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        folder, words = output / self.folder_name, self.words(str(self.checkout.path), torchrun)
        figures = start(words, folder, environment, cwd=folder).finish(self.timeout_s)
        if figures.status == "ok" and not figures.losses:
            figures.status = "no iteration in the log"
        record = {"command": self.command, "fingerprint": self.fingerprint()}
        text = json.dumps({**record, "figures": asdict(figures)}, indent=1)
        write_whole(folder / RECORD, f"{text}\n")
        return figures, False
