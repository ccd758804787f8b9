"""Launch Megatron-LM's own pretraining scripts with the flag off and on, and compare the logs.

On a CPU (gloo, fp32, tiny models; `megatron_fused_ce.testing.megatron_cpu` stands in for CUDA), the
named cases below, for every checkout given:

    python scripts/compare_pretrain.py --megatron ~/Megatron-LM-0.18 --megatron ~/Megatron-LM-0.19

On GPUs with Transformer Engine, the cases of GPU_CASES (four GPUs) and PAIR_CASES (two) below, or one case
whose arguments are yours, launched as users launch it:

    python scripts/compare_pretrain.py --megatron ~/Megatron-LM --device cuda --cases losses,vpp,cp2
    python scripts/compare_pretrain.py --megatron ~/Megatron-LM --device cuda --cases fsdp \\
        --variants unfused,native,auto,fsdp2,fsdp2-fused-ce,megatron-fsdp,megatron-fsdp-fused-ce
    python scripts/compare_pretrain.py --megatron ~/Megatron-LM --device cuda --nproc 4 \
        --case-name "TP 4, 128k" --args-file launch.args -- --train-iters 50

Each variant is one launch of the unmodified script; ``unfused`` is what the others are compared
with, where AGAINST names no other variant. More variants:
``--variant 'c4096=--fused-chunked-ce --fused-ce-chunk-tokens 4096'``.

Every run's logs, command line and figures stay in the output folder, and a run whose inputs
have not changed since is not repeated. Exit status: 0 all within bounds, 1 a bound broken or a run
failed, 2 a mistake in the arguments.

The bound on losses is relative: twice what Megatron's own native fused cross entropy differs from
its unfused one by, or 1e-6 (what the log's seven digits can tell apart), whichever is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from atomic import write_whole
from megatron_logs import Figures, UsageError, log_texts, parse_logs

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "megatron_fused_ce"
REFERENCE = "unfused"
YARDSTICK = "native"
YARDSTICK_FACTOR = 2.0
PLUGIN_FLAG = "--fused-chunked-ce"
LOSS_RESOLUTION = 1e-6  # relative; Megatron logs seven digits
GRAD_NORM_RESOLUTION = 1e-5  # relative, where every digit is known: on a CPU

FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
MEGATRON_FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
    " --data-parallel-sharding-strategy optim_grads_params"
)
OPTIONS = (
    f"{PLUGIN_FLAG} --fused-ce-num-chunks 3 --deterministic-mode --fused-ce-z-loss 1e-4"
    " --fused-ce-logit-softcap 30 --fused-ce-ignore-index 7 --fused-ce-mask-padded-vocab"
)

VARIANTS = {
    REFERENCE: "",
    YARDSTICK: "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    "fused-ce": f"{PLUGIN_FLAG} --fused-ce-num-chunks 3 --fused-ce-strategy recompute",
    "fused-ce-store": f"{PLUGIN_FLAG} --fused-ce-num-chunks 3 --fused-ce-strategy store",
    "auto": PLUGIN_FLAG,
    "te-lifted": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "many-connections": PLUGIN_FLAG,
    "fsdp2": FSDP2,
    "fsdp2-fused-ce": f"{FSDP2} {PLUGIN_FLAG} --fused-ce-num-chunks 3",
    "megatron-fsdp": MEGATRON_FSDP,
    "megatron-fsdp-fused-ce": f"{MEGATRON_FSDP} {PLUGIN_FLAG} --fused-ce-num-chunks 3",
}
# What a variant is compared with, where that is not REFERENCE.
AGAINST: dict[str, str] = {}
# Variants that repeat what they are compared with: equal to the last digit.
REPEATS = set()
for _name, _flags in {
    "options-recompute": f"{OPTIONS} --fused-ce-strategy recompute",
    "options-store": f"{OPTIONS} --fused-ce-strategy store",
    "options-grad-in-forward": f"{OPTIONS} --fused-ce-strategy grad_in_forward",
    "options-smoothing": f"{OPTIONS} --fused-ce-label-smoothing 0.1",  # by another logits backend
    "options-skip": f"{OPTIONS} --fused-ce-skip-masked",
}.items():
    VARIANTS[_name] = VARIANTS[f"{_name}-again"] = _flags
    VARIANTS[f"{_name}-graph"] = f"{_flags} --cuda-graph-impl full_iteration"
    AGAINST |= {f"{_name}-again": _name, f"{_name}-graph": _name}
    REPEATS.add(f"{_name}-again")
AGAINST |= {f"options-{like}": "options-recompute" for like in ("store", "grad-in-forward", "skip")}
for _name in ("options-recompute", "options-smoothing"):
    AGAINST[_name] = _name  # nothing is like them
# Variants that Megatron's arguments refuse, and what lifts the refusal.
LIFTING = {
    "te-lifted": REPOSITORY / "scripts" / "launch_te_loss.py",
    "many-connections": REPOSITORY / "scripts" / "launch_many_connections.py",
}
PRELOADING = REPOSITORY / "scripts" / "launch_preloaded.py"
EVERY_DIGIT = REPOSITORY / "scripts" / "launch_every_digit.py"

# What runs on a CPU without apex and Transformer Engine. Vocabulary 127 + eod, padded to 128·TP.
CPU_ONLY_ARGS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --attention-backend unfused --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
"""
CPU_BASE_ARGS = f"""
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --lr 1e-3 --lr-decay-style constant
    --mock-data --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --eval-iters 1 --eval-interval 3 --log-interval 1 --tensor-model-parallel-size 2
    {CPU_ONLY_ARGS}
"""
NO_FUSED_WGRAD = "--no-gradient-accumulation-fusion"
UNTIED = "--untie-embeddings-and-output-weights"
STACK_SPEC = "--spec megatron_fused_ce.testing.local_stack_spec stack_spec"


