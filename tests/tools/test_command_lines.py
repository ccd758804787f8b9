"""Every command line: numbers out of bounds, no files, folders that cannot be written, closed pipes.

Each is one line on stderr and status 2, before anything is launched, imported for minutes or measured.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from megatron_fused_ce.__main__ import COMMANDS
from megatron_fused_ce.cli import command_line
from megatron_fused_ce.cli.command_line import number, whole
from tests.support.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
#: Behind `python -m`, or `python -m megatron_fused_ce`.
SCRIPTS = ["bench", "bench.trained", "runs.pretrain", "runs.real_text", "demo"]
READERS = [name for name in COMMANDS if name != "autoload"]
READERS += [*(f"scripts.{name}" for name in SCRIPTS), "tests.same_training", "tests.soak"]


def main_of(name: str) -> Callable[[list[str]], int]:
    """What reads a command's words."""
    module = COMMANDS[name][0] if name in COMMANDS else name
    package = "" if name.startswith("tests") else "megatron_fused_ce."
    inside = ".__main__" if name in ("scripts.bench", "scripts.demo") else ""
    return import_module(f"{package}{module}{inside}").main


def options_of(name: str) -> list[argparse.Action]:
    """Every option of a command."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", lambda parser, *_: sys.exit(parser))
        main_of(name)([])
    return ended.value.code._actions


@pytest.mark.parametrize("name", READERS)
def test_every_number_is_bounded(name):
    """No plain int or float: they know no ceiling, and float takes nan."""
    assert not [action.option_strings for action in options_of(name) if action.type in (int, float)]


def test_the_bounds_themselves():
    assert [whole()(text) for text in ("1", "1000000000", " 7 ", "+3")] == [1, 10**9, 7, 3]
    assert whole(-3, 3)("-3") == -3 and number()("0") == 0.0 and number(above=True)("1e-9") == 1e-9
    never = ("nan", "inf", "-inf", "1e999", "9" * 24, "-" + "9" * 24, "9" * 5000, "x", "")
    refused = [(parse, text) for text in never for parse in (whole(), number(), number(above=True))]
    refused += [(whole(), "0"), (whole(), "1.0"), (whole(), "1000000001"), (number(), "-1e-9")]
    for parse, text in (*refused, (number(above=True), "0"), (number(most=1), "1.1")):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
            parse(text)


LLAMA = "plan --model llama-3-8b --seq-length 4096"
SWEEP = "sweep --device cpu --tokens 32 --hidden 8 --vocab 64 --out out"
LAUNCHES = f"{SWEEP} --through-megatron megatron-lm --strategies recompute --chunks 4"
#: A command's line, and words of its answer. Other ranks say nothing.
REFUSED = f"""
{LLAMA} --moe-layer-freq [1]*1000000000 | is no number and no list of 0 and 1
plan --from-launch long.sh | long.sh has 1048577 bytes; at most 1048576 are read
plan --from-log /dev/zero --gpu h100-80gb | /dev/zero is no regular file
memory --out /dev/null/x -- torchrun x.py | cannot write to /dev/null/x
memory --draw latin-1 | latin-1 is no text file
memory --draw empty | empty
memory | give a launch after --, or --draw FILE
RANK=1 memory |
RANK=1 memory --what |
compare / /dev/null | holds more than 20000 files and folders
compare /dev/zero /dev/null | /dev/zero: no regular file or folder
compare two\vlines /dev/null | two lines: no regular file or folder
compare /proc/self/mem /dev/null | /proc
compare off.log x.py | has no iteration with a loss
compare off.log empty-folder | has no *.log files, nor TensorBoard event files
compare off.log above | event files are in
compare off.log above/run | install tensorboard
compare off.log runs | holds logs of several runs
compare off.log late.log | no loss over the same iterations (off.log 1 to 1, late.log 90
compare off.log | give two runs, and at most one by
compare off.log late.log --against-noise x y | at most one by --against-noise
compare off.log ./runs/../off.log | a run is given twice
compare --paired runs a b | with --paired two names, and others by
compare --paired runs a b --against-noise c | no run NAME-SEED of b, c is beside a
compare --launch off.log -- torchrun x.py | --launch makes the runs itself
compare --launch -- bash train.sh | give the launch itself
compare --launch --out above -- torchrun x.py | choose another --out
compare --launch -- torchrun nowhere.py | no training script nowhere.py
compare --launch -- torchrun x.py --tensorboard-dir=x | leave out --tensorboard-dir
tests.soak | torchrun --nproc-per-node
scripts.bench --strategies store:x | chunk_tokens must be a whole number
scripts.bench --strategies store/scaled_exp/gemm_rows | two backends, or two merges
scripts.bench --shapes 0x64 | no model '0x64'
scripts.bench --shapes tiny:0 | expected numbers of tokens behind the colon
scripts.bench --preset trained | --preset trained needs --operands
scripts.bench --preset commits --old empty-folder | empty-folder/megatron_fused_ce/__init__.py is no file
scripts.bench --device cpu --shapes tiny --operands empty | empty has no operands of tiny
WORLD_SIZE=2 scripts.bench --device cpu --shapes 64x511 | does not divide over 2 ranks
WORLD_SIZE=2 scripts.bench --device cpu --preset rl | --preset rl knows no tensor parallelism
scripts.bench.trained made.pt --device cpu --text empty-folder | too little text for --tokens
sweep --device cuda --out out | expected 1 GPUs, found 0: use --device cpu
{SWEEP} --chunks 4 33 | expected --chunks from 1 to 32, got 33
{SWEEP} -- --num-layers 2 | arguments after -- are those of --through-megatron
{SWEEP} --through-megatron nowhere -- --bf16 | no Megatron-LM checkout at nowhere
{SWEEP} --through-megatron x --warmup 10 | expected fewer --warmup than --iterations
WORLD_SIZE=2 {SWEEP} --vocab 63 | expected --vocab to divide by 2 ranks, got 63
WORLD_SIZE=2 {SWEEP} --sequence-parallel --tokens 33 | expected --tokens to divide by 2 ranks, got 33
WORLD_SIZE=2 {LAUNCHES} -- --bf16 | --through-megatron starts its ranks itself
{LAUNCHES} -- --save x | leave out --save: all launches would write to the same place
{LAUNCHES} -- --fused-ce-z-loss=1e-4 | leave out --fused-ce-z-loss=1e-4: the stock launches
{LAUNCHES} --script pretrain_t5.py -- --bf16 | has no pretrain_t5
{LAUNCHES} -- torchrun pretrain_gpt.py --bf16 | from its first --option on
scripts.runs.pretrain --megatron=/nowhere | no Megatron-LM checkout at /nowhere
scripts.runs.pretrain --megatron=megatron-lm --megatron=megatron-lm/ | folders of different names
scripts.runs.pretrain --megatron=megatron-lm --variants=other | no other; there are unfused, native
"""


FILES = dict.fromkeys(("empty", "x.py", "empty-folder/x", "above/off/x", "above/run/out.tfevents.1"), "")
FILES |= {"latin-1": "\xff", "long.sh": "#" * (2**20 + 1)}
LINE = " iteration {}/ 99 | lm loss: 5.0 |\n"
FILES |= dict.fromkeys(("off.log", "runs/a-1/out.log", "runs/a-2/out.log"), LINE.format(1))
FILES |= dict.fromkeys(("late.log", "runs/b-1/out.log"), LINE.format(90))


@pytest.mark.parametrize("row", REFUSED.strip().split("\n"))
def test_what_is_refused_is_one_line_and_writes_nothing(row, tmp_path, monkeypatch, fake_checkout):
    line, _, said = row.partition(" |")
    name, *words = line.split(" ")
    if "=" in name:
        monkeypatch.setenv(*name.split("="))
        name, *words = words
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(text.encode("latin-1"))
    before = sorted(tmp_path.rglob("*"))
    done = run_here(main_of(name), *words)
    assert done.returncode == 2 and done.stdout == "" and said.strip() in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == bool(said) and sorted(tmp_path.rglob("*")) == before, done.stderr


#: A line, and words of its refusal.
AT_ONCE = dict.fromkeys((f"megatron_fused_ce {name} --help" for name in COMMANDS), "") | {
    "megatron_fused_ce no-such-command": "no-such-command",
    "megatron_fused_ce compare off.log on.log": "compare needs rich: pip install rich",
    "megatron_fused_ce sweep --device cpu --out /dev/null/x": "cannot write to /dev/null/x",
    "scripts.bench --device cpu --out /dev/null/x.json": "cannot write to /dev/null",
    "scripts.demo --out /dev/null/x": "cannot write to /dev/null/x",
}


@pytest.mark.parametrize("line", AT_ONCE)
def test_help_and_refusals_come_at_once(line, tmp_path):
    """Without rich and matplotlib, which `pip install .` leaves out; what needs them says so in one line."""
    for module in ("rich", "matplotlib"):
        (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(name='{module}')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    how = {"cwd": ROOT if line.startswith("scripts") else tmp_path, "env": environment, "timeout": 60}
    words, began = [sys.executable, "-m", *line.split()], time.monotonic()
    done = subprocess.run(words, **how, input="", capture_output=True, text=True)
    assert time.monotonic() - began < 5.0, "most of it is Python's start"
    if line.endswith("--help"):
        assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr
    else:
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
        assert AT_ONCE[line] in done.stderr


def test_a_closed_pipe_ends_quietly():
    """The reader is gone before the first line. rich has its own way to end there."""
    line = f"{sys.executable} -m megatron_fused_ce {LLAMA} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, 1, command_line.PIPE_CLOSED)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "README.md"]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if "benchmarks" not in path.parts)
NOT_READ = {"", "autoload", "scripts.dev.figures", "scripts.dev.known_forms"}


def test_every_command_of_the_documentation_exists():
    """With each of its options, up to a `--` or the words of a launch behind it."""
    pattern = re.compile(r"-m (?:(scripts\.[\w.]+)|megatron_fused_ce(?: ([a-z][a-z-]*))?)([^`#\n]*)")
    options, seen = {name: options_of(name) for name in READERS}, set()
    for page in PAGES:
        for module, ours, rest in pattern.findall(page.read_text().replace("\\\n", " ")):
            name, where = module or ours, f"{page.name}: -m {module or ours}{rest}"
            seen.add(name)
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() or not module, where
            assert name in READERS or name in NOT_READ, where
            own = re.split(r"\s--\s|\s--$|\"", rest)[0]
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", own) if name in READERS else ():
                assert any(option in action.option_strings for action in options[name]), where
    assert len(seen) > 12
