"""`make demo`: train a small GPT of Megatron's with and without the flag, on real text, and compare.

    python -m scripts.demo [--steps N] [--device cpu|cuda] [--out FOLDER]

1. reads Python sources that this machine already has and trains a BPE tokenizer on them;
2. trains megatron-core's GPTModel at tensor parallel 2 (`training.py`) by `megatron_fused_ce compare --launch
   --noise`: with the flag off, on, and with Megatron's native loss fusion. That command prints how far losses
   are apart, with the bounds of the noise, and draws the curves;
3. prints the memory beside it. Exit status 1 if the losses are not the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

from rich.console import Console

from megatron_fused_ce.cli.command_line import Parser, command, num_gpus, whole, writable_folder
from megatron_fused_ce.scripts.lib import tables
from megatron_fused_ce.scripts.lib.logs import Figures, log_texts, parse_logs
from megatron_fused_ce.scripts.runs import compare
from megatron_fused_ce.scripts.runs.real_text import byte_level_bpe

TP = 2
TEXT_LENGTH = 8 * 10**6  # of the Python library
LEARNT_NATS = 2.5  # what a run of full length must win over guessing
FULL_LENGTH = 100
#: Folders of compare's launches, and their names in the table.
RUNS = {"off": "flag off", "noise": "native fusion", "on": "flag on"}


def tokenise(vocab_size: int, folder: Path) -> int:
    """Train the tokenizer on Python's own library, write its token ids to tokens.npy; their number."""
    import numpy as np

    found, left = list[str](), TEXT_LENGTH  # the same on every machine, whatever is installed there
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left > 0 and not {"test", "site-packages"} & {*file.parts}:
            found.append(file.read_text(encoding="utf-8", errors="ignore"))
            left -= len(found[-1])
    tokenizer = byte_level_bpe(found, vocab_size)
    tokens = np.concatenate([np.asarray(of.ids, dtype=np.uint16) for of in tokenizer.encode_batch(found)])
    np.save(folder / "tokens.npy", tokens)
    return int(tokens.size)


def launch(options: argparse.Namespace) -> int:
    """`compare --launch --noise` of the training; its exit status."""
    on_cpu = options.device == "cpu"
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // TP)) if on_cpu else "1"
    if on_cpu:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}  # it would need a compiler
    words = ["--launch", "--noise", "--out", str(options.out), "--", sys.executable, "-m"]
    words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(TP)]
    words += [str(Path(__file__).with_name("training.py")), "--device", options.device]
    words += ["--tokens", str((options.out / "tokens.npy").resolve()), "--train-iters", str(options.steps)]
    exact = ["--first-bound", "1e-6"] if on_cpu else []  # in fp32
    return compare.main([*exact, *words, "--fused-ce-num-chunks", "8"])


def measured(folder: Path, marker: str) -> tuple[Figures, float]:
    """What a launch logged, and the peak of memory beside it, in MiB."""
    texts = list(log_texts(folder))
    (line,) = (line for text in texts for line in text.splitlines() if line.startswith(marker))
    return parse_logs(texts), float(line.removeprefix(marker))


def failures(on: Figures, peak: float, peak_off: float, vocab_size: int) -> list[str]:
    """What the demo promises beside equal losses and did not hold; each line says expected and found."""
    found, losses = [], on.losses["lm loss"]
    if on.logits_materialised:
        found.append(f"logits materialised: expected 0, got {on.logits_materialised}")
    if not 0 < peak < peak_off:
        found.append(f"peak memory: expected less than {peak_off:.1f} MiB and some, got {peak:.1f}")
    start, end = math.log(vocab_size), sum(losses[-10:]) / 10
    if len(losses) >= FULL_LENGTH and not end < start - LEARNT_NATS:
        found.append(f"loss: expected to fall by {LEARNT_NATS} from {start:.2f}, ended at {end:.2f}")
    return found


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = Parser("python -m scripts.demo", __doc__ or "")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=whole(20, 10**6), default=FULL_LENGTH, help="of each run [100]")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    options = parser.parse_args(words)
    here = num_gpus()
    if options.device == "auto":
        options.device = "cuda" if here >= TP else "cpu"
    if options.device == "cuda" and here < TP:
        parser.error(f"expected {TP} GPUs for --device cuda, found {here}: use --device cpu")
    return options


@command("demo")
def main(words: list[str]) -> int:
    options = parse_arguments(words)
    console, began = Console(highlight=False), time.perf_counter()
    writable_folder(options.out).mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("megatron") is None:
        console.print("demo: megatron-core is not installed: run `make demo`, which installs it")
        return 2
    from megatron_fused_ce.scripts.demo import training

    with console.status("reading Python sources, training the tokenizer"):
        num_tokens = tokenise(training.VOCAB, options.out)
    console.print(
        f"text: this machine's Python sources, {num_tokens / 1e6:.2f} M tokens of a vocabulary of "
        f"{training.VOCAB}; model: megatron-core GPTModel, {training.LAYERS} layers, hidden size "
        f"{training.HIDDEN}, TP {TP} on {'2 GPUs (bf16)' if options.device == 'cuda' else 'the CPU (fp32)'}",
        soft_wrap=True,
    )
    status = launch(options)
    if status not in compare.STATUS.values():
        return status
    of = {name: measured(options.out / name, training.MEASURED) for name in RUNS}
    table = tables.terminal("What it saves", ["", *RUNS.values()])
    what = "logits held" if options.device == "cpu" else "memory held"
    table.add_row(f"{what} at most per rank, MiB", *[f"{peak:.1f}" for _, peak in of.values()])
    console.print(table)
    problems = failures(*of["on"], of["off"][1], training.VOCAB)
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}", soft_wrap=True)
    console.print(f"loss curves: {options.out / 'compare_loss.png'} ({time.perf_counter() - began:.0f} s)")
    return status or int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
