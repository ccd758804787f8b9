"""`make demo`: train a small GPT of Megatron's with and without the flag, on real text, and compare.

    python -m scripts.demo [--steps N] [--device cpu|cuda] [--out FOLDER]

1. reads Python sources that this machine already has and trains a BPE tokenizer on them;
2. trains megatron-core's GPTModel at tensor parallel 2 three times (`training.py`): stock,
   with Megatron's native fused cross entropy, and with `megatron_fused_ce`;
3. prints the table, draws both loss curves, and exits 1 if the losses are not the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_fused_ce.command_line import Parser, command, num_gpus, whole, writable_folder
from megatron_fused_ce.scripts.demo.job import MIB, Job, Run
from megatron_fused_ce.scripts.lib import pictures, tables

TP = 2
NUM_FIRST_STEPS = 10
FIRST_STEPS_BOUND = 1e-6  # relative, fp32
WHOLE_RUN_FACTOR = 2.0  # times what Megatron's native loss differs from its unfused one
LEARNT_NATS = 2.5  # what a run of full length must win over guessing

# About 0.5 s a step on 2 CPU cores. A rank's logits take 32 MiB, its largest weight 3 MiB.
CPU_JOB = Job(
    device="cpu",
    tokens="",
    results="",
    vocab_size=8192,
    num_layers=2,
    hidden_size=192,
    num_heads=4,
    seq_length=128,
    micro_batch=16,
    num_steps=100,
    num_chunks=8,
    learning_rate=1.5e-3,
)
GPU_JOB = replace(
    CPU_JOB,
    device="cuda",
    vocab_size=32768,
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    seq_length=512,
    micro_batch=24,  # T must not be the rows of a shard: the tracker tells logits by their shape
    num_steps=200,
    learning_rate=1e-3,
)


def _folder_of_torch() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return os.path.dirname(spec.origin)


def python_sources(num_bytes: int) -> Iterator[str]:
    """Text of the Python library, then of the installed packages, up to `num_bytes` of UTF-8."""
    paths = sysconfig.get_paths()
    left = num_bytes
    seen = set()
    for folder in (paths["stdlib"], paths["purelib"], os.path.dirname(_folder_of_torch())):
        for pattern in ("*.py", "*.rst", "*.txt"):
            for file in sorted(Path(folder).rglob(pattern)):
                if file in seen or "test" in file.parts or "lib2to3" in file.parts:
                    continue
                seen.add(file)
                try:
                    text = file.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                yield text
                left -= len(text)
                if left <= 0:
                    return


def tokenise(job: Job, folder: Path) -> tuple[int, int]:
    """Train the tokenizer and write the text's token ids; returns (characters, tokens)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(python_sources((8 if job.device == "cpu" else 48) * MIB))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=job.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != job.vocab_size:
        raise SystemExit(
            f"demo: expected text for {job.vocab_size} tokens, but only "
            f"{tokenizer.get_vocab_size()} could be learned from {sum(map(len, texts))} characters"
            " of Python sources: use a Python with its standard library as files"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    ids = [[*encoding.ids, end_of_text] for encoding in tokenizer.encode_batch(texts)]
    tokens = np.concatenate([np.asarray(part, dtype=np.uint16) for part in ids])
    np.save(job.tokens, tokens)
    return sum(map(len, texts)), tokens.size


def launch(job: Job, job_file: Path) -> list[Run]:
    job_file.write_text(json.dumps(asdict(job), indent=1))
    num_threads = max(1, (os.cpu_count() or 1) // TP)
    environment = dict(os.environ, OMP_NUM_THREADS=str(num_threads), PYTHONWARNINGS="ignore")
    if job.device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"  # nothing to gain, and it would need a compiler
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(TP), "-m", "megatron_fused_ce.scripts.demo.training"]
    if subprocess.run([*command, str(job_file)], env=environment, check=False).returncode != 0:
        raise SystemExit("demo: the training stopped; the reason is printed above")
    return [Run(**measured) for measured in json.loads(Path(job.results).read_text())]


def differences(run: Run, stock: Run) -> tuple[np.ndarray, np.ndarray]:
    """Absolute and relative difference from the stock run's loss, step by step."""
    absolute = np.abs(np.array(run.losses) - np.array(stock.losses))
    return absolute, absolute / np.abs(np.array(stock.losses))


def tokens_per_second(job: Job, run: Run) -> float:
    """From the median step after the first three, which warm up."""
    return job.step_tokens / (float(np.median(run.step_ms[3:])) / 1e3)


def print_table(console: Console, job: Job, runs: list[Run]) -> None:
    stock, _, fused = runs
    titles = {"stock": "flag off", "native": "native fusion", "fused": "flag on"}
    title = "Flag off, Megatron's native fusion, flag on"
    table = tables.terminal(title, ["", *(titles[run.name] for run in runs)])

    def against_stock(which: int, steps: slice) -> list[str]:
        return ["-"] + [f"{differences(run, stock)[which][steps].max():.2e}" for run in runs[1:]]

    whole, first = slice(None), slice(0, NUM_FIRST_STEPS)
    table.add_row("loss, first step", *[f"{run.losses[0]:.6f}" for run in runs])
    table.add_row("loss, last step", *[f"{run.losses[-1]:.6f}" for run in runs])
    table.add_row("loss, last 10 steps", *[f"{np.mean(run.losses[-10:]):.6f}" for run in runs])
    table.add_row("largest difference from flag off", *against_stock(0, whole))
    table.add_row("  relative", *against_stock(1, whole))
    table.add_row(f"  relative, first {NUM_FIRST_STEPS} steps", *against_stock(1, first))
    peaks = [run.logits_peak_bytes for run in runs]
    table.add_row("logits held at most per rank, MiB", *[f"{peak / MIB:.1f}" for peak in peaks])
    table.add_row("  of flag off's", *[f"{peak / peaks[0]:.0%}" for peak in peaks])
    if job.device == "cuda":
        device_peaks = [f"{run.device_peak_bytes / MIB:.0f}" for run in runs]
        table.add_row("peak of all memory per GPU, MiB", *device_peaks)
    table.add_row("tokens/s", *[f"{tokens_per_second(job, run):.0f}" for run in runs])
    console.print(table)
    console.print(
        f"heads evaluated fused: {fused.heads_fused}, logits materialised: "
        f"{fused.logits_materialised}, heads on the stock path: {fused.heads_stock}"
    )


def plot(job: Job, runs: list[Run], path: Path) -> None:
    plt = pictures.pyplot()
    stock, native, fused = runs
    steps = np.arange(1, job.num_steps + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6.5), height_ratios=[3, 2], layout="constrained"
    )
    top.plot(steps, stock.losses, color="#9ecae1", linewidth=6, label="flag off (unfused)")
    top.plot(steps, fused.losses, color="#08306b", linewidth=1.5, label="flag on")
    top.set_ylabel("loss")
    where = "bf16, 2 GPUs" if job.device == "cuda" else "fp32, CPU"
    top.set_title(
        f"GPTModel, tensor parallel {TP}, vocabulary {job.vocab_size}, {where}\n"
        f"logits held at most, per rank: {stock.logits_peak_bytes / MIB:.1f} MiB off, "
        f"{fused.logits_peak_bytes / MIB:.1f} MiB on",
        fontsize=11,
    )
    top.legend(frameon=False)
    for run, color, label in (
        (native, "#e6550d", "Megatron's native fusion against flag off"),
        (fused, "#08306b", "flag on against flag off"),
    ):
        relative = differences(run, stock)[1]
        shown = np.where(relative > 0, relative, np.nan)  # a log axis has no zero
        bottom.plot(steps, shown, ".-", color=color, linewidth=1, markersize=4, label=label)
    bottom.set_yscale("log")
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    pictures.save(figure, path)


