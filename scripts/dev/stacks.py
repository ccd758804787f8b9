"""RL stacks' own functions with scripts/examples/rl's diffs and without, each on its Megatron, on a CPU.

    python -m scripts.dev.stacks --of slime ~/slime ~/Megatron-LM --of verl ~/verl ~/Megatron-LM-0.18

A row is a case: layout, context and tensor parallelism (with sequence parallelism), dtype, temperature,
entropy. In four processes that import the stack as it is, then with its diff: a small GPTModel of that
Megatron, the stack's functions from the model's call to the response's log-probabilities and entropy, a
backward. Rows have the norm of the difference by the norm without the diff, of results, of the gradients of
hidden states and of all weights; heads; peak bytes of logits. Exit status 1 where a row is not equal.

Beside them ``bridge``: heads of models that Megatron-Bridge builds (:mod:`.stacks_bridge`), with what it
imports on PYTHONPATH (pip install --no-deps --target FOLDER 'transformers>=5.8,<=5.12.1' 'huggingface-hub<2'
'tokenizers<=0.23.0' httpx httpcore safetensors regex omegaconf antlr4-python3-runtime==4.9.3 hydra-core
datasets accelerate peft diffusers); and ``tests``: Megatron's own unit tests around the head
(:mod:`.stacks_tests`; most want a GPU and Transformer Engine).

Stand-ins: Megatron's decoder gets no packed_seq_params (its attention takes the pack for one sequence: what a
CPU has knows neither packing nor context parallelism) and positions are not embedded. What cannot be imported
is a mock. Trainers, rollouts and packages' ``__init__`` do not run. The head works on 8 tokens at a time and
recomputes, which these sizes would not make it do.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce.command_line import Parser
from megatron_fused_ce.scripts.dev import stacks_tests
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu, results, tables
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from megatron_fused_ce.scripts.lib.results import REPOSITORY

#: Norm of a difference by norm: values, gradients. Of bf16 models both sides round logits and their gradient.
BOUNDS = {"fp32": (1e-6, 1e-5), "bf16": (5e-3, 2e-2)}
#: Gradients of fp32 models where the stack's own are rougher: miles rounds those of logits to bf16.
ROUNDED = {"miles": 5e-3}
VOCAB, HIDDEN, RANKS = 160, 56, 4
EXAMPLES = REPOSITORY / "scripts" / "examples" / "rl"
#: Tokens of each sample, and how many of them are its response. ``one``: with context parallelism a rank has
#: no response token.
SAMPLES = {
    "usual": ((16, 8, 24), (7, 5, 9)),
    "empty": ((16, 8, 24), (4, 0, 7)),
    "one": ((64,), (6,)),
}


class Case(NamedTuple):
    tp: int
    cp: int
    layout: str  # packed or padded
    dtype: str
    temperature: float
    entropy: str  # none, detached or differentiable
    samples: str = "usual"
    mtp: int = 0
    grad: bool = True

    def __str__(self) -> str:
        parts = [f"TP {self.tp}", f"CP {self.cp}", self.layout, self.dtype, f"T {self.temperature}"]
        parts += [f"entropy {self.entropy}"] if self.entropy != "none" else []
        parts += {"usual": [], "empty": ["an empty response"], "one": ["a rank without response"]}[
            self.samples
        ]
        return ", ".join([*parts, *(["MTP"] if self.mtp else []), *([] if self.grad else ["no_grad"])])

    @property
    def tokens(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(1, VOCAB, (n,), generator=generator) for n in SAMPLES[self.samples][0]]

    @property
    def lengths(self) -> dict[str, list[int]]:
        totals, responses = SAMPLES[self.samples]
        return {"total_lengths": list(totals), "response_lengths": list(responses)}


class Made(NamedTuple):
    """Of the response's tokens on this rank, and what the stack adds to its loss where there are none."""

    log_prob: Tensor
    entropy: Tensor | None = None
    nothing: Tensor | None = None


def _concatenated(made: dict[str, Any], logits: Any) -> Made:
    log_prob = torch.cat(made["log_probs"])
    # slime's loss.py:1134, miles' losses.py:338
    nothing = 0 * logits.sum() if log_prob.numel() == 0 and torch.is_grad_enabled() else None
    return Made(log_prob, torch.cat(made["entropy"]) if "entropy" in made else None, nothing)


