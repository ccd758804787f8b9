"""RL stacks' own functions with scripts/examples/rl's diffs and without, each on its Megatron, on a CPU.

    python -m scripts.dev.stacks --of slime ~/slime ~/Megatron-LM --of verl ~/verl ~/Megatron-LM-0.18

A row is a case (:mod:`.stacks_rl`): layout, context and tensor parallelism (with sequence parallelism),
dtype, temperature, entropy. Run as the stack is, then with its diff: from the model's call to the response's
log-probabilities and entropy, and a backward. A row has the norm of the difference by the norm without the
diff, of results, of the gradients of hidden states and of all weights; heads that were fused, materialised
and left to Megatron; peak bytes of logits. Exit status 1 where a row is not equal.

Beside them ``bridge``: heads of models that Megatron-Bridge builds (:mod:`.stacks_bridge`), with what it
imports on PYTHONPATH (pip install --no-deps --target FOLDER 'transformers>=5.8,<=5.12.1' 'huggingface-hub<2'
'tokenizers<=0.23.0' httpx httpcore safetensors regex omegaconf antlr4-python3-runtime==4.9.3 hydra-core
datasets accelerate peft diffusers); and ``tests``: Megatron's own unit tests around the head
(:mod:`.stacks_tests`; most want a GPU and Transformer Engine).

A checkout is imported once, in a process of which ranks are forks. What cannot be imported is a mock.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import megatron_fused_ce
from megatron_fused_ce.command_line import Parser
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu, results, tables
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from megatron_fused_ce.scripts.lib.results import REPOSITORY

#: Norm of a difference by norm: values, gradients. Of bf16 models both sides round logits and their gradient.
BOUNDS = {"fp32": (1e-6, 1e-5), "bf16": (5e-3, 2e-2)}
NUMBERS = ("log_prob", "entropy", "gradient of hidden states", "worst gradient")
COLUMNS = ("stack", "megatron", "case", *NUMBERS, "heads", "peak KiB", "equal")
#: Their module has ``STACKS`` with them, or ``rows``.
MODULES = dict.fromkeys(("verl", "skyrl", "nemo_rl", "slime", "miles", "train_rl", "labels"), "stacks_rl")
MODULES |= {"bridge": "stacks_bridge", "tests": "stacks_tests"}


class Stack(NamedTuple):
    """Its cases have a ``line``, ``tp``, ``cp``, ``dtype``, ``rows`` (a rank's, of the vocabulary),
    ``hidden_size`` and ``left``: how many heads Megatron computes with the diff too, None for all. ``real``,
    where they have it: how many are made real logits, and none is fused."""

    cases: Sequence[Any]
    build: Callable[[Any], Any]
    run: Callable[[Any, Any, bool], dict[str, Any]]  # of a model: results and gradients
    prepare: Callable[[], None]  # imports Megatron
    load: Callable[[Path, str], None]  # imports a copy of the stack
    enabled: dict[str, Any] | None = None  # what its diff turns on where it begins; None: nothing
    has_diff: bool = True
    rounded: float = 0.0  # bound of gradients that are rougher without the diff


class Missing:
    """Base of the classes of a mock: for annotations and as bases."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def forward(self) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def missing(name: str) -> Any:
    """A mock's member."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Missing,), {}) if name[0].isupper() else mock.MagicMock(name=name)


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: mocks for all of these packages that are missing."""

    def __init__(self, of: Callable[[str], bool]) -> None:
        self.of = of

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        mocked = self.of(name.partition(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mocked else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__version__, module.__getattr__ = "0.0", missing
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None: ...


def in_forks(number: int, run: Callable[[int], Any]) -> list[Any]:
    """``run(i)`` of ``number`` processes; where one fails, so does this one. What they print is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        forks = []
        for i in range(number):
            forks.append(os.fork())
            if forks[-1] == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                try:
                    torch.save(run(i), f"{folder}/{i}")
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        if any([os.waitpid(fork, 0)[1] for fork in forks]):  # gloo ends ranks whose peer has ended
            raise SystemExit("a process failed, as said above")
        return [torch.load(f"{folder}/{i}") for i in range(number)]  # noqa: TID251 (tensors alone)


def seen_by(stack: Stack, cases: list[Any], ours: bool, store: Path, rank: int) -> list[dict[str, Any]]:
    """Of cases with the same parallelism, on one rank: numbers, heads, peak bytes."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp, cp = cases[0].tp, cases[0].cp
    gloo.use_one_thread()
    of_all: Any = dist.FileStore(str(store), tp * cp)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=of_all, rank=rank, world_size=tp * cp)
    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    made = []
    for case in cases:
        torch.manual_seed(7)
        model_parallel_cuda_manual_seed(7)
        model, counters = stack.build(case), megatron_fused_ce.counters()
        counters.reset()
        with LogitStorages(vocab_rows=case.rows, hidden_size=case.hidden_size) as storages:
            seen = stack.run(model, case, ours)
        numbers = {name: None if x is None else x.detach().double() for name, x in seen.items()}
        heads = counters.fused, counters.materialised, counters.stock
        made.append({"seen": numbers, "heads": heads, "peak": storages.peak_bytes})
    return made


def compared(name: str, checkout: Path, megatron: Path, folder: Path) -> list[dict[str, Any]]:
    """A stack's rows, in a process that imports it."""
    os.chdir(folder)
    sys.path[:0] = [str(megatron), str(checkout / "src")]
    module: Any = importlib.import_module(f".{MODULES[name]}", __package__)
    if name == "tests":
        rows: list[dict[str, Any]] = module.rows(checkout)
        return rows
    megatron_cpu.install()
    cuda, config, cpu = vars(torch.cuda), megatron_fused_ce.FusedCEConfig, torch.device("cpu")
    cuda.update(current_device=lambda: cpu, default_generators={cpu: torch.default_generator})
    stack: Stack = module.STACKS[name]
    stack.prepare()
    init: Any = config.__init__
    small: Any = {"strategy": "recompute", "chunk_tokens": 8}  # which these sizes would not make it do
    config.__init__ = lambda *given, **named: init(*given, **small | named)  # type: ignore[method-assign]
    seen: list[list[Any]] = []
    for ours in (False, True):
        copy = folder / str(int(ours))
        if stack.has_diff:
            copy.mkdir()
            subprocess.run(["tar", "x"], input=git(checkout, "archive", "HEAD", name), cwd=copy, check=True)
            if ours:
                diff = REPOSITORY / "scripts" / "examples" / "rl" / f"{name}.diff"
                subprocess.run(["git", "apply", diff], cwd=copy, check=True)
        stack.load(copy, name)
        if ours and stack.enabled is not None:
            megatron_fused_ce.enable(config(logit_precision="activations"), **stack.enabled)
        seen.append([])
        for (tp, cp), group in itertools.groupby(stack.cases, lambda case: (case.tp, case.cp)):
            given = stack, list(group), ours, folder / f"store{ours}{len(seen[-1])}"
            made = in_forks(tp * cp, functools.partial(seen_by, *given))
            seen[-1] += zip(*made, strict=True)
    return [row_of(stack, *each) for each in zip(stack.cases, *seen, strict=True)]


def row_of(stack: Stack, case: Any, off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest differences of all ranks, the heads of each kind of rank, the largest peaks."""
    apart: dict[str, Any] = dict.fromkeys(NUMBERS)
    values, gradients = BOUNDS[case.dtype]
    bounds = dict(zip(NUMBERS, (values, values, *[max(gradients, stack.rounded)] * 2), strict=True))
    close, named, something = True, set(), set()
    for without, made in zip(off, on, strict=True):
        assert without["seen"].keys() == made["seen"].keys(), case.line
        for key, right in without["seen"].items():
            got = made["seen"][key]
            assert (got is None) == (right is None) and getattr(got, "shape", 0) == getattr(right, "shape", 0)
            if right is None or not right.numel():
                continue
            named |= {key}
            something |= {key} if right.any() else set()
            short = key if key in NUMBERS else "worst gradient"
            difference = float((got - right).norm() / right.norm().clamp_min(1e-30))
            apart[short] = max(apart[short] or 0.0, difference)
            close = close and difference <= bounds[short]  # NaN is not
    assert named == something, f"{case.line}: {named - something} are compared with nothing"
    peak = tuple(max(rank["peak"] for rank in side) for side in (off, on))
    heads = sorted({rank["heads"] for rank in on})
    if case.left is None:
        served = all(fused == 0 and stock > 0 for fused, _, stock in heads)
    else:
        real = getattr(case, "real", 0)
        served = all((each[0] == 0) == bool(real) and each[1:] == (real, case.left) for each in heads)
        served = served and (bool(real) or peak[1] < peak[0])
    row = {"case": case.line, "dtype": case.dtype, **apart, "heads": heads, "peak": peak}
    row |= {"left": case.left, "materialised": getattr(case, "real", 0)}  # what is expected of the heads
    return row | {"equal": close and served}


def git(checkout: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True).stdout


def rows_of(name: str, checkout: Path, megatron: Path) -> list[dict[str, Any]]:
    commit, its = (
        git(one, "rev-parse", "--short=9", "HEAD").decode().strip() for one in (checkout, megatron)
    )
    if git(megatron, "diff", "--name-only", "--diff-filter=M", "HEAD", "--", "megatron"):
        its += "*"  # slime patches its own
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (rows,) = in_forks(1, lambda _: compared(name, checkout, megatron, folder))
    named = {"stack": f"{name} {commit}", "megatron": its, **dict.fromkeys((*NUMBERS, "peak"))}
    return [{**named, **row} for row in rows]


def cells(row: dict[str, Any]) -> list[str]:
    numbers = [tables.cell(row[name], ".0e") for name in NUMBERS]
    heads = "; ".join(" ".join(map(str, heads)) for heads in row["heads"])
    peaks = " → ".join(f"{size / 1024:.1f}" for size in row["peak"] or ())
    named = [row[name] for name in COLUMNS[:3]]
    return [*named, *numbers, heads, peaks, "yes" if row["equal"] else "**no**"]


def main(words: list[str] | None = None) -> int:
    parser = Parser("python -m scripts.dev.stacks", __doc__ or "")
    parser.add_argument(
        "--of", nargs=3, action="append", default=[], metavar=("NAME", "CHECKOUT", "MEGATRON"),
        help=f"one of {', '.join(MODULES)}; of train_rl, labels and tests both are a Megatron-LM",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(words)
    unknown = [name for name, *_ in options.of if name not in MODULES]
    if unknown or not options.of:
        parser.error(f"--of {' '.join(unknown)}: expected some of {', '.join(MODULES)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # also of forks, which have none of its others
    rows = [row for name, *paths in options.of for row in rows_of(name, *(Path(p).resolve() for p in paths))]
    print(tables.markdown(COLUMNS, map(cells, rows), left=3))
    if options.out:
        made = [{"shape": row["case"], "variant": row["stack"], **row} for row in rows]
        results.write(options.out, made, results.made_by("", ["scripts.dev.stacks"]))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