def failures(job: Job, runs: list[Run]) -> list[str]:
    """What the demo promises and did not hold; each line says expected and found."""
    stock, native, fused = runs
    relative = differences(fused, stock)[1]
    allowed = WHOLE_RUN_FACTOR * differences(native, stock)[1].max()
    found = []
    if job.device == "cpu" and not relative[:NUM_FIRST_STEPS].max() < FIRST_STEPS_BOUND:
        found.append(
            f"relative loss difference of the first {NUM_FIRST_STEPS} steps: expected below "
            f"{FIRST_STEPS_BOUND:.0e}, got {relative[:NUM_FIRST_STEPS].max():.2e}"
        )
    if not relative.max() <= allowed:
        found.append(
            f"relative loss difference of the run: expected at most {allowed:.2e} "
            f"({WHOLE_RUN_FACTOR:g} times native's), got {relative.max():.2e}"
        )
    if fused.heads_fused == 0:
        found.append("heads evaluated fused: expected one for each step, got 0")
    if fused.logits_materialised > 0:
        found.append(f"logits materialised: expected 0, got {fused.logits_materialised}")
    found += [f"{run.name}: the tracker saw no logits at all" for run in runs if not run.logits_storages]
    if not fused.logits_peak_bytes < stock.logits_peak_bytes:
        found.append(
            f"peak bytes of logits: expected fewer than stock's {stock.logits_peak_bytes}, got "
            f"{fused.logits_peak_bytes}"
        )
    uniform = math.log(job.vocab_size)
    end = float(np.mean(fused.losses[-10:]))
    if job.num_steps >= CPU_JOB.num_steps and not end < uniform - LEARNT_NATS:
        found.append(
            f"loss: expected to fall by {LEARNT_NATS} from ln(vocabulary) = {uniform:.2f}, ended at {end:.2f}"
        )
    return found


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = Parser("python -m scripts.demo", __doc__ or "")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=whole(NUM_FIRST_STEPS, 10**6), help="training steps of each run")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    arguments = parser.parse_args(words)
    here = num_gpus()
    if arguments.device == "auto":
        arguments.device = "cuda" if here >= TP else "cpu"
    if arguments.device == "cuda" and here < TP:
        parser.error(f"expected {TP} GPUs for --device cuda, found {here}: use --device cpu")
    return arguments


