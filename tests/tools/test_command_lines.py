"""Every command line: numbers out of bounds, no files, folders that cannot be written, closed pipes.

Each is one line on stderr and status 2, before anything is launched, imported for minutes or measured.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_fused_ce.__main__ import COMMANDS
from megatron_fused_ce.cli import command_line
from megatron_fused_ce.cli.command_line import Parser, UsageError, command, number, whole
from megatron_fused_ce.plan import command as plan
from megatron_fused_ce.plan import head_command
from megatron_fused_ce.scripts.bench import cases, commits, trained
from megatron_fused_ce.scripts.demo import __main__ as demo
from megatron_fused_ce.scripts.runs import compare, memory, pretrain, real_text, selfcheck, sweep
from tests import same_training, soak

ROOT = Path(__file__).resolve().parents[2]
#: The most a refusal may take: most of it is Python's start.
MOST_SECONDS = 5.0

Parse = Callable[[Sequence[str]], object]
#: Command -> what reads its words, and the words it cannot do without.
READERS: dict[str, tuple[Parse, list[str]]] = {
    "plan": (plan.main, ["--model", "llama-3-8b", "--seq-length", "4096"]),
    "plan-head": (head_command.main, ["--tokens", "64", "--hidden", "64", "--vocab", "64"]),
    "compare": (compare.main, ["a", "b"]),
    "memory": (memory.main, []),
    "sweep": (sweep.main, []),
    "selfcheck": (selfcheck.main, []),
    "bench": (lambda words: cases.parse_arguments("", words), []),
    "bench.commits": (commits.main, ["--old", "nowhere"]),
    "bench.trained": (trained.main, ["operands.pt"]),
    "pretrain": (pretrain.main, ["--megatron", "nowhere"]),
    "real_text": (real_text.main, ["--megatron", "nowhere"]),
    "same_training": (same_training.main, ["--megatron", "nowhere", "--data", "nowhere"]),
    "soak": (soak.main, []),
    "demo": (demo.main, []),
}


class Options(Exception):
    """Carries a parser out of the command that made it."""


def options_of(name: str) -> list[argparse.Action]:
    """Every option of a command."""
    read, _ = READERS[name]

    def stop(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> object:
        raise Options(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(Options) as found:
            read([])
    return found.value.args[0]._actions


@pytest.mark.parametrize("name", READERS)
def test_every_number_is_bounded(name):
    """No plain int or float: they know no ceiling, and float takes nan."""
    actions = options_of(name)
    assert len(actions) > 2, "the options were found"
    for action in actions:
        assert action.type not in (int, float), action.option_strings


def test_the_bounds_themselves():
    assert [whole()(text) for text in ("1", "1000000000", " 7 ", "+3")] == [1, 10**9, 7, 3]
    assert whole(-3, 3)("-3") == -3 and whole(0)("0") == 0
    assert number()("0") == 0.0 and number(above=True)("1e-9") == 1e-9 and number(most=1)("1") == 1.0
    never = ("nan", "inf", "-inf", "1e999", "9" * 24, "-" + "9" * 24, "9" * 5000, "x", "")
    refused = [(parse, text) for text in never for parse in (whole(), number(), number(above=True))]
    refused += [(whole(), "0"), (whole(), "1.0"), (whole(), "1000000001"), (number(), "-1e-9")]
    for parse, text in (*refused, (number(above=True), "0"), (number(most=1), "1.1")):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
            parse(text)


# --- whole processes -------------------------------------------------------------------------


def run(*words: str, cwd: Path, stdin: object = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, timed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=environment, stdin=stdin,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - began < MOST_SECONDS, words
    return done


PLAN = "megatron_fused_ce plan --model llama-3-8b --seq-length 4096"
HEAD = "megatron_fused_ce plan-head --hidden 4096 --vocab 128256"


@pytest.mark.parametrize(
    "line",
    [
        f"{PLAN} --gpu-memory inf",
        f"{PLAN} --gpus 0",
        f"{PLAN} --moe-layer-freq [1]*10**9",
        f"{PLAN} --num-experts 8 --moe-layer-freq [1]*1000000000",
        f"{PLAN} --moe-layer-freq [[1]*99999]*99999",
        f"{PLAN} --moe-layer-freq {'(' * 5000}",
        f"{HEAD} --tokens 0",
        f"{HEAD} --tokens 64 --num-chunks 2 --chunk-tokens 3",
        "megatron_fused_ce plan --from-launch /dev/zero",
        "megatron_fused_ce plan --from-log /dev/zero",
        "megatron_fused_ce memory --draw /dev/zero",
        "megatron_fused_ce compare /dev/zero /dev/zero",
        "megatron_fused_ce compare / /",
        "megatron_fused_ce compare /proc/self/mem /dev/null",
        "megatron_fused_ce memory --out /dev/null/x -- torchrun x.py",
        "megatron_fused_ce sweep --tokens 64 --hidden 32 --vocab 64 --device cpu --out /dev/null/x",
        "scripts.bench --device cpu --dtype float32 --shapes tiny --out /dev/null/x.json",
        "scripts.demo --out /dev/null/x",
        "megatron_fused_ce no-such-command",
    ],
)
def test_bad_input_is_one_line_and_status_2_at_once(line, tmp_path):
    words = line.split()
    cwd = ROOT if words[0].startswith("scripts") else tmp_path
    done = run(*words, cwd=cwd)
    assert done.returncode == 2, done.stderr[-500:]
    assert len(done.stderr.splitlines()) == 1 and done.stdout == "", done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    "line", [PLAN, f"{HEAD} --tokens 8192", f"{PLAN} --json", "megatron_fused_ce plan --help"]
)
def test_a_closed_pipe_ends_quietly(line, tmp_path):
    """Of `| head -c 0`: the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *line.split()], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    # argparse and rich have their own ways to end there.
    assert done.stderr == "" and done.returncode in (0, 1, command_line.PIPE_CLOSED)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_neither_rich_nor_matplotlib(name, tmp_path):
    """As `pip install .` leaves them out; what does need them says so in one line."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('No module named rich', name='rich')")
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    done = run("megatron_fused_ce", name, "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr
    if name == "compare":
        refused = run("megatron_fused_ce", name, "off.log", "on.log", cwd=tmp_path)
        assert (refused.returncode, refused.stderr) == (
            2,
            "megatron_fused_ce: compare needs rich: pip install rich\n",
        )


class MakesAFolder:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self):
        return os.mkdir, (str(self.trap),)


@pytest.mark.parametrize("line", ["memory --draw {0}", "compare {0} {0}"])
def test_a_pickle_is_refused_and_never_run(tmp_path, line):
    """An evil one of torch's allocator; tests/test_house.py keeps all that could run it out of the source."""
    trap, path = tmp_path / "it-ran", tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [MakesAFolder(trap)], "device_traces": [[]]}))
    subprocess.run([sys.executable, "-m", "pickle", path], check=True, capture_output=True)
    trap.rmdir()  # it does run where it is unpickled
    done = run("megatron_fused_ce", *line.format(path).split(), cwd=tmp_path)
    assert not trap.exists() and done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