def slime(model: Any, case: Case, ours: bool) -> Made:
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    cut = importlib.import_module("slime.backends.megatron_utils.cp_utils").slice_with_cp
    ids = torch.cat([cut(one, 0) for one in case.tokens])[None]
    logits = model(ids, None, None, **({"mtp_kwargs": {"mtp_labels": ids}} if case.mtp else {}))
    args = dict(rollout_temperature=case.temperature, log_probs_chunk_size=8, allgather_cp=False)
    args["entropy_coef"] = 0.01 * (case.entropy == "differentiable")
    _, made = loss.get_log_probs_and_entropy(
        logits, args=types.SimpleNamespace(**args), unconcat_tokens=case.tokens, **case.lengths,
        with_entropy=case.entropy != "none",
    )  # fmt: skip
    return _concatenated(made, logits)


def miles(model: Any, case: Case, ours: bool) -> Made:
    from megatron.core import mpu

    def group(kind: str) -> types.SimpleNamespace:
        of = {word: getattr(mpu, f"get_{kind}_parallel_{word}")() for word in ("world_size", "rank", "group")}
        return types.SimpleNamespace(size=of.pop("world_size"), **of)

    state = types.SimpleNamespace(cp=group("context"), tp=group("tensor_model"))
    importlib.import_module("miles.backends.training_utils.parallel").set_parallel_state(state)
    utils = importlib.import_module("miles.backends.training_utils.cp_utils")
    functions = importlib.import_module("miles.backends.training_utils.loss_hub.logit_processors")
    padded = case.layout == "padded"
    longest = [max(map(len, case.tokens))] * len(case.tokens) if padded else [None] * len(case.tokens)
    form: dict[str, Any] = {"qkv_format": "bshd" if padded else "thd"}
    rows = [
        utils.slice_with_cp(x, 0, max_seq_len=n, **form) for x, n in zip(case.tokens, longest, strict=True)
    ]
    ids = torch.stack(rows) if padded else torch.cat(rows)[None]
    logits = model(ids, None, None, **({"mtp_kwargs": {"mtp_labels": ids}} if case.mtp else {}))
    args = dict(rollout_temperature=case.temperature, log_probs_chunk_size=8, allgather_cp=False)
    args |= {"true_on_policy_mode": False, **form}
    made = functions.get_log_probs_and_entropy(
        logits, args=types.SimpleNamespace(**args), unconcat_tokens=case.tokens, **case.lengths,
        with_entropy=case.entropy != "none", entropy_requires_grad=case.entropy == "differentiable",
        max_seq_lens=longest if padded else None,
    )  # fmt: skip
    return _concatenated(made, logits)


def unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


class Batch(dict[str, Any]):
    """What verl takes of a TensorDict."""

    def to(self, device: Any) -> Batch:
        return self


def verl(model: Any, case: Case, ours: bool) -> Made:
    """The engine's forward_step: with its fused kernels on (the diff's), or with logits."""
    impl = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    fused: Any = importlib.import_module("verl.models.mcore.model_forward_fused")
    fused.CausalLMOutputForPPO = types.SimpleNamespace  # a dataclass of transformers'
    if ours:
        fused.patch_fused_forward(model)
    engine: Any = object.__new__(impl.MegatronEngineWithLMHead)
    off = types.SimpleNamespace(enable=False, enable_train=False)
    vars(engine).update(
        engine_config=types.SimpleNamespace(
            use_fused_kernels=ours, use_remove_padding=True, pad_to_length=False,
            dynamic_context_parallel=False, entropy_from_logits_with_chunking=False,
            router_replay=types.SimpleNamespace(mode="disabled"),
        ),
        model_config=types.SimpleNamespace(
            hf_config=types.SimpleNamespace(architectures=["Qwen3ForCausalLM"]), mtp=off,
            tokenizer=types.SimpleNamespace(pad_token_id=0),
        ),
        tf_config=unwrapped(model).config, enable_routing_replay=False,
    )  # fmt: skip
    nested = functools.partial(torch.nested.nested_tensor, layout=torch.jagged)
    responses = case.lengths["response_lengths"]
    parts = [(x[: len(x) - n], x[len(x) - n :]) for x, n in zip(case.tokens, responses, strict=True)]
    batch = Batch(
        input_ids=nested(case.tokens), temperature=torch.full((len(parts),), case.temperature),
        loss_mask=nested([torch.ones(n, dtype=torch.int64) for n in responses]),
        calculate_entropy=case.entropy != "none",
        prompts=nested([one for one, _ in parts]), responses=nested([other for _, other in parts]),
    )  # fmt: skip
    coefficient = types.SimpleNamespace(entropy_coeff=0.01 * (case.entropy == "differentiable"))
    loss = functools.partial(lambda config, **_: None, config=coefficient)
    output, _ = engine.forward_step(iter([batch]), model, loss, print)
    to_padding = importlib.import_module("verl.workers.utils.padding").no_padding_2_padding
    kept = torch.arange(max(responses)) < torch.tensor(responses)[:, None]
    return Made(
        *(to_padding(output[name], batch)[kept] for name in ("log_probs", "entropy") if name in output)
    )