@command("demo")
def main(words: list[str]) -> int:
    arguments = parse_arguments(words)
    console = Console(highlight=False)
    started = time.perf_counter()
    writable_folder(arguments.out).mkdir(parents=True, exist_ok=True)
    job = replace(
        GPU_JOB if arguments.device == "cuda" else CPU_JOB,
        tokens=str(arguments.out / "tokens.npy"),
        results=str(arguments.out / "runs.json"),
    )
    if arguments.steps is not None:
        job = replace(job, num_steps=arguments.steps)

    if importlib.util.find_spec("megatron") is None:
        console.print("demo: megatron-core is not installed: run `make demo`, which installs it")
        return 2
    with console.status("reading Python sources, training the tokenizer"):
        num_characters, num_tokens = tokenise(job, arguments.out)
    console.print(
        f"text: {num_characters / 1e6:.1f} M characters of this machine's Python sources, "
        f"{num_tokens / 1e6:.2f} M tokens of a vocabulary of {job.vocab_size}",
        soft_wrap=True,
    )
    console.print(
        f"model: megatron-core GPTModel, {job.num_layers} layers, hidden size {job.hidden_size}, "
        f"{job.step_tokens} tokens a step, tensor parallel {TP} on "
        + ("2 GPUs (bf16, NCCL)" if job.device == "cuda" else "the CPU (fp32, gloo)"),
        soft_wrap=True,
    )
    runs = launch(job, arguments.out / "job.json")
    print_table(console, job, runs)
    picture = arguments.out / "losses.png"
    plot(job, runs, picture)
    shown = picture.relative_to(Path.cwd()) if picture.is_relative_to(Path.cwd()) else picture
    console.print(f"both loss curves: {shown}", soft_wrap=True)
    problems = failures(job, runs)
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}", soft_wrap=True)
    if not problems:
        console.print(f"[green]the losses agree[/green] ({time.perf_counter() - started:.0f} s)")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
