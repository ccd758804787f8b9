"""Is it the same training? Seeds times ways of computing the loss, on real text, and errors on purpose.

    python -m scripts.runs.real_text --megatron ~/Megatron-LM --out build/text
    python -m tests.same_training --megatron ~/Megatron-LM --data build/text/real_text_document

Launches an unmodified pretrain_gpt.py: 135 M parameters (12 layers of H 768, tied, V 65,024), 1,000 steps of
8,192 tokens, several runs a GPU: losses are not times. Megatron's words after -- go to each run. Runs of a
seed begin with the same weights and see the same tokens. Then with the flag and an error in the middle one
of its chunks, or everywhere (`PLANTS`), which should be seen. Of Megatron-LM 0.17, which has TE's loss.
Each run's logs stay in OUT/NAME-SEED; `compare --paired` says what came of them, and draws it.

    torchrun ... -m tests.same_training plant NAME -m megatron_fused_ce.launch pretrain_gpt.py ...

is one launch with an error. Exit status: as `compare --paired` of the flag.
"""

from __future__ import annotations

import importlib
import runpy
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.cli.command_line import NO_LIMIT, Parser, command, seconds, whole, writable_folder
from megatron_fused_ce.scripts.lib import gpu, launches, results
from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, REFERENCE, STOCK, Started
from megatron_fused_ce.scripts.runs import compare

CHUNKS = "--fused-ce-num-chunks"
TRAINING = """
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --seq-length 512
    --max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 16 --vocab-size 65023 --bf16
    --train-iters 1000 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0
    --weight-decay 0.1 --adam-beta2 0.95 --tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0
    --eval-interval 100000 --log-interval 1 --num-workers 0 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --no-create-attention-mask-in-dataloader --transformer-impl local --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""
CPU = "--distributed-backend gloo --use-cpu-initialization --attention-backend unfused"


# --- what is wrong on purpose ------------------------------------------------------------------


def _changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor itself; its gradient is changed by a function."""
    made = tensor.view_as(tensor)
    made.register_hook(change)
    return made


def _middle(call: Any) -> slice:
    """Of ``hidden`` [s, b, H]: the positions of the chunk in the middle."""
    positions, num_chunks = call.hidden.shape[0], int(sys.argv[sys.argv.index(CHUNKS) + 1])
    return slice(positions // 2, positions // 2 + max(1, positions // num_chunks))


def _no_grad_hidden(head: Callable[[Any], Any], call: Any) -> Any:
    rows = torch.arange(len(call.hidden), device=call.hidden.device)[_middle(call)]
    hidden = _changed(call.hidden, lambda grad: grad.index_fill(0, rows, 0.0))
    return head(call._replace(hidden=hidden))


def _no_grad_weight(head: Callable[[Any], Any], call: Any) -> Any:
    """As three calls, the one in the middle of a detached weight."""
    chunk, outputs = _middle(call), []
    for part in (slice(0, chunk.start), chunk, slice(chunk.stop, None)):
        labels, weights = call.labels[:, part].contiguous(), call.token_weights
        weight = call.weight.detach() if part == chunk else call.weight
        weights = weights if weights is None else weights[:, part].contiguous()
        outputs.append(head(call._replace(
            hidden=call.hidden[part], weight=weight, labels=labels, token_weights=weights)))  # fmt: skip
    of_all = {name: torch.cat([out.outputs[name] for out in outputs], 1) for name in outputs[0].outputs}
    return outputs[0]._replace(outputs=of_all)


def _shifted_labels(head: Callable[[Any], Any], call: Any) -> Any:
    labels = call.labels.flatten()
    shifted = labels.clone()
    shifted[:-1:100] = labels[1::100]
    return head(call._replace(labels=shifted.view(call.labels.shape)))


def _noise(size: float) -> Callable[..., Any]:
    """Every element of both gradients off by this relative error, at random."""

    def change(grad: Tensor) -> Tensor:
        return grad * (1 + size * torch.randn_like(grad))

    def noisy(head: Callable[[Any], Any], call: Any) -> Any:
        return head(call._replace(hidden=_changed(call.hidden, change), weight=_changed(call.weight, change)))

    return noisy


#: In the order in which they are run, since time may run out.
PLANTS: dict[str, Callable[..., Any]] = {
    "no-grad-weight": _no_grad_weight,
    "no-grad-hidden": _no_grad_hidden,
    "labels": _shifted_labels,
    **{f"noise-{size:g}": _noise(size) for size in (0.3, 0.1, 1.0, 0.03)},
}


def plant(name: str, module: str, words: list[str]) -> None:
    """Run a module as __main__ with the error in what the adapter calls for a head's loss."""
    of_head = importlib.import_module("megatron_fused_ce.head.autograd")
    head, wrong = of_head.linear_cross_entropy, PLANTS[name]
    # Before the adapter's output layer takes it from there.
    vars(of_head)["linear_cross_entropy"] = lambda call: wrong(head, call)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# --- the launches ------------------------------------------------------------------------------


def words_of(options: Any, run: str, more: list[str]) -> list[str]:
    name, _, seed = run.rpartition("-")
    on_cpu, error = options.device == "cpu", name.removeprefix("planted-")
    module = ["-m", "megatron_fused_ce.scripts.lib.megatron_cpu"] if on_cpu else []
    flags, ranks = STOCK.get(name, f"{FLAG} {CHUNKS} {options.chunks}"), options.tensor_parallel
    flags += f" {NO_FUSED_WGRAD}" if ranks == 1 else f" --tensor-model-parallel-size {ranks}"
    if name not in STOCK:
        module = module or ["-m", "megatron_fused_ce.launch"]
    if error in PLANTS:
        module = ["-m", "tests.same_training", "plant", error, *module]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*start, *module, str(options.megatron / "pretrain_gpt.py")]
    words += shlex.split(f"{TRAINING} {CPU if on_cpu else ''} --seed {seed} {flags}") + more
    # Megatron writes the order of the tokens there; runs of one seed that begin together would meet.
    cache = str(options.out / run / "cache")
    return [*words, "--data-path", str(options.data), "--data-cache-path", cache]