def skyrl(model: Any, case: Case, ours: bool) -> Made:
    """Its processor, then its functions of hidden states, by the torch backend or ours."""
    from megatron.core import mpu

    wrapper = importlib.import_module("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper")
    functions = importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
    pack = importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.megatron_utils")
    width, responses = max(map(len, case.tokens)), case.lengths["response_lengths"]
    # Prompts end, and responses begin, in one column.
    columns = -(-(width + max(responses)) // 8) * 8
    sequences = torch.zeros(len(responses), columns, dtype=torch.int64)
    attention = torch.zeros_like(sequences, dtype=torch.bool)
    end = columns - max(responses)
    for row, (one, n) in enumerate(zip(case.tokens, responses, strict=True)):
        where = slice(end - len(one) + n, end + n)
        sequences[row, where], attention[row, where] = one, True
    backend = "fused_ce" if ours else "torch"
    batch = {"sequences": sequences, "num_actions": max(responses)}
    targets = wrapper._targets(batch, backend) if ours else sequences
    context: dict[str, Any] = {}
    processor = {
        "output_processor": wrapper._fused_lm_head_output_processor,
        "output_processor_context": context,
    }
    named = {"chunk_size": 8, "temperature": case.temperature, "fused_backend": backend}
    named["inference_only"] = not case.grad
    rank, group = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_group()
    if case.layout == "packed":
        ids, packed = pack.preprocess_packed_seqs(sequences, attention, pre_process=True)
        hidden = model(ids, None, None, packed_seq_params=packed, **processor)
        weight = context["lm_head_weight"]
        targets = wrapper._build_packed_targets(targets, attention, packed)
        log_prob = functions.from_parallel_hidden_to_logprobs_packed_sequences(
            hidden, weight, targets, packed.cu_seqlens_q_padded, columns, rank * len(weight),
            (rank + 1) * len(weight), group, cp_group=mpu.get_context_parallel_group(),
            attention_mask=attention, **named,
        )  # fmt: skip
    else:
        hidden = model(sequences, None, None, **processor)
        weight = context["lm_head_weight"]
        log_prob = functions.from_parallel_hidden_to_logprobs(
            hidden, weight, targets, rank * len(weight), (rank + 1) * len(weight), group, **named
        )
    if ours:  # it does not pass the adapter, which counts
        megatron_fused_ce.counters().fused += 1
    return Made(log_prob[:, -max(responses) :][attention[:, end:]])


def nemo_rl(model: Any, case: Case, ours: bool) -> Made:
    """Its model_forward, which without the diff needs its patch of GPTModel."""
    train = importlib.import_module("nemo_rl.models.megatron.train")
    ids = torch.stack([one[: min(map(len, case.tokens))] for one in case.tokens])
    data = types.SimpleNamespace(get_multimodal_dict=lambda **_: {})
    with contextlib.ExitStack() as stack:
        if not ours:
            functions, gpt = (
                importlib.import_module("nemo_rl.distributed.model_utils"),
                type(unwrapped(model)),
            )
            stack.enter_context(mock.patch.object(gpt, "forward", gpt.forward))
            stack.enter_context(
                mock.patch.object(gpt, "_linear_ce_fusion_forward_patched", False, create=True)
            )
            functions.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=8)
        return Made(
            train.model_forward(model, data, ids, None, None, use_fused_linear_logprobs=True).flatten()
        )


