"""Log-probabilities of RL frameworks, each on the Megatron that it pins, with and without our diff, on a CPU.

    python -m scripts.dev.rl_heads --of slime ~/slime ~/Megatron-LM --of verl ~/verl ~/Megatron-LM-0.18

For each framework: two copies of its checkout, one with scripts/examples/rl/NAME.diff; a small GPTModel of
that Megatron on two ranks, with sequence parallelism and its own output layer; the framework's functions
from the model's call to log-probabilities and entropy; a backward. Results and gradients of both copies are
compared: norm of the difference by norm without the diff. What cannot be imported is a mock; the packages'
``__init__`` and the trainers around these functions do not run. Exit status 1 where that is above 1e-5
(miles' gradients: its own are rounded), or where a head was not fused.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce.command_line import Parser
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu, results, tables
from megatron_fused_ce.scripts.lib.results import REPOSITORY

BOUND = 1e-5
#: Of gradients, where the framework's own are rougher: miles rounds the gradient of the logits to bf16.
ROUNDED = {"miles": 5e-3}
VOCAB, SEQUENCE, RANKS = 160, 24, 2
#: Of three samples: all tokens, those of the response. Together the sequence.
TOTALS, RESPONSES = [9, 5, 10], [4, 3, 7]
TEMPERATURE = 0.7
EXAMPLES = REPOSITORY / "scripts" / "examples" / "rl"
Outputs = tuple[Tensor, Tensor | None]  # log-probabilities and entropies


def verl(model: Any, ids: Tensor, ours: bool) -> Outputs:
    """Its fused processor; without the diff that needs a GPU, and its unfused functions take logits."""
    labels = ids.roll(-1, 1)
    if ours:
        fused: Any = importlib.import_module("verl.models.mcore.model_forward_fused")
        fused.CausalLMOutputForPPO = SimpleNamespace  # a dataclass of transformers'
        context = fused.FusedOutputProcessorContext(temperature=TEMPERATURE)
        processor = {"output_processor": fused.fused_output_processor, "output_processor_context": context}
        made = model(ids, None, None, labels=labels, **processor)
        return made.log_probs, made.entropy
    unfused = importlib.import_module("verl.utils.megatron.tensor_parallel")
    logits = model(ids, None, None).div(TEMPERATURE)
    entropy = unfused.vocab_parallel_entropy(logits.clone())
    return unfused.vocab_parallel_log_probs_from_logits(logits, labels)[0], entropy[0]


def skyrl(model: Any, ids: Tensor, ours: bool) -> Outputs:
    """Its processor, then its function of hidden states, by the torch backend or ours."""
    wrapper = importlib.import_module("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper")
    functions = importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
    context: dict[str, Any] = {}
    processor = {"output_processor": wrapper._fused_lm_head_output_processor}
    hidden = model(ids, None, None, **processor, output_processor_context=context)
    weight, group = context["lm_head_weight"], model.output_layer.tp_group
    start = group.rank() * len(weight)
    if ours:  # it does not pass the adapter, which counts
        megatron_fused_ce.counters().fused += 1
    log_prob = functions.from_parallel_hidden_to_logprobs(
        hidden, weight, ids, start, start + len(weight), group,
        temperature=TEMPERATURE, fused_backend="fused_ce" if ours else "torch",
    )  # fmt: skip
    return log_prob, None


def nemo_rl(model: Any, ids: Tensor, ours: bool) -> Outputs:
    """Its model_forward, which without the diff needs its patch of GPTModel."""
    train = importlib.import_module("nemo_rl.models.megatron.train")
    if not ours:
        functions = importlib.import_module("nemo_rl.distributed.model_utils")
        functions.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
    data = SimpleNamespace(get_multimodal_dict=lambda **_: {})
    return train.model_forward(model, data, ids, None, None, use_fused_linear_logprobs=True), None


def _of_samples(module: str, ids: Tensor, logits: Any, **options: Any) -> Outputs:
    function = importlib.import_module(module).get_log_probs_and_entropy
    named: dict[str, Any] = dict.fromkeys(("allgather_cp", "true_on_policy_mode"), False)
    named |= {"rollout_temperature": TEMPERATURE, "log_probs_chunk_size": 5, "entropy_coef": 0.01}
    made = function(
        logits, args=SimpleNamespace(**named, qkv_format="thd"), unconcat_tokens=list(ids[0].split(TOTALS)),
        total_lengths=TOTALS, response_lengths=RESPONSES, with_entropy=True, **options,
    )  # fmt: skip
    made = made if isinstance(made, dict) else made[1]
    return torch.cat(made["log_probs"]), torch.cat(made["entropy"])


def slime(model: Any, ids: Tensor, ours: bool) -> Outputs:
    """Its loss's function of the logits that the model returned."""
    return _of_samples("slime.backends.megatron_utils.loss", ids, model(ids, None, None).float())