# --- what is run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkout:
    path: Path
    label: str
    version: tuple[int, int]

    @staticmethod
    def at(path: str) -> Checkout:
        folder = Path(path).expanduser().resolve()
        info = folder / "megatron" / "core" / "package_info.py"
        if not (folder / "pretrain_gpt.py").is_file() or not info.is_file():
            raise UsageError(f"no Megatron-LM checkout at {path}: pretrain_gpt.py is not there")
        numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)", info.read_text(), re.MULTILINE))
        return Checkout(folder, folder.name, (int(numbers["MAJOR"]), int(numbers["MINOR"])))

    @property
    def stack_model(self) -> str:
        """Megatron's name of the model with an attention/MLP pattern."""
        return "hybrid" if self.version >= (0, 18) else "mamba"


@dataclass(frozen=True)
class Case:
    """One row: a script, its arguments and its number of processes; ``args`` None: not offered."""

    name: str
    script: str
    num_processes: int
    args: list[str] | None
    fused_wgrad: bool = False
    every_digit: bool = False  # on GPUs too, where users would launch it otherwise

    @property
    def is_fp32(self) -> bool:
        return not {"--bf16", "--fp16"} & set(self.args or ())


def _stack_pattern(checkout: Checkout, num_mtp_layers: int, num_stages: int) -> str | None:
    """The flags that give the Mamba or Hybrid model two attention and two MLP layers.

    ``num_stages``: pipeline stages, virtual ones counted; 1, 2 or 4.
    """
    if checkout.version < (0, 18) and num_mtp_layers and num_stages > 1:
        return None  # its MTP gets no token ids on the last stage
    if checkout.version >= (0, 17):
        layers = {1: "*-*-", 2: "*-|*-", 4: "*|-|*|-"}[num_stages]
        return f"--hybrid-layer-pattern {layers + '/*-' * num_mtp_layers}"
    if num_mtp_layers or num_stages > 2:
        return None  # MambaModel has MTP and virtual stages from 0.17 on
    return "--hybrid-override-pattern *-*- --num-layers 4"


def cpu_case(checkout: Checkout, model: str, name: str) -> Case:
    """The case `name` of `model` ("gpt", "stack") as `checkout` spells it.

    Together the cases cover sequence parallelism on and off, tied and untied weights, gradient
    accumulation fusion on and off, several micro-batches per step, and evaluation.
    """
    num_mtp_layers = {"mtp": 1, "mtp2": 2, "pp2-mtp": 1}.get(name, 0)
    num_stages = {"pp2": 2, "pp2-mtp": 2, "vpp": 4}.get(name, 1)
    num_processes = 4 if name == "distopt" or num_stages > 1 else 2
    fused_wgrad = name in ("mtp", "distopt", "bf16", "pp2-mtp")
    extra = {
        "plain": f"--sequence-parallel {UNTIED}",
        "mtp": "--sequence-parallel",
        "mtp2": UNTIED,
        "distopt": f"--sequence-parallel {UNTIED} --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
        "pp2": "--pipeline-model-parallel-size 2",
        "pp2-mtp": f"--pipeline-model-parallel-size 2 --sequence-parallel {UNTIED}",
        "vpp": "--pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
        "bf16": "--bf16 --sequence-parallel",
        "fsdp": f"--tensor-model-parallel-size 1 {UNTIED} --no-gradient-reduce-div-fusion",
    }[name]
    if model == "gpt":
        script, layers = "pretrain_gpt.py", "--num-layers 2"
        if num_stages == 4:
            layers = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
        if num_mtp_layers:
            layers += f" --mtp-num-layers {num_mtp_layers}"
    else:
        script = f"pretrain_{checkout.stack_model}.py"
        pattern = _stack_pattern(checkout, num_mtp_layers, num_stages)
        if pattern is None:
            return Case(name, script, num_processes, None)
        layers = f"{pattern} {STACK_SPEC}"
    words = [CPU_BASE_ARGS, layers, extra, "" if fused_wgrad else NO_FUSED_WGRAD]
    return Case(name, script, num_processes, shlex.split(" ".join(words)), fused_wgrad)