def train_rl(model: Any, case: Case, ours: bool) -> Made:
    """Megatron-LM's own train_rl.py, by the flag alone."""
    utils: Any = importlib.import_module("megatron.rl.rl_utils")
    utils.get_args = lambda: types.SimpleNamespace(fp16=False, bf16=case.dtype == "bf16")
    vars(importlib.import_module("megatron.training.global_vars"))["_GLOBAL_TIMERS"] = mock.MagicMock()
    ids = torch.stack([one[: min(map(len, case.tokens))] for one in case.tokens])
    return Made(
        utils.get_logprobs(model, ids, torch.arange(ids.shape[1])[None], no_grad=not case.grad).flatten()
    )


def labels(model: Any, case: Case, ours: bool) -> Made:
    """Minus a model's loss, as Bridge, ms-swift and DPO take it, by the flag alone."""
    ids = torch.stack([one[: min(map(len, case.tokens))] for one in case.tokens])
    return Made(-model(ids, None, None, labels=ids.roll(-1, 1)).flatten())


class Stack(NamedTuple):
    run: Callable[[Any, Case, bool], Made]
    cases: tuple[Case, ...]
    #: what its diff turns on where it begins; None: nothing
    enabled: dict[str, Any] | None = None
    has_diff: bool = True


#: Pairs of what each serves.
OF_SAMPLES = (
    Case(1, 1, "packed", "fp32", 1.0, "none"),
    Case(2, 1, "packed", "bf16", 0.7, "differentiable", "empty"),
    Case(2, 1, "packed", "fp32", 0.7, "none", mtp=1),
    Case(2, 1, "packed", "fp32", 0.7, "detached", grad=False),
    Case(1, 2, "packed", "bf16", 1.0, "detached", "empty"),
    Case(1, 2, "packed", "fp32", 0.7, "differentiable"),
    Case(2, 2, "packed", "fp32", 0.7, "differentiable", "one"),
    Case(2, 2, "packed", "bf16", 1.0, "none", "one"),
)
DEFERRED = {"deferred_logits": True}
STACKS = {
    "verl": Stack(
        verl,
        (
            Case(1, 1, "packed", "fp32", 1.0, "none"),
            Case(2, 1, "packed", "bf16", 0.7, "differentiable", "empty"),
            Case(2, 1, "packed", "fp32", 0.7, "detached"),
            Case(1, 2, "packed", "fp32", 0.7, "differentiable", "empty"),
            Case(2, 2, "packed", "bf16", 1.0, "none"),
            Case(2, 2, "packed", "fp32", 0.7, "detached", grad=False),
        ),
    ),
    "skyrl": Stack(
        skyrl,
        (
            Case(1, 1, "padded", "fp32", 1.0, "none"),
            Case(2, 1, "padded", "fp32", 0.7, "none", "empty"),
            Case(2, 1, "packed", "bf16", 0.7, "none", "empty"),
            Case(1, 2, "packed", "bf16", 1.0, "none"),
            Case(1, 2, "packed", "fp32", 0.7, "none", "empty"),
            Case(2, 2, "packed", "fp32", 0.7, "none", "one"),
            Case(2, 2, "packed", "fp32", 1.0, "none", grad=False),
        ),
    ),
    "nemo_rl": Stack(
        nemo_rl,
        (
            Case(1, 1, "padded", "fp32", 1.0, "none"),
            Case(2, 1, "padded", "fp32", 1.0, "none"),
            Case(2, 1, "padded", "bf16", 1.0, "none"),
            Case(2, 1, "padded", "fp32", 1.0, "none", grad=False),
        ),
    ),
    "slime": Stack(slime, OF_SAMPLES, DEFERRED),
    "miles": Stack(
        miles,
        (
            *OF_SAMPLES,
            Case(2, 1, "padded", "fp32", 0.7, "detached", "empty"),
            Case(1, 2, "padded", "bf16", 0.7, "differentiable"),
        ),
        DEFERRED,
    ),
    "train_rl": Stack(
        train_rl,
        (
            Case(1, 1, "padded", "bf16", 1.0, "none"),
            Case(2, 1, "padded", "bf16", 1.0, "none"),
            Case(2, 1, "padded", "bf16", 1.0, "none", grad=False),
        ),
        {},
        has_diff=False,
    ),
    "labels": Stack(
        labels,
        (
            Case(1, 1, "padded", "bf16", 1.0, "none"),
            Case(2, 1, "padded", "fp32", 1.0, "none"),
            Case(2, 1, "padded", "fp32", 1.0, "none", mtp=1),
        ),
        {},
        has_diff=False,
    ),
}
#: What must stay missing: Megatron asks for it, and a mock would be used.
MISSING: tuple[str, ...] = ("transformer_engine", "apex", "flash_attn", "modelopt", "triton_kernels")
MISSING += ("fused_weight_gradient_mlp_cuda",)