def miles(model: Any, ids: Tensor, ours: bool) -> Outputs:
    name = "miles.backends.training_utils.loss_hub.logit_processors"
    alone, group = SimpleNamespace(size=1, rank=0), model.output_layer.tp_group
    state = SimpleNamespace(cp=alone, tp=SimpleNamespace(group=group, size=RANKS, rank=group.rank()))
    module: Any = importlib.import_module(name)
    module.get_parallel_state = lambda: state
    return _of_samples(name, ids, model(ids, None, None).float())


def dev(model: Any, ids: Tensor, ours: bool) -> Outputs:
    """Megatron's dev branch itself: minus the loss of its LinearCrossEntropyModule."""
    return -model(ids, None, None, labels=ids.roll(-1, 1)), None


FRAMEWORKS: dict[str, Callable[[Any, Tensor, bool], Outputs]] = {
    **{"verl": verl, "skyrl": skyrl, "nemo_rl": nemo_rl, "slime": slime, "miles": miles, "megatron": dev},
}
#: Those that turn the flag on, as their diffs do where they begin.
ENABLED: dict[str, dict[str, Any]] = {"slime": {"deferred_logits": True}, "miles": {"deferred_logits": True}}
ENABLED["megatron"] = {}
#: What must stay missing: Megatron asks for it, and a mock would be used.
MISSING = ("transformer_engine", "apex", "flash_attn", "fused_weight_gradient_mlp_cuda", "triton_kernels")


class Missing:
    """Base of the classes of a mock: for annotations and as bases."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: mocks for all that is missing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in (*MISSING, *sys.stdlib_module_names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)

        def member(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Missing,), {}) if name[0].isupper() else mock.MagicMock(name=name)

        module.__getattr__ = member  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def of_rank(name: str, ours: bool, folder: Path) -> None:
    """One rank's losses and gradients, written below ``folder``."""
    megatron_cpu.install()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.default_generators = {torch.device("cpu"): torch.default_generator}
    gloo.use_one_thread()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(RANKS)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    plain = dict.fromkeys(("add_bias_linear", "bias_dropout_fusion", "masked_softmax_fusion"), False)
    plain |= dict.fromkeys(("persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion"), False)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, tensor_model_parallel_size=RANKS, sequence_parallel=True, **plain,
    )  # fmt: skip
    if ours and name in ENABLED:
        megatron_fused_ce.enable(**ENABLED[name])
    model = GPTModel(
        config, gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    for inside in Path(name).rglob("__init__.py") if name != "megatron" else ():
        package = ".".join(inside.parent.parts)
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(inside.parent)]
    sys.meta_path.append(Mocks())
    ids = torch.randint(0, VOCAB, (1, SEQUENCE), generator=torch.Generator().manual_seed(3))
    log_prob, entropy = FRAMEWORKS[name](model, ids, ours)
    upstream = torch.randn(2, log_prob.numel(), generator=torch.Generator().manual_seed(4))
    total = (log_prob.flatten() * upstream[0]).sum()
    if entropy is not None and entropy.requires_grad:
        total = total + (entropy.flatten() * upstream[1]).sum()
    total.backward()
    made = {"log_prob": log_prob.detach().flatten()}
    made |= {} if entropy is None else {"entropy": entropy.detach().flatten()}
    made |= {f"gradient of {key}": value.grad for key, value in model.named_parameters()}
    counted = megatron_fused_ce.counters()
    heads = (counted.fused, counted.materialised, counted.stock)
    layer = type(model.output_layer)
    kind = next(base for base in layer.__mro__ if base.__module__.startswith("megatron."))
    numbers = {key: value.flatten().tolist() for key, value in made.items()}
    content = numbers, heads, f"{kind.__module__}.{kind.__name__}"
    (folder / f"{int(ours)}-{dist.get_rank()}").write_text(json.dumps(content))
    dist.destroy_process_group()