# --- the frame -------------------------------------------------------------------------------


def test_other_ranks_say_nothing(monkeypatch, capsys):
    @command("tool")
    def main(words: list[str]) -> int:
        Parser("tool").parse_args(words)
        raise UsageError("two\nlines")

    assert main([]) == 2 and capsys.readouterr().err == "tool: two lines\n"
    monkeypatch.setenv("RANK", "1")
    assert main([]) == main(["--what"]) == 2 and capsys.readouterr().err == ""


def test_only_regular_files_of_some_size_are_read(tmp_path):
    (tmp_path / "text").write_text("1234")
    assert command_line.read_text(tmp_path / "text") == "1234"
    with pytest.raises(UsageError, match="has 4 bytes; at most 3"):
        command_line.read_text(tmp_path / "text", 3)
    with pytest.raises(UsageError, match="no regular file"):
        command_line.read_text(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no text file"):
        command_line.read_text(tmp_path / "binary")


# --- the documentation -----------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "README.md"]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if "benchmarks" not in path.parts)
#: Module -> its name in READERS.
OF_BENCH = ("bench", *(f"bench.{name}" for name in ("commits", "trained")))
MODULES = {f"scripts.{name}": name for name in (*OF_BENCH, "demo")}
MODULES |= {f"scripts.runs.{name}": name for name in ("pretrain", "real_text")}
NOT_READ = {"autoload"} | {f"scripts.dev.{name}" for name in ("figures", "known_forms")}


def named_commands() -> list[tuple[str, str, str]]:
    """(page, command, the rest of its line) of every command that a page names, in code."""
    found = []
    pattern = re.compile(r"-m (megatron_fused_ce(?: [a-z][a-z-]*)?|scripts\.[\w.]+)([^`#\n]*)")
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for module, rest in pattern.findall(text):
            found.append((page.relative_to(ROOT).as_posix(), module, rest))
    return found


def test_every_command_of_the_documentation_exists():
    """With each of its options, up to a `--` or the words of a launch behind it."""
    commands = named_commands()
    assert len({module for _, module, _ in commands}) > 12
    known: dict[str, set[str]] = {}
    for page, module, rest in commands:
        where = f"{page}: -m {module}{rest}"
        package, _, command_name = module.partition(" ")
        if package == "megatron_fused_ce":
            assert not command_name or command_name in COMMANDS, where
            name = command_name
        else:
            path = ROOT / package.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), where
            name = MODULES.get(package, package)
        if name not in READERS:
            assert name in {*NOT_READ, ""}, where
            continue
        if name not in known:
            known[name] = {word for action in options_of(name) for word in action.option_strings}
        own = re.split(r"\s--\s|\s--$|\"", rest)[0]
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", own):
            assert option in known[name], where