def launch_all(options: Any, runs: list[str], more: list[str]) -> dict[str, str]:
    """What came of each run that was begun; several at a time on each device.

    None is begun where less time is left than the longest has taken.
    """
    ranks, begun, longest = options.tensor_parallel, time.monotonic(), 0.0
    num_places = max(1, torch.cuda.device_count() // ranks)
    waiting, came = list(runs), dict[str, str]()
    running: dict[int, tuple[str, Started, float]] = {}
    while waiting or running:
        left = options.time_limit - (time.monotonic() - begun)
        for slot in range(num_places * options.slots):
            if slot in running and (running[slot][1].process.poll() is not None or left <= 0):
                run, started, since = running.pop(slot)
                took = time.monotonic() - since
                figures = started.finish(launches.POLL_S / 1e3)
                time_ms, _ = figures.time_ms(len(figures.iteration_times_ms) // 2)
                came[run] = f"{figures.status} {figures.error}, {took:.0f} s, {time_ms} ms an iteration"
                print(f"{time.monotonic() - begun:.0f} s {run}: {came[run]}", flush=True)
                longest = max(longest, took)
            if slot in running or not waiting or longest > left:
                continue
            run, first = waiting.pop(0), slot % num_places * ranks
            devices = ",".join(map(str, range(first, first + ranks)))
            environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": devices}
            started = launches.start(words_of(options, run, more), options.out / run, environment)
            running[slot] = run, started, time.monotonic()
        if left <= 0 or not running:
            break
        gpu.look_at_others_work()
        time.sleep(launches.POLL_S)
    return came


CAPTION = (
    "What remains to be doubted: sources and documentation are the text; a handful of seeds, one of each "
    "planted error; less than one epoch; 512 tokens a sequence; no flash attention; of Transformer Engine "
    "its loss alone."
)


@command("same_training")
def main(words: list[str]) -> int:
    own, more = launches.split_command(words)
    if own[:1] == ["plant"]:
        name, _, module, *rest = own[1:]
        plant(name, module, rest)
        return 0
    parser = Parser("python -m tests.same_training", __doc__ or "")
    add = parser.add_argument
    add("--megatron", type=lambda path: Path(path).resolve(), required=True, metavar="PATH")
    add("--data", type=lambda path: Path(path).resolve(), required=True, metavar="PREFIX")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--runs", nargs="+", metavar="NAME-SEED", help="[all]")
    add("--chunks", type=whole(), default=8, help="of the head with the flag [8]")
    add("--tensor-parallel", type=whole(), default=1, metavar="TP",
        help="GPUs of a run [1]; from 2 on with gradient accumulation fusion")  # fmt: skip
    add("--slots", type=whole(), default=3, help="runs at a time on a GPU [3]")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S", help="of all")
    add("--out", type=Path, default=Path("build/same_training"))
    options = parser.parse_args(own)
    options.out = writable_folder(options.out.resolve())
    from rich.console import Console

    source = results.made_by(results.device_name(), ["tests.same_training", *words])
    source["megatron"] = launches.full_version(options.megatron)
    # The most telling first, since time may run out; TE's is a Triton kernel.
    names = [*(name for name in STOCK if name != "te" or options.device == "cuda"), "flag"]
    runs = [f"{name}-{seed}" for seed in (1, 2, 3) for name in names] + [f"planted-{of}-1" for of in PLANTS]
    source["launches"] = launch_all(options, options.runs or runs, more)
    trained = {run.rpartition("-")[0] for run, came in source["launches"].items() if came.startswith("ok")}
    noise = [name for name in STOCK if name in trained and name != REFERENCE]
    found = compare.Comparison(REFERENCE, "flag", noise, by_seed=True).of_folder(options.out)
    status = compare.report(found, options.out, source, Console(highlight=False, width=110).print, CAPTION)
    for name in (name for name in sorted(found.runs) if name.startswith("planted")):
        rows = [(of, row) for of, rows in found.rows.items() for row in rows if row["variant"] == name]
        outside = [", ".join(of) for of, row in rows if not row["within"]]
        print(f"{name}: {'; '.join(outside) or 'not seen'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