CPU_CASES = {
    "plain": "TP 2, sequence parallelism, untied weights",
    "mtp": "MTP 1, TP 2, sequence parallelism, tied, gradient accumulation fusion",
    "mtp2": "MTP 2, TP 2, untied",
    "distopt": "distributed optimizer with both overlaps, TP 2 × DP 2, sequence parallelism, untied, "
    "gradient accumulation fusion",
    "pp2": "TP 2 × PP 2, tied",
    "pp2-mtp": "TP 2 × PP 2, MTP 1, sequence parallelism, untied, gradient accumulation fusion",
    "vpp": "TP 2 × PP 2 with two virtual stages each, sequence parallelism, tied, distributed optimizer "
    "with both overlaps",
    "bf16": "TP 2, sequence parallelism, tied, gradient accumulation fusion into fp32",
    "fsdp": "DP 2, untied: for the variants with FSDP in their names",
}
# Not fsdp: Megatron's DDP of the usual variants is in other cases. Not bf16: so small a model's native and
# unfused runs agree to the bit there, which leaves no yardstick for chunks that flip the rounding of a
# single gradient.
DEFAULT_CPU_CASES = ("plain", "mtp", "mtp2", "distopt", "pp2", "pp2-mtp", "vpp")

# Four GPUs, real Transformer Engine, and its cuts of a small model; the head is Llama-3's vocabulary.
GPU_BASE_ARGS = """
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 4 --train-iters 30 --lr 1e-4 --lr-decay-style constant
    --attention-dropout 0 --hidden-dropout 0
    --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 128255 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --log-memory-interval 10 --bf16
    --no-create-attention-mask-in-dataloader --normalization RMSNorm --swiglu --disable-bias-linear
    --make-vocab-size-divisible-by 32 --transformer-impl transformer_engine --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""
_TP2 = "--tensor-model-parallel-size 2"
GPU_CASES = {
    "losses": (
        "TP 4, untied, 200 iterations",
        f"--tensor-model-parallel-size 4 --train-iters 200 --global-batch-size 2 {UNTIED}",
    ),
    "vpp": (
        "TP 2 × PP 2 with two virtual stages each, tied",
        f"{_TP2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp2": ("TP 2 × CP 2, tied", f"{_TP2} --context-parallel-size 2"),
    "mtp": ("TP 2 × DP 2, MTP 1, untied", f"{_TP2} --mtp-num-layers 1 {UNTIED}"),
    "packed": (
        "TP 2 × DP 2, packed sequences (attention within documents), untied",
        f"{_TP2} --dataloader-inter-document-masking {UNTIED}",
    ),
    "pp2-mtp": (
        "TP 2 × PP 2, MTP 1, untied",
        f"{_TP2} --pipeline-model-parallel-size 2 --mtp-num-layers 1 {UNTIED}",
    ),
    "no-sp": (
        "TP 4 without sequence parallelism, untied",
        f"--tensor-model-parallel-size 4 {UNTIED}",
    ),
    "graph": (
        "TP 4, the whole iteration in a CUDA graph, untied",
        f"--tensor-model-parallel-size 4 {UNTIED} --cuda-graph-impl full_iteration"
        " --no-check-for-nan-in-loss-and-grad --te-rng-tracker",
    ),
    "cp2-packed": (
        "TP 2 × CP 2, packed sequences, untied",
        f"{_TP2} --context-parallel-size 2 --dataloader-inter-document-masking {UNTIED}",
    ),
}
DEFAULT_GPU_CASES = ("losses", "vpp", "cp2", "mtp", "packed")

# Two GPUs and a smaller model whose vocabulary is padded, for what is compared to the digit and not timed.
PAIR_BASE_ARGS = """
    --num-layers 2 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --micro-batch-size 2 --train-iters 10 --lr 1e-4 --lr-decay-style constant
    --attention-dropout 0 --hidden-dropout 0
    --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 32100 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --no-create-attention-mask-in-dataloader --normalization RMSNorm --swiglu --disable-bias-linear
    --transformer-impl transformer_engine --untie-embeddings-and-output-weights