class Missing:
    """Base of the classes of a mock: for annotations and as bases."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def missing(name: str) -> Any:
    """A mock's member."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Missing,), {}) if name[0].isupper() else mock.MagicMock(name=name)


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: mocks for all that is missing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in (*MISSING, *sys.stdlib_module_names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def exported(package: str, file: Path, name: str) -> Any:
    """A package's module of this name, or what its ``__init__`` takes from one, without running the rest."""
    if (file.parent / name).is_dir() or (file.parent / f"{name}.py").is_file():
        return importlib.import_module(f"{package}.{name}")
    for line in ast.walk(ast.parse(file.read_text())):
        if isinstance(line, ast.ImportFrom) and name in [alias.name for alias in line.names]:
            module = "." * line.level + (line.module or "")
            return getattr(importlib.import_module(module, package), name)
    return missing(name)


@contextlib.contextmanager
def imported_from(copy: Path, name: str) -> Iterator[None]:
    """The stack's modules are those of ``copy``, whose packages' ``__init__`` do not run."""
    for inside in (copy / name).rglob("__init__.py"):
        package = ".".join(inside.parent.relative_to(copy).parts)
        module = sys.modules[package] = types.ModuleType(package)
        module.__path__, module.__package__ = [str(inside.parent)], package
        module.__getattr__ = functools.partial(exported, package, inside)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for imported in [imported for imported in sys.modules if imported.split(".")[0] == name]:
            del sys.modules[imported]


def small_chunks() -> None:
    """Where a config names nothing else."""
    config: Any = megatron_fused_ce.FusedCEConfig
    stock = config.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        stock(self, *given, **{"strategy": "recompute", "chunk_tokens": 8, **named})

    config.__init__ = init


def build(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    plain = dict.fromkeys(("add_bias_linear", "bias_dropout_fusion", "masked_softmax_fusion"), False)
    plain |= dict.fromkeys(("persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion"), False)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, tensor_model_parallel_size=case.tp, sequence_parallel=case.tp > 1,
        params_dtype=dtype, bf16=case.dtype == "bf16", mtp_num_layers=case.mtp or None,
        mtp_loss_scaling_factor=0.1, init_method_std=0.4, **plain,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    of_mtp = None
    if case.mtp:
        of_mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=64, share_embeddings_and_output_weights=False,
        position_embedding_type="none", mtp_block_spec=of_mtp,
    ).to(dtype)  # fmt: skip
    assert parallel_state.get_tensor_model_parallel_world_size() == case.tp
    return model if dtype == torch.float32 else Float16Module(config, model)


def run(stack: Stack, case: Case, ours: bool) -> dict[str, Any]:
    """Numbers of one case on this rank: results, gradients, heads, peak bytes."""
    model = build(case)
    hidden: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        hidden.append(output)
        if output.requires_grad:
            output.retain_grad()

    unwrapped(model).decoder.register_forward_hook(keep)
    counters = megatron_fused_ce.counters()
    counters.reset()
    with (
        LogitStorages(vocab_rows=VOCAB // case.tp, hidden_size=HIDDEN) as storages,
        torch.set_grad_enabled(case.grad),
    ):
        made = stack.run(model, case, ours)
        upstream = torch.randn(2, made.log_prob.numel(), generator=torch.Generator().manual_seed(4))
        if case.grad:
            total = (made.log_prob * upstream[0]).sum()
            if case.entropy == "differentiable":
                assert made.entropy is not None
                total = total + (made.entropy * upstream[1]).sum()
            if made.nothing is not None:
                total += made.nothing
            total.backward()
    seen: dict[str, Any] = {"log_prob": made.log_prob.detach(), "entropy": made.entropy}
    assert (made.entropy is None) == (case.entropy == "none")
    if made.entropy is not None:
        seen["entropy"] = made.entropy.detach()
        assert not ours or made.entropy.requires_grad == (case.entropy == "differentiable" and case.grad)
    if case.grad:
        seen["gradient of hidden states"] = hidden[-1].grad
        seen |= {f"gradient of {name}": value.grad for name, value in model.named_parameters()}
    heads = counters.fused, counters.materialised, counters.stock
    return {"seen": seen, "heads": heads, "peak": storages.peak_bytes}


def of_rank(name: str, folder: Path) -> None:
    """All cases on one rank, as the stack is and with its diff; the first rank writes the rows."""
    megatron_cpu.install()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.default_generators = {torch.device("cpu"): torch.default_generator}
    gloo.use_one_thread()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401  before the mocks
    from megatron.core.transformer.transformer_block import TransformerBlock

    stock = TransformerBlock.forward

    @functools.wraps(stock)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return stock(self, *given, **named | {"packed_seq_params": None})

    TransformerBlock.forward = forward
    sys.meta_path.append(Mocks())
    small_chunks()
    stack = STACKS[name]
    seen: list[list[dict[str, Any]]] = []
    for ours in (False, True):
        seen.append([])
        if ours and stack.enabled is not None:
            config = megatron_fused_ce.FusedCEConfig(logit_precision="activations")
            megatron_fused_ce.enable(config, **stack.enabled)
        with imported_from(folder / str(int(ours)), name):
            for case in stack.cases:
                parallel_state.destroy_model_parallel()
                parallel_state.initialize_model_parallel(case.tp, context_parallel_size=case.cp)
                seen[-1].append(run(stack, case, ours))
    rows = [row_of(name, case, *pair) for case, *pair in zip(stack.cases, *seen, strict=True)]
    (folder / f"rows{dist.get_rank()}").write_text(json.dumps(rows))
    dist.destroy_process_group()


def row_of(name: str, case: Case, off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """One rank's."""
    apart: dict[str, float] = {}
    nothing: list[str] = []
    for key, right in off["seen"].items():
        got = on["seen"][key]
        if (got is None) != (right is None) or (right is not None and got.shape != right.shape):
            raise AssertionError(f"{name}, {case}: {key} is {got}, without the diff {right}")
        if right is not None and right.numel():
            nothing += [] if right.any() else [key]
            difference = (got.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30)
            short = key if key in ("log_prob", "entropy", "gradient of hidden states") else "worst gradient"
            apart[short] = max(apart.get(short, 0.0), float(difference))
    row = {"case": str(case), "dtype": case.dtype, "nothing": nothing, "heads": on["heads"]}
    return row | {"peak": (off["peak"], on["peak"])} | apart


NUMBERS = ("log_prob", "entropy", "gradient of hidden states", "worst gradient")


def worst(ranks: Any) -> dict[str, Any]:
    """A case's row over its ranks: the largest differences, the heads of each kind of rank, all peaks."""
    zero_everywhere = set.intersection(*(set(rank.pop("nothing")) for rank in ranks))
    assert not zero_everywhere, f"{ranks[0]['case']}: {zero_everywhere} are compared with nothing"
    row = {**ranks[0], "heads": sorted({tuple(rank["heads"]) for rank in ranks})}
    row |= {n: max((r[n] for r in ranks if n in r), default=None) for n in NUMBERS}
    return row | {"peak": tuple(max(rank["peak"][side] for rank in ranks) for side in (0, 1))}


def git(checkout: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True).stdout


def compare(name: str, checkout: Path, megatron: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, stack = Path(scratch), STACKS[name]
        for ours in (False, True) if stack.has_diff else ():
            copy = folder / str(int(ours))
            copy.mkdir()
            packed = git(checkout, "archive", "HEAD", name)
            subprocess.run(["tar", "x"], input=packed, cwd=copy, check=True)
            if ours:
                subprocess.run(["git", "apply", EXAMPLES / f"{name}.diff"], cwd=copy, check=True)
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
        words += [f"{megatron_fused_ce.__name__}.scripts.dev.stacks", "--rank", name, str(folder)]
        search = map(str, (megatron.resolve(), REPOSITORY))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout}{done.stderr}")
        of_ranks = [json.loads((folder / f"rows{rank}").read_text()) for rank in range(RANKS)]
        rows = [worst(ranks) for ranks in zip(*of_ranks, strict=True)]
    return with_commits(name, checkout, megatron, [row | {"equal": is_equal(name, row)} for row in rows])


def of_bridge(checkout: Path, megatron: Path) -> list[dict[str, Any]]:
    search = [megatron.resolve(), checkout.resolve() / "src", REPOSITORY, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron_fused_ce.scripts.dev.stacks_bridge"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bridge: {done.stdout}{done.stderr}")
    rows = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    return with_commits("bridge", checkout, megatron, rows)


def with_commits(
    name: str, checkout: Path, megatron: Path, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    commits = {"stack": f"{name} {name_of(checkout)}", "megatron": name_of(megatron)}
    if git(megatron, "diff", "--name-only", "--diff-filter=M", "HEAD", "--", "megatron"):
        commits["megatron"] += "*"  # slime patches its own
    return [{**commits, **dict.fromkeys((*NUMBERS, "peak")), **row} for row in rows]


def is_equal(name: str, row: dict[str, Any]) -> bool:
    """Whether results and gradients are, no logits were made, and their peak is no larger."""
    values, gradients = BOUNDS[row["dtype"]]
    bounds = dict.fromkeys(NUMBERS[:2], values) | dict.fromkeys(
        NUMBERS[2:], max(gradients, ROUNDED.get(name, 0))
    )
    close = all(row[n] is None or row[n] <= bounds[n] for n in NUMBERS)
    # The heads of multi-token prediction are called by functional_call in miles: Megatron computes them.
    left = 1 if name == "miles" and "MTP" in row["case"] else 0
    fused = all(heads[0] > 0 and heads[1:] == (0, left) for heads in row["heads"])
    return close and fused and row["peak"][1] <= row["peak"][0]


def name_of(checkout: Path) -> str:
    return git(checkout, "rev-parse", "--short=9", "HEAD").decode().strip()


OTHERS: dict[str, Callable[[Path, Path], list[dict[str, Any]]]] = {
    "bridge": of_bridge,
    "tests": lambda checkout, megatron: with_commits(
        "tests", checkout, megatron, stacks_tests.rows(checkout)
    ),
}
COLUMNS = ("stack", "megatron", "case", *NUMBERS, "heads", "peak KiB", "equal")


def cells(row: dict[str, Any]) -> list[str]:
    numbers = [tables.cell(row[name], ".0e") for name in NUMBERS]
    heads = "; ".join(" ".join(map(str, heads)) for heads in row["heads"])
    peaks = " → ".join(f"{size / 1024:.1f}" for size in row["peak"] or ())
    return [
        row["stack"],
        row["megatron"],
        row["case"],
        *numbers,
        heads,
        peaks,
        "yes" if row["equal"] else "**no**",
    ]


def main(words: list[str] | None = None) -> int:
    parser = Parser("python -m scripts.dev.stacks", __doc__ or "")
    parser.add_argument(
        "--of", nargs=3, action="append", default=[], metavar=("NAME", "CHECKOUT", "MEGATRON"),
        help=f"one of {', '.join((*STACKS, *OTHERS))}; of train_rl, labels and tests both are a Megatron-LM",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.rank:
        of_rank(options.rank[0], Path(options.rank[1]))
        gloo.leave()
    rows = []
    unknown = [name for name, *_ in options.of if name not in {**STACKS, **OTHERS}]
    if unknown or not options.of:
        parser.error(f"--of {' '.join(unknown)}: expected some of {', '.join((*STACKS, *OTHERS))}")
    for name, *paths in options.of:
        rows += OTHERS.get(name, functools.partial(compare, name))(*map(Path, paths))
    print(tables.markdown(COLUMNS, map(cells, rows), left=3))
    if options.out:
        made = [{"shape": row["case"], "variant": row["stack"], **row} for row in rows]
        results.write(options.out, made, results.made_by("", ["scripts.dev.stacks"]))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
