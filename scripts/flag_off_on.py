"""One launch made twice, without the flag and with it: for the tools that compare the two.

The user's own command is given after ``--``; nothing but the flag differs between the two. A process
of torchrun writes a log of its own in the launch's folder, so lines of ranks do not mix.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compare_pretrain import PLUGIN_FLAG, REPOSITORY, VARIANTS, YARDSTICK, end_launch
from megatron_logs import Figures, UsageError, log_texts, parse_logs

_PLUGIN_WORDS = re.compile(r"--fused-(chunked-ce|ce-.+)")
#: Every launch would write there, and the next could go on from the first's checkpoint.
WRITTEN_BY_LAUNCHES = ("--save", "--tensorboard-dir", "--wandb-save-dir")
_RECORD = "command.txt"
POLL_S = 1.0
TAIL_BYTES = 65536


_LAUNCH_MODULE = ["-m", "megatron_fused_ce.launch"]


@dataclass(frozen=True)
class Command:
    """A launch's command line, in its parts."""

    launcher: list[str]  # torchrun and its options
    runner: list[str]  # ``-m MODULE ...`` that runs the script, where the user gave one
    script: list[str]  # the training script and its arguments, without the plugin's
    plugin: list[str]  # the plugin's flags

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
        modules = [
            i
            for i, (option, module) in enumerate(pairwise(words[:at]))
            if option in ("-m", "--module") and not module.startswith("torch.distributed")
        ]
        runner = modules[0] if modules else at
        script, plugin = split_plugin_words(words[at:])
        return Command(list(words[:runner]), list(words[runner:at]), script, plugin)

    @property
    def _flags(self) -> list[str]:
        return self.plugin if PLUGIN_FLAG in self.plugin else [*self.plugin, PLUGIN_FLAG]

    def off(self) -> list[str]:
        return [*self.launcher, *self.runner, *self.script]

    def on(self) -> list[str]:
        return [*self.launcher, *(self.runner or _LAUNCH_MODULE), *self.script, *self._flags]

    def other_stock(self) -> list[str]:
        """The stock launch with the loss computed another way: native, or unfused where it is fused."""
        fusion = "--cross-entropy-loss-fusion"
        if fusion in self.script:
            return [word for word in self.off() if word != fusion]
        return [*self.off(), *shlex.split(VARIANTS[YARDSTICK])]

    def through(self, runner: Sequence[str], flag: bool) -> list[str]:
        """With a script of ours that runs the training script, and installs the hook for the flag.

        Raises UsageError where the user's own module runs it.
        """
        if self.runner not in ([], _LAUNCH_MODULE):
            raise UsageError(f"leave out {' '.join(self.runner)}: give the training script alone")
        return [*self.launcher, *runner, *self.script, *(self._flags if flag else [])]


def refuse_shared_folders(words: Sequence[str]) -> None:
    """Raises UsageError where launches with these arguments would meet in a folder."""
    for name in WRITTEN_BY_LAUNCHES:
        if any(word == name or word.startswith(f"{name}=") for word in words):
            raise UsageError(f"leave out {name}: all launches would write to the same place")


def split_plugin_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A launch's arguments without the plugin's flags, and those flags."""
    rest: list[str] = []
    plugin: list[str] = []
    into = rest
    for word in words:
        if word.startswith("--"):
            into = plugin if _PLUGIN_WORDS.match(word) else rest
        into.append(word)
    return rest, plugin


def _last_iteration(folder: Path) -> str:
    """``iteration i/n`` of the newest line, '' before the first."""
    newest = ""
    for file in folder.rglob("*.log"):
        with open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - TAIL_BYTES))
            found = re.findall(rb"iteration +(\d+)/ *(\d+) \|", log.read())
        if found:
            newest = "iteration {}/{}".format(*(number.decode() for number in found[-1]))
    return newest


def prepare(folder: Path) -> None:
    """Make the folder of a launch, without what an earlier one left. Raises UsageError on another's."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _RECORD).is_file():
        raise UsageError(
            f"{folder} holds something that is no launch of this tool: choose another --out"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def launch(
    words: Sequence[str],
    folder: Path,
    timeout_s: float,
    progress: Callable[[str], None],
) -> Figures:
    """Run it to its end, logs in ``folder``; ``progress`` is told of each new iteration.

    Raises UsageError, in one line with the log's own error, where it fails.
    """
    prepare(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    (folder / _RECORD).write_text(shlex.join(words) + "\n")
    search = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # torchrun's own options, which stand in the environment where the command line lacks them.
    torchrun = {"PET_LOG_DIR": str(folder / "logs"), "PET_REDIRECTS": "3"}
    with open(folder / "torchrun.log", "w") as log:
        try:
            process = subprocess.Popen(
                words,
                env={**os.environ, "PYTHONPATH": search, **torchrun},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{words[0]}: {error.strerror}") from None
    try:
        status = _wait(process, folder, timeout_s, progress)
    finally:
        if process.poll() is None:
            end_launch(process)
    figures = parse_logs(log_texts(folder))
    if status:
        reason = f": {figures.error}" if figures.error else ""
        raise UsageError(f"the launch in {folder} {status}{reason}; its logs are there")
    return figures


def _wait(
    process: subprocess.Popen[bytes],
    folder: Path,
    timeout_s: float,
    progress: Callable[[str], None],
) -> str:
    """How it failed, '' where it did not."""
    end = time.monotonic() + timeout_s
    told = ""
    while time.monotonic() < end:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            now = _last_iteration(folder)
            if now != told:
                progress(now)
                told = now
            continue
        return f"failed with status {code}" if code else ""
    return f"was still running after {timeout_s:.0f} s"