"""
_TP2_SP = (
    f"{_TP2} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather --global-batch-size 4"
)
PAIR_CASES = {
    # One micro-batch, its gradients reduced in bf16: FSDP2 knows no other way, and so all three do the same.
    "fsdp": ("DP 2, bf16 gradients", "--bf16 --grad-reduce-in-bf16 --global-batch-size 4"),
    "fsdp-fp32": ("DP 2, fp32, two micro-batches", f"--global-batch-size 8 {NO_FUSED_WGRAD}"),
    "fp16": (
        "TP 2, fp16, loss scale from 2^32 down",
        f"{_TP2_SP} --fp16 --initial-loss-scale 4294967296 --hysteresis 1 --train-iters 24",
    ),
    "options": (
        "TP 2, bf16, every option of the loss",
        f"{_TP2_SP} --bf16 --no-check-for-nan-in-loss-and-grad --te-rng-tracker --eod-mask-loss",
    ),
}


def gpu_case(name: str) -> Case:
    """The case `name` of the GPT model on four GPUs or two."""
    if name in PAIR_CASES:
        words = shlex.split(f"{PAIR_BASE_ARGS} {PAIR_CASES[name][1]}")
        return Case(name, "pretrain_gpt.py", 2, words, every_digit=True)
    words = shlex.split(f"{GPU_BASE_ARGS} {GPU_CASES[name][1]}")
    if name == "no-sp":
        words.remove("--sequence-parallel")
    return Case(name, "pretrain_gpt.py", 4, words)


MODELS = ("gpt", "stack")
SAME_NETWORK = (
    "The Mamba or Hybrid model (`*-*-`: attention, MLP, attention, MLP) is the same network as the "
    "GPT of two layers, in another class: where both draw the same random numbers, their rows "
    "agree to the digit.\n"
)


# --- one run ---------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Run:
    checkout: Checkout
    model: str
    case: Case
    variant: str
    variant_args: tuple[str, ...]
    device: str
    timeout_s: float

    @property
    def uses_plugin(self) -> bool:
        return PLUGIN_FLAG in self.variant_args

    def words(self, megatron: str, torchrun: Sequence[str], turn: Path | None = None) -> list[str]:
        """The command line, with `megatron` for the checkout's folder; it waits for the file `turn`."""
        assert self.case.args is not None
        command = [*torchrun, "--nproc-per-node", str(self.case.num_processes)]
        if turn is not None:
            command += [str(PRELOADING), str(turn)]
        if self.device == "cpu":
            command += ["-m", "megatron_fused_ce.testing.megatron_cpu"]
            command += ["--fused-wgrad"] if self.case.fused_wgrad else []
        elif self.variant in LIFTING:
            command += [str(LIFTING[self.variant])]
        elif self.case.every_digit:
            command += [str(EVERY_DIGIT)]
        elif self.uses_plugin:
            command += ["-m", "megatron_fused_ce.launch"]
        return [*command, f"{megatron}/{self.case.script}", *self.case.args, *self.variant_args]

    @property
    def max_connections(self) -> str:
        """CUDA_DEVICE_MAX_CONNECTIONS: tensor parallelism asks for 1, either FSDP refuses it."""
        return "8" if "fsdp" in " ".join(self.variant_args) else "1"

    @property
    def command(self) -> str:
        command = shlex.join(self.words("MEGATRON_LM", ["torchrun"])).replace(f"{REPOSITORY}/", "")
        if self.max_connections != "1":
            return f"CUDA_DEVICE_MAX_CONNECTIONS={self.max_connections} {command}"
        return command

    @property
    def title(self) -> str:
        return f"{self.checkout.label} {self.model} {self.case.name} {self.variant}"

    @property
    def folder_name(self) -> str:
        words = (self.checkout.label, self.model, self.case.name, self.variant)
        return re.sub(r"[^\w.-]+", "_", "-".join(words))

    def fingerprint(self) -> str:
        """Changes with anything the run's figures depend on."""
        files = [
            PACKAGE / "testing" / "megatron_cpu.py",
            PACKAGE / "testing" / "local_stack_spec.py",
        ]
        if self.uses_plugin:
            files += [f for f in PACKAGE.rglob("*.py") if "testing" not in f.parts]
            files += (REPOSITORY / "kernels").rglob("*.py")
        software = f"{sys.version} {importlib.metadata.version('torch')}"
        digest = hashlib.sha256(f"{self.checkout.path} {self.command} {software}".encode())
        for file in sorted(files):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def earlier(self, output: Path) -> Figures | None:
        """The figures of an earlier, complete run of the same."""
        record = output / self.folder_name / "run.json"
        if not record.is_file():
            return None
        content = json.loads(record.read_text())
        complete = content["figures"]["status"] in ("ok", "out of memory")
        if content["fingerprint"] != self.fingerprint() or not complete:
            return None
        return Figures(**content["figures"])

    def start(self, output: Path, waits: bool = False) -> Started:
        """Start the launch; with ``waits`` it imports what it needs and waits for its turn."""
        folder = output / self.folder_name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        turn = folder / "turn" if waits else None
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": self.max_connections}
        search = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(search)
        if self.device == "cpu":
            environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        with open(folder / "torchrun.log", "w") as launcher_log:
            process = subprocess.Popen(
                self.words(str(self.checkout.path), torchrun, turn),
                cwd=folder,
                env=environment,
                stdout=launcher_log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Started(process, folder, turn)

    def finish(self, started: Started) -> Figures:
        """Give it its turn, wait for its end, write its record."""
        began = time.monotonic()
        if started.turn is not None:
            started.turn.touch()
        process, folder = started.process, started.folder
        status = "ok"
        try:
            status = "failed" if process.wait(self.timeout_s) else "ok"
        except subprocess.TimeoutExpired:
            status = f"timed out after {self.timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                end_launch(process)
        figures = parse_logs(log_texts(folder))
        figures.wall_s = round(time.monotonic() - began, 1)
        if status == "ok":
            figures.error = ""
            figures.status = status if figures.losses else "no iteration in the log"
        elif figures.status != "out of memory":
            figures.status = status
        record = {"command": self.command, "fingerprint": self.fingerprint()}
        text = json.dumps({**record, "figures": asdict(figures)}, indent=1)
        write_whole(folder / "run.json", f"{text}\n".encode())
        return figures


@dataclass
class Started:
    """A launch under way, or waiting for its turn: until the file ``turn`` exists."""

    process: subprocess.Popen[bytes]
    folder: Path
    turn: Path | None


class Launcher:
    """Runs launches one after another, and starts the next ``ahead`` of them early.

    Those import and wait; only one trains at a time. ``wall_s`` of one that waited counts from its turn.
    """

    def __init__(self, runs: Sequence[Run], output: Path, ahead: int) -> None:
        self._names = [run.folder_name for run in runs]
        self._runs = list(runs)
        self._output = output
        self._ahead = ahead
        self._waiting: dict[str, Started] = {}

    def execute(self, run: Run) -> tuple[Figures, bool]:
        """Its figures, and whether they were there already from an earlier, complete run."""
        here = self._names.index(run.folder_name)
        for passed in [name for name in self._waiting if name in self._names[:here]]:
            end_launch(self._waiting.pop(passed).process)
        if (earlier := run.earlier(self._output)) is not None:
            return earlier, True
        started = self._waiting.pop(run.folder_name, None) or run.start(self._output)
        for following in self._runs[here + 1 : here + 1 + self._ahead]:
            if following.folder_name not in self._waiting and not following.earlier(self._output):
                self._waiting[following.folder_name] = following.start(self._output, waits=True)
        return run.finish(started), False

    def close(self) -> None:
        """End what still waits."""
        for started in self._waiting.values():
            end_launch(started.process)
        self._waiting.clear()


# --- comparison ------------------------------------------------------------------------------


def relative_difference(ours: float, reference: float, tolerance: float = 0.0) -> float:
    """0 where both are nan or at most ``tolerance`` apart, inf where one alone is finite."""
    if ours == reference or (math.isnan(ours) and math.isnan(reference)):
        return 0.0
    difference = abs(ours - reference)
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference <= tolerance else difference / max(abs(reference), 1e-30)


def largest_relative_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Over the iterations; inf where one of them ended early, nan equals nan."""
    if len(ours) != len(reference) or not reference:
        return math.inf
    return max(relative_difference(a, b) for a, b in zip(ours, reference, strict=True))


def loss_difference(ours: Figures, reference: Figures) -> float:
    """The largest over every loss that Megatron logs: lm, MTP depths, validation."""
    if ours.losses.keys() != reference.losses.keys():
        return math.inf
    return max(
        largest_relative_difference(ours.losses[name], values)
        for name, values in reference.losses.items()
    )


@dataclass
class Row:
    version: str
    model: str
    case: str
    variant: str
    status: str
    against: str = REFERENCE  # what its differences are to
    loss_difference: float | None = None
    native_loss_difference: float | None = None
    grad_norm_difference: float | None = None
    native_grad_norm_difference: float | None = None
    heads_fused: int | None = None
    logits_materialised: int | None = None
    heads_stock: int | None = None
    last_lm_loss: float | None = None
    iteration_time_ms: float | None = None  # median after the warm-up
    max_allocated_mb: float | None = None
    skipped: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compare(
    run: Run, all_figures: dict[str, Figures], warmup: int, may_run_out: Sequence[str]
) -> Row:
    """One variant's row; `all_figures` are the figures of this case's variants."""
    figures = all_figures[run.variant]
    row = Row(
        version=run.checkout.label,
        model=run.model,
        case=run.case.name,
        variant=run.variant,
        status=figures.status,
        against=AGAINST.get(run.variant, REFERENCE),
        skipped=figures.skipped,
        heads_fused=figures.heads_fused,
        logits_materialised=figures.logits_materialised,
        heads_stock=figures.heads_stock,
        max_allocated_mb=figures.max_allocated_mb,
    )
    times = figures.iteration_times_ms[warmup:]
    row.iteration_time_ms = round(statistics.median(times), 1) if times else None
    row.last_lm_loss = figures.losses.get("lm loss", [None])[-1]  # type: ignore[list-item]
    if figures.status != "ok":
        if not (figures.status == "out of memory" and run.variant in may_run_out):
            row.problems.append(f"{figures.status} {figures.error}".strip())
        return row

    stock, native = all_figures.get(REFERENCE), all_figures.get(YARDSTICK)
    if stock and native and stock.status == native.status == "ok" and run.variant != REFERENCE:
        row.native_loss_difference = loss_difference(native, stock)
        row.native_grad_norm_difference = largest_relative_difference(
            native.grad_norms, stock.grad_norms
        )
    reference = all_figures.get(row.against)
    if reference and reference.status == "ok" and run.variant != row.against:
        row.loss_difference = loss_difference(figures, reference)
        row.grad_norm_difference = largest_relative_difference(
            figures.grad_norms, reference.grad_norms
        )
        if run.uses_plugin and figures.skipped != reference.skipped:
            skipped = f"iterations {figures.skipped} skipped"
            row.problems.append(f"{skipped}, by {row.against} {reference.skipped}")
    if run.uses_plugin:
        row.problems += _broken_bounds(run, row)
    return row


def _broken_bounds(run: Run, row: Row) -> list[str]:
    problems = []
    repeats = run.variant in REPEATS
    # Elsewhere the log has three decimals of it.
    has_norms = run.device == "cpu" or (run.case.every_digit and (run.case.is_fp32 or repeats))
    for what, ours, native, resolution in (
        ("loss", row.loss_difference, row.native_loss_difference, LOSS_RESOLUTION),
        (
            "grad norm",
            row.grad_norm_difference if has_norms else None,
            row.native_grad_norm_difference,
            GRAD_NORM_RESOLUTION,
        ),
    ):
        bound = 0.0 if repeats else max(YARDSTICK_FACTOR * (native or 0.0), resolution)
        if ours is not None and native is None and not (run.case.is_fp32 or repeats):
            problems.append(f"no {YARDSTICK} run to hold the {what} against")
        elif ours is not None and not ours <= bound:
            problems.append(f"{what} differs by {ours:.1e}, bound {bound:.1e}")
    if row.heads_fused is None:
        problems.append("the run printed no count of fused heads")
    elif not row.heads_fused:
        problems.append("no head was evaluated fused")
    if row.logits_materialised:
        problems.append(f"{row.logits_materialised} logits were materialised")
    return problems


# --- tables ----------------------------------------------------------------------------------


def _cell(value: Any, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def markdown(rows: Sequence[Row], device: str) -> str:
    """The table; on a CPU the variants with the flag, on GPUs all of them."""
    if device == "cpu":
        head = ["version", "model", "case", "variant", "compared with", "loss difference"]
        head += ["loss: native − unfused", "grad norm difference", "grad norm: native − unfused"]
    else:
        head = ["version", "case", "variant", "ms per iteration", "max allocated MB"]
        head += ["last lm loss", "compared with", "largest loss difference"]
    head += ["heads fused", "logits materialised", "within bounds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        verdict = "; ".join(row.problems) or (row.status if row.status != "ok" else "yes")
        compared = ["–" if row.loss_difference is None else row.against]
        compared += [_cell(row.loss_difference, ".1e")]
        if device == "cpu":
            if row.variant in (REFERENCE, YARDSTICK) and not row.problems:
                continue
            cells = [row.version, row.model, row.case, row.variant, *compared]
            cells += [_cell(row.native_loss_difference, ".1e")]
            cells += [_cell(row.grad_norm_difference, ".1e")]
            cells += [_cell(row.native_grad_norm_difference, ".1e")]
        else:
            cells = [row.version, row.case, row.variant, _cell(row.iteration_time_ms, ".1f")]
            cells += [_cell(row.max_allocated_mb, ".0f"), _cell(row.last_lm_loss, ".6f")]
            cells += compared
        cells += [_cell(row.heads_fused), _cell(row.logits_materialised), verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(rows: Sequence[Row], device: str, environment: dict[str, str]) -> str:
    """The Markdown file: the table, and what it takes to read and repeat it."""
    where = {
        "cpu": "a CPU with gloo",
        "cuda": environment["gpu"],
    }[device]
    versions = f"Python {environment['python']}, torch {environment['torch']}"
    differences = (
        "Differences are the largest relative ones over all logged iterations and, for losses, over "
        "every loss that Megatron logs (lm, each MTP depth, validation). The bound on a flag's loss "
        f"is {YARDSTICK_FACTOR:g}× that of native or {LOSS_RESOLUTION:g} (what the log's seven digits "
        "can tell apart), whichever is larger.\n"
    )
    legend = ""
    if device == "cpu":
        used = {row.case for row in rows}
        cases = "".join(f"- `{name}`: {text}\n" for name, text in CPU_CASES.items() if name in used)
        legend = (
            "\nCases, in fp32 (but for `bf16`), with two or four micro-batches per step and with "
            "evaluation:\n\n"
            f"{cases}\n{SAME_NETWORK}"
        )
    else:
        legend = _gpu_legend(dict.fromkeys(row.case for row in rows))
    return (
        "# Unmodified pretraining scripts, flag off and on\n\n"
        f"By `scripts/compare_pretrain.py` at commit {environment['commit']} on {where}, {versions}. "
        "The JSON file beside this one has every run's command line and figures.\n\n"
        f"{markdown(rows, device)}\n{differences}{legend}"
    )


def _gpu_legend(used: Iterable[str]) -> str:
    """The named cases among those used, described."""
    legend, used = "", list(used)
    for described, words in (
        (
            GPU_CASES,
            "four layers of H = 1024, V = 128256, 4096 tokens a sequence, bf16, Transformer Engine's layers, "
            "sequence parallelism, distributed optimizer with both overlaps, 30 iterations where not said "
            "otherwise",
        ),
        (
            PAIR_CASES,
            "two GPUs, two layers of H = 512, V = 32101 padded, 1024 tokens a sequence, Transformer Engine's "
            "layers, untied, 10 iterations (fp16: 24) of which every digit is known; TP 2 with sequence "
            "parallelism and the distributed optimizer",
        ),
    ):
        cases = "".join(f"- `{name}`: {described[name][0]}\n" for name in used if name in described)
        legend += f"\nCases: {words}:\n\n{cases}" if cases else ""
    return legend


def finite(value: Any) -> Any:
    """JSON has no inf and nan: their names instead."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- command line ----------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False, exit_on_error=True
    )
    parser.add_argument(
        "--megatron", action="append", metavar="PATH", help="a Megatron-LM checkout; repeatable"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="CPU: gpt, stack (Mamba or Hybrid), or both"
    )
    parser.add_argument(
        "--cases",
        help=f"comma-separated, on a CPU of {', '.join(CPU_CASES)}; on four GPUs of "
        f"{', '.join(GPU_CASES)}; on two of {', '.join(PAIR_CASES)}",
    )
    parser.add_argument(
        "--variants",
        default=f"{REFERENCE},{YARDSTICK},fused-ce",
        help=f"comma-separated, of {', '.join(VARIANTS)} and those of --variant",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more variant, run after those of --variants; repeatable",
    )
    parser.add_argument("--args-file", help="the script's arguments, as in a shell; # comments")
    parser.add_argument("--case-name", default="own arguments", help="with arguments of your own")
    parser.add_argument("--script", default="pretrain_gpt.py", help="with arguments of your own")
    parser.add_argument("--nproc", type=int, default=2, help="with arguments of your own")
    parser.add_argument(
        "--may-run-out-of-memory",
        action="append",
        default=[],
        metavar="VARIANT",
        help="running out of GPU memory is a result of this variant, not a failure; repeatable",
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="logged iterations left out of the time"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="of one run")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="S", help="of all; cuts the last run"
    )
    parser.add_argument(
        "--preload",
        type=int,
        default=0,
        metavar="N",
        help="let the next N runs load their modules while one trains [0]",
    )
    parser.add_argument("--output", default="build/compare_pretrain", help="folder of the logs")
    parser.add_argument("--json", help="[OUTPUT/results.json]")
    parser.add_argument("--markdown", help="[OUTPUT/results.md]")
    parser.add_argument(
        "script_args", nargs="*", metavar="-- ARGS", help="arguments of your own for the script"
    )
    return parser