def git(checkout: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True).stdout


def compare(name: str, checkout: Path, megatron: Path) -> dict[str, Any]:
    """A row of the results: heads fused, and how far both copies are apart."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for ours in (False, True):
            copy = folder / f"copy {int(ours)}"
            copy.mkdir()
            if name != "megatron":
                packed = git(checkout, "archive", "HEAD", name)
                subprocess.run(["tar", "x"], input=packed, cwd=copy, check=True)
                diff = EXAMPLES / f"{name}.diff"
                if ours:
                    subprocess.run(["git", "apply", diff], cwd=copy, check=True)
            paths = map(str, (copy, megatron.resolve(), REPOSITORY))
            words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
            words += [f"{megatron_fused_ce.__name__}.scripts.dev.rl_heads", "--rank", name, str(int(ours))]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", *words, str(folder)]
            subprocess.run(command, cwd=copy, env=environment, check=True)
        worst: dict[str, float] = {}
        fused, head = [], ""
        for rank in range(RANKS):
            own, _, head = json.loads((folder / f"0-{rank}").read_text())
            got, heads, _ = json.loads((folder / f"1-{rank}").read_text())
            fused.append(heads)
            for key, numbers in own.items():
                right = torch.tensor(numbers, dtype=torch.float64)
                apart = float((torch.tensor(got[key], dtype=torch.float64) - right).norm() / right.norm())
                short = "worst gradient" if key.startswith("gradient") else key
                worst[short] = max(worst.get(short, 0.0), apart)
    shown = {"head": head, "fused / materialised / stock": " ".join(map(str, fused[0]))}
    row = dict.fromkeys(results.ROW) | {"shape": f"TP {RANKS} SP", "variant": name} | shown
    commits = {"commit": name_of(checkout), "megatron": name_of(megatron)}
    bounds = {key: ROUNDED.get(name, BOUND) if "gradient" in key else BOUND for key in worst}
    passed = all(heads[:2] == [1, 0] for heads in fused)
    passed &= all(apart <= bounds[key] for key, apart in worst.items())
    return row | commits | worst | {"passed": passed}


def name_of(checkout: Path) -> str:
    """Its commit, with * where files of Megatron's are changed (slime patches it)."""
    changed = git(checkout, "diff", "--name-only", "--diff-filter=M", "HEAD").split()
    return git(checkout, "rev-parse", "--short=9", "HEAD").decode().strip() + ("*" if changed else "")


def main(words: list[str] | None = None) -> int:
    parser = Parser("python -m scripts.dev.rl_heads", __doc__ or "")
    parser.add_argument(
        "--of", nargs=3, action="append", default=[], metavar=("NAME", "CHECKOUT", "MEGATRON"),
        help=f"one of {', '.join(FRAMEWORKS)}; megatron: its dev branch, twice",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.rank:
        name, ours, folder = options.rank
        of_rank(name, bool(int(ours)), Path(folder))
        return 0
    rows = [compare(name, Path(checkout), Path(megatron)) for name, checkout, megatron in options.of]
    columns = ["variant", "commit", "megatron", "head", "fused / materialised / stock", "log_prob", "entropy"]
    columns += ["worst gradient", "passed"]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    print(tables.markdown(columns, cells, left=5))
    if options.out:
        results.write(options.out, rows, results.made_by("", ["scripts.dev.rl_heads"]))
    return 0 if all(row["passed"] for row in rows) else 1


def _cell(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