def _chosen(text: str, known: Iterable[str], option: str) -> list[str]:
    names, known = [name for name in text.split(",") if name], list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: no {name!r}; there are {', '.join(known)}")
    return names


def _variants(options: argparse.Namespace) -> dict[str, str]:
    chosen = {name: VARIANTS[name] for name in _chosen(options.variants, VARIANTS, "--variants")}
    for definition in options.variant:
        name, equals, flags = definition.partition("=")
        if not equals or not name:
            raise UsageError(f"--variant takes NAME=FLAGS, got {definition!r}")
        chosen[name] = flags
    if not chosen:
        raise UsageError("no variant to run")
    return chosen


def _own_args(options: argparse.Namespace) -> list[str]:
    words: list[str] = []
    if options.args_file:
        if not os.path.isfile(options.args_file):
            raise UsageError(f"--args-file: no file {options.args_file}")
        words += shlex.split(Path(options.args_file).read_text(), comments=True)
    return [*words, *options.script_args]


def plan(options: argparse.Namespace) -> list[list[Run]]:
    """The runs, one list per row group (checkout, model, case), the reference first."""
    if not options.megatron:
        raise UsageError("give at least one Megatron-LM checkout: --megatron PATH")
    checkouts = [Checkout.at(path) for path in options.megatron]
    if len({checkout.label for checkout in checkouts}) < len(checkouts):
        raise UsageError("checkouts need folders of different names: their names label the table")
    variants = _variants(options)
    own_args = _own_args(options)
    cases: list[tuple[Checkout, str, Case]] = []
    for checkout in checkouts:
        if own_args:
            if not (checkout.path / options.script).is_file():
                raise UsageError(f"--script: {checkout.label} has no {options.script}")
            case = Case(options.case_name, options.script, options.nproc, own_args)
            model = options.script.removeprefix("pretrain_").removesuffix(".py")
            cases.append((checkout, model, case))
            continue
        if options.device == "cuda":
            chosen = options.cases or ",".join(DEFAULT_GPU_CASES)
            for name in _chosen(chosen, {**GPU_CASES, **PAIR_CASES}, "--cases"):
                cases.append((checkout, "gpt", gpu_case(name)))
            continue
        for model in _chosen(options.models, MODELS, "--models"):
            chosen = options.cases or ",".join(DEFAULT_CPU_CASES)
            for name in _chosen(chosen, CPU_CASES, "--cases"):
                label = model if model == "gpt" else checkout.stack_model
                cases.append((checkout, label, cpu_case(checkout, model, name)))
    return [
        [
            Run(
                checkout,
                model,
                case,
                name,
                tuple(shlex.split(flags)),
                options.device,
                options.timeout,
            )
            for name, flags in variants.items()
        ]
        for checkout, model, case in cases
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        groups = plan(options)
    except UsageError as error:
        print(f"compare_pretrain: {error}", file=sys.stderr)
        return 2
    output = Path(options.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    lock = open(output / "lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(f"compare_pretrain: another comparison writes to {output}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too

    rows: list[Row] = []
    records: list[dict[str, Any]] = []
    runs = [run for group in groups for run in group if run.case.args is not None]
    launcher = Launcher(runs, output, options.preload)
    deadline = time.monotonic() + options.time_limit
    with _Progress(len(runs)) as progress, contextlib.closing(launcher):
        for group in groups:
            first = group[0]
            if first.case.args is None:
                status = f"{first.model} has it not in this version"
                rows.append(Row(first.checkout.label, first.model, first.case.name, "", status))
                continue
            all_figures: dict[str, Figures] = {}
            for run in group:
                progress.begin(run.title)
                left = deadline - time.monotonic()
                if left <= 0:
                    all_figures[run.variant] = Figures("not run: the time limit is over")
                    progress.end(f"{run.title}: not run")
                    continue
                timed = replace(run, timeout_s=min(left, run.timeout_s))
                figures, was_there = launcher.execute(timed)
                all_figures[run.variant] = figures
                came = "kept" if was_there else f"{figures.wall_s:.0f} s"
                progress.end(f"{run.title}: {figures.status} ({came}) {figures.error}".rstrip())
            for run in group:
                row = compare(run, all_figures, options.warmup, options.may_run_out_of_memory)
                rows.append(row)
                record = {**asdict(row), "command": run.command}
                records.append({**record, "figures": asdict(all_figures[run.variant])})

    environment = _environment()
    results = {"device": options.device, "environment": environment, "rows": finite(records)}
    for path, text in (
        (options.json or output / "results.json", json.dumps(results, indent=1) + "\n"),
        (options.markdown or output / "results.md", report(rows, options.device, environment)),
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    print(markdown(rows, options.device))
    broken = [row for row in rows if row.problems]
    for row in broken:
        where = f"{row.version} {row.model} {row.case} {row.variant}"
        print(f"compare_pretrain: {where}: {'; '.join(row.problems)}", file=sys.stderr)
    print(f"{len(runs)} runs, {len(broken)} broken; logs in {options.output}")
    return 1 if broken else 0


class _Progress:
    """A bar on a terminal where tqdm is installed; one line per finished run everywhere."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm  # type: ignore[import-untyped]

                self._bar = tqdm(total=total, unit="run", dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, title: str) -> None:
        if self._bar is not None:
            self._bar.set_description(title)

    def end(self, line: str) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line)
            self._bar.update()


def _environment() -> dict[str, str]:
    import torch

    sys.path.insert(0, str(REPOSITORY))  # the package need not be installed
    from megatron_fused_ce.testing.provenance import commit

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"commit": commit(), "torch": torch.__version__, "python": python, "gpu": gpu}


if __name__ == "__main__":
    sys.exit(main())
