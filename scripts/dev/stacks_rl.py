"""RL stacks' functions, and the cases in which :mod:`.stacks` compares them.

Stand-ins: Megatron's decoder gets no packed_seq_params (its attention takes the pack for one sequence: what a
CPU has knows neither packing nor context parallelism) and positions are not embedded. Trainers, rollouts and
packages' ``__init__`` do not run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce.scripts.dev.stacks import Mocks, Stack, missing

VOCAB, HIDDEN = 160, 56
#: Tokens of each sample, and how many of them are its response.
SAMPLES = {
    "usual": ((16, 8, 24), (7, 5, 9)),
    "an empty response": ((16, 8, 24), (4, 0, 7)),
    "a rank without response": ((64,), (6,)),
}
#: Pairs of what each serves.
CASES = """
verl
TP 1, CP 1, packed, fp32, T 1.0
TP 2, CP 1, packed, bf16, T 0.7, entropy differentiable, an empty response
TP 2, CP 1, packed, fp32, T 0.7, entropy detached
TP 1, CP 2, packed, fp32, T 0.7, entropy differentiable, an empty response
TP 2, CP 2, packed, bf16, T 1.0
TP 2, CP 2, packed, fp32, T 0.7, entropy detached, no_grad
TP 2, CP 2, packed, fp32, T 0.7, entropy differentiable, a rank without response
skyrl
TP 1, CP 1, padded, fp32, T 1.0
TP 2, CP 1, padded, fp32, T 0.7, an empty response
TP 2, CP 1, packed, bf16, T 0.7, an empty response
TP 1, CP 2, packed, bf16, T 1.0
TP 1, CP 2, packed, fp32, T 0.7, an empty response
TP 2, CP 2, packed, fp32, T 0.7, a rank without response
TP 2, CP 2, packed, fp32, T 1.0, no_grad
nemo_rl
TP 1, CP 1, padded, fp32, T 1.0
TP 2, CP 1, padded, fp32, T 1.0
TP 2, CP 1, padded, bf16, T 1.0
TP 2, CP 1, padded, fp32, T 1.0, no_grad
slime, miles
TP 1, CP 1, packed, fp32, T 1.0
TP 2, CP 1, packed, bf16, T 0.7, entropy differentiable, an empty response
TP 2, CP 1, packed, fp32, T 0.7, MTP
TP 2, CP 1, packed, fp32, T 0.7, entropy detached, no_grad
TP 1, CP 2, packed, bf16, T 1.0, entropy detached, an empty response
TP 1, CP 2, packed, fp32, T 0.7, entropy differentiable
TP 2, CP 2, packed, fp32, T 0.7, entropy differentiable, a rank without response
TP 2, CP 2, packed, bf16, T 1.0, a rank without response
slime
TP 1, CP 1, packed, fp32, T 0.7, entropy detached, replayed top-p
TP 2, CP 1, packed, bf16, T 0.7, an empty response, replayed top-p
TP 1, CP 2, packed, bf16, T 0.7, entropy detached, replayed top-p
TP 2, CP 2, packed, fp32, T 0.7, entropy differentiable, an empty response, replayed top-p
TP 2, CP 2, packed, fp32, T 1.0, a rank without response, replayed top-p
miles
TP 2, CP 1, padded, fp32, T 0.7, entropy detached, an empty response
TP 1, CP 2, padded, bf16, T 0.7, entropy differentiable
train_rl
TP 1, CP 1, padded, bf16, T 1.0
TP 2, CP 1, padded, bf16, T 1.0
TP 2, CP 1, padded, bf16, T 1.0, no_grad
labels
TP 1, CP 1, padded, bf16, T 1.0
TP 2, CP 1, padded, fp32, T 1.0
TP 2, CP 1, padded, fp32, T 1.0, MTP
"""


class Case:
    """A line of the table."""

    hidden_size = HIDDEN

    def __init__(self, line: str, stack: str) -> None:
        tp, cp, self.layout, self.dtype, temperature, *rest = line.split(", ")
        self.line, self.temperature = line, float(temperature[2:])
        self.tp, self.cp = int(tp[3:]), int(cp[3:])
        self.rows = VOCAB // self.tp
        self.entropy = next((word[8:] for word in rest if word.startswith("entropy ")), "none")
        self.mtp, self.grad, self.replayed = "MTP" in rest, "no_grad" not in rest, "replayed top-p" in rest
        # The heads of multi-token prediction are called by functional_call in miles: Megatron computes them.
        self.left = int(self.mtp and stack == "miles")
        # Where top-p is replayed the diff materialises: log-probabilities are slime's own, of real logits.
        self.real = int(self.replayed)
        self.totals, self.responses = SAMPLES[next((word for word in rest if word in SAMPLES), "usual")]
        generator = torch.Generator().manual_seed(3)
        self.tokens = [torch.randint(1, VOCAB, (n,), generator=generator) for n in self.totals]
        self.equally_long = torch.stack([one[: min(self.totals)] for one in self.tokens])

    def of_samples(self) -> dict[str, Any]:
        """What slime's and miles' functions take of them."""
        of = {"total_lengths": list(self.totals), "response_lengths": list(self.responses)}
        return of | {"unconcat_tokens": self.tokens, "with_entropy": self.entropy != "none"}

    def kept(self) -> dict[str, list[Tensor]]:
        """Ids that top-p kept for each response token, as SGLang has them: also without it, or none."""
        generator = torch.Generator().manual_seed(5)
        ids, offsets = [], []
        for tokens, number in zip(self.tokens, self.responses, strict=True):
            sets = [torch.randperm(VOCAB, generator=generator)[: (12, 0, 5)[n % 3]] for n in range(number)]
            drawn = zip(sets[::3], tokens[len(tokens) - number :][::3], strict=True)
            sets[::3] = [torch.cat((one[one != label], label[None])) for one, label in drawn]
            ids.append(torch.cat([tokens[:0], *sets]).int())
            offsets.append(torch.tensor([0, *map(len, sets)], dtype=torch.int32).cumsum(0))
        return {"top_p_token_ids": ids, "top_p_token_offsets": offsets} if self.replayed else {}


# --- a process ----------------------------------------------------------------------------------------

#: What must stay missing: Megatron asks for it, and a mock would be used.
MISSING = {"transformer_engine", "apex", "flash_attn", "modelopt", "triton_kernels"}
MISSING |= {"fused_weight_gradient_mlp_cuda", *sys.stdlib_module_names}


def prepare() -> None:
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401  before the mocks
    from megatron.core.transformer.transformer_block import TransformerBlock

    of_bridge = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [one for one in sys.path if one not in of_bridge]
    stock = TransformerBlock.forward

    @functools.wraps(stock)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return stock(self, *given, **named | {"packed_seq_params": None})

    TransformerBlock.forward = forward
    sys.meta_path.append(Mocks(lambda package: package not in MISSING))


def exported(package: str, file: Path, name: str) -> Any:
    """A package's module of this name, or what its ``__init__`` takes from one, without running the rest."""
    if (file.parent / name).is_dir() or (file.parent / f"{name}.py").is_file():
        return importlib.import_module(f"{package}.{name}")
    for line in ast.walk(ast.parse(file.read_text())):
        if isinstance(line, ast.ImportFrom) and name in [alias.name for alias in line.names]:
            module = "." * line.level + (line.module or "")
            return getattr(importlib.import_module(module, package), name)
    return missing(name)


def load(modules: tuple[str, ...], copy: Path, name: str) -> None:
    """Import a stack's modules from ``copy``, whose packages' ``__init__`` do not run."""
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
        del sys.modules[loaded]
    for inside in (copy / name).rglob("__init__.py"):
        package = ".".join(inside.parent.relative_to(copy).parts)
        module = sys.modules[package] = types.ModuleType(package)
        module.__path__, module.__package__ = [str(inside.parent)], package
        module.__getattr__ = functools.partial(exported, package, inside)  # type: ignore[method-assign]
    for of_stack in modules:
        importlib.import_module(of_stack)


def build(case: Case) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = ["add_bias_linear", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"]
    plain += ["apply_rope_fusion", "gradient_accumulation_fusion"]
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, tensor_model_parallel_size=case.tp, sequence_parallel=case.tp > 1,
        params_dtype=dtype, bf16=case.dtype == "bf16", mtp_num_layers=1 if case.mtp else None,
        mtp_loss_scaling_factor=0.1, init_method_std=0.4, **dict.fromkeys(plain, False),
    )  # fmt: skip
    spec, of_mtp = gpt_layer_specs.get_gpt_layer_local_spec(), None
    if case.mtp:
        of_mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = gpt_model.GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=64, share_embeddings_and_output_weights=False,
        position_embedding_type="none", mtp_block_spec=of_mtp,
    ).to(dtype)  # fmt: skip
    return model if dtype == torch.float32 else Float16Module(config, model)


#: Of the response's tokens on this rank: log-probabilities and, perhaps, entropies and what the stack adds to
#: its loss where there are none.
Made = tuple[Any, ...]


def unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


def step(function: Callable[..., Made], modules: Any, model: Any, case: Case, ours: bool) -> dict[str, Any]:
    """Results and gradients of a stack's function, for random upstream gradients."""
    hidden: list[Tensor] = []

    unwrapped(model).decoder.register_forward_hook(lambda *given: hidden.append(given[2]))
    with torch.set_grad_enabled(case.grad):
        log_prob, *more = function(model, case, ours, *map(sys.modules.get, modules))
    entropy, nothing = (*more, None, None)[:2]
    seen: dict[str, Any] = {"log_prob": log_prob, "entropy": entropy}
    assert (entropy is None) == (case.entropy == "none")
    if entropy is not None and ours:
        assert entropy.requires_grad == (case.entropy == "differentiable" and case.grad)
    if case.grad:
        upstream = torch.randn(2, log_prob.numel(), generator=torch.Generator().manual_seed(4))
        total = (log_prob * upstream[0]).sum() + (0 if nothing is None else nothing)
        if entropy is not None and case.entropy == "differentiable":
            total = total + (entropy * upstream[1]).sum()
        hidden[-1].retain_grad()
        total.backward()
        seen["gradient of hidden states"] = hidden[-1].grad
        seen |= {f"gradient of {name}": value.grad for name, value in model.named_parameters()}
    return seen


STACKS: dict[str, Stack] = {}


def stack(*modules: str, **more: Any) -> Callable[[Callable[..., Made]], None]:
    """Decorator of a stack's function, which takes these of its modules."""

    def add(function: Callable[..., Made]) -> None:
        cases, run, name = [], functools.partial(step, function, modules), function.__name__
        for line in CASES.strip().splitlines():
            if not line.startswith("TP"):
                served = name in line.split(", ")
            elif served:
                cases.append(Case(line, name))
        STACKS[name] = Stack(cases, build, run, prepare, functools.partial(load, modules), **more)

    return add


# --- the stacks' functions ----------------------------------------------------------------------------

DEFERRED = {"deferred_logits": True}


def called(model: Any, ids: Tensor, case: Case) -> Any:
    return model(ids, None, None, **({"mtp_kwargs": {"mtp_labels": ids}} if case.mtp else {}))


def of_samples(made: dict[str, Any], logits: Any) -> Made:
    log_prob = torch.cat(made["log_probs"])
    # slime's loss.py:1134, miles' losses.py:338
    nothing = 0 * logits.sum() if log_prob.numel() == 0 and torch.is_grad_enabled() else None
    return log_prob, torch.cat(made["entropy"]) if "entropy" in made else None, nothing


@stack("slime.backends.megatron_utils.loss", "slime.backends.megatron_utils.cp_utils", enabled=DEFERRED)
def slime(model: Any, case: Case, ours: bool, loss: Any, utils: Any) -> Made:
    logits = called(model, torch.cat([utils.slice_with_cp(one, 0) for one in case.tokens])[None], case)
    args = Of(rollout_temperature=case.temperature, log_probs_chunk_size=8, allgather_cp=False)
    args.entropy_coef = 0.01 * (case.entropy == "differentiable")
    _, made = loss.get_log_probs_and_entropy(logits, args=args, **case.of_samples(), **case.kept())
    return of_samples(made, logits)


@stack(
    "miles.backends.training_utils.loss_hub.logit_processors", "miles.backends.training_utils.cp_utils",
    "miles.backends.training_utils.parallel", enabled=DEFERRED,
    rounded=5e-3,  # gradients of its own logits are bf16
)  # fmt: skip
def miles(model: Any, case: Case, ours: bool, functions: Any, utils: Any, parallel: Any) -> Made:
    from megatron.core import mpu

    def group(kind: str) -> Of:
        size, rank, of = (getattr(mpu, f"get_{kind}_parallel_{x}")() for x in ("world_size", "rank", "group"))
        return Of(size=size, rank=rank, group=of)

    parallel.set_parallel_state(Of(cp=group("context"), tp=group("tensor_model")))
    padded = case.layout == "padded"
    longest = [max(case.totals) if padded else None] * len(case.tokens)
    form = {"qkv_format": "bshd" if padded else "thd"}
    each = zip(case.tokens, longest, strict=True)
    rows = [utils.slice_with_cp(x, 0, max_seq_len=n, **form) for x, n in each]
    logits = called(model, torch.stack(rows) if padded else torch.cat(rows)[None], case)
    args = Of(rollout_temperature=case.temperature, log_probs_chunk_size=8, allgather_cp=False, **form)
    args.true_on_policy_mode = False
    made = functions.get_log_probs_and_entropy(
        logits, args=args, entropy_requires_grad=case.entropy == "differentiable",
        max_seq_lens=longest if padded else None, **case.of_samples(),
    )  # fmt: skip
    return of_samples(made, logits)


class Batch(dict[str, Any]):
    """What verl takes of a TensorDict."""

    def to(self, device: Any) -> Batch:
        return self


@stack(
    "verl.workers.engine.megatron.transformer_impl", "verl.models.mcore.model_forward_fused",
    "verl.workers.utils.padding",
)  # fmt: skip
def verl(model: Any, case: Case, ours: bool, impl: Any, fused: Any, padding: Any) -> Made:
    """The engine's forward_step: with its fused kernels on (the diff's), or with logits."""
    fused.CausalLMOutputForPPO = Of  # a dataclass of transformers'
    if ours:
        fused.patch_fused_forward(model)
    engine = object.__new__(impl.MegatronEngineWithLMHead)
    engine.engine_config = Of(
        use_fused_kernels=ours, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False,
        entropy_from_logits_with_chunking=False, router_replay=Of(mode="disabled"),
    )  # fmt: skip
    hf, off = Of(architectures=["Qwen3ForCausalLM"]), Of(enable=False, enable_train=False)
    engine.model_config = Of(hf_config=hf, mtp=off, tokenizer=Of(pad_token_id=0))
    engine.tf_config, engine.enable_routing_replay = unwrapped(model).config, False
    nested = functools.partial(torch.nested.nested_tensor, layout=torch.jagged)
    parts = [x.tensor_split([len(x) - n]) for x, n in zip(case.tokens, case.responses, strict=True)]
    prompts, responses = zip(*parts, strict=True)
    batch = Batch(
        input_ids=nested(case.tokens), prompts=nested(list(prompts)), responses=nested(list(responses)),
        loss_mask=nested([torch.ones_like(one) for one in responses]),
        temperature=torch.full((len(parts),), case.temperature), calculate_entropy=case.entropy != "none",
    )  # fmt: skip
    config = Of(entropy_coeff=0.01 * (case.entropy == "differentiable"))
    loss = functools.partial(lambda config, **_: None, config=config)
    output, _ = engine.forward_step(iter([batch]), model, loss, print)
    kept = torch.arange(max(case.responses)) < torch.tensor(case.responses)[:, None]
    names = [name for name in ("log_probs", "entropy") if name in output]
    return tuple(padding.no_padding_2_padding(output[name], batch)[kept] for name in names)


@stack(
    "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper",
    "skyrl.backends.skyrl_train.distributed.megatron.model_utils",
    "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils",
)
def skyrl(model: Any, case: Case, ours: bool, wrapper: Any, functions: Any, pack: Any) -> Made:
    """Its processor, then its functions of hidden states, by the torch backend or ours."""
    from megatron.core import mpu

    # Prompts end, and responses begin, in one column.
    longest = max(case.responses)
    columns = -(-(max(case.totals) + longest) // 8) * 8
    sequences = torch.zeros(len(case.tokens), columns, dtype=torch.int64)
    attention, end = torch.zeros_like(sequences, dtype=torch.bool), columns - longest
    for row, (one, n) in enumerate(zip(case.tokens, case.responses, strict=True)):
        where = slice(end - len(one) + n, end + n)
        sequences[row, where], attention[row, where] = one, True
    backend = "fused_ce" if ours else "torch"
    context: dict[str, Any] = {}
    batch = {"sequences": sequences, "num_actions": longest}
    targets = wrapper._targets(batch, backend) if ours else sequences
    given: dict[str, Any] = {"output_processor": wrapper._fused_lm_head_output_processor}
    given["output_processor_context"] = context
    ids, function, of_pack = sequences, functions.from_parallel_hidden_to_logprobs, {}
    packed = case.layout == "packed"
    if packed:
        ids, pack_of = pack.preprocess_packed_seqs(sequences, attention, pre_process=True)
        given["packed_seq_params"] = pack_of
        targets = wrapper._build_packed_targets(targets, attention, pack_of)
        function = functions.from_parallel_hidden_to_logprobs_packed_sequences
        of_pack = {"cp_group": mpu.get_context_parallel_group(), "attention_mask": attention}
    hidden = model(ids, None, None, **given)
    weight = context["lm_head_weight"]
    first = mpu.get_tensor_model_parallel_rank() * len(weight)
    log_prob = function(
        hidden, weight, targets, *((pack_of.cu_seqlens_q_padded, columns) if packed else ()), first,
        first + len(weight), mpu.get_tensor_model_parallel_group(), chunk_size=8, fused_backend=backend,
        temperature=case.temperature, inference_only=not case.grad, **of_pack,
    )  # fmt: skip
    if ours:  # it does not pass the adapter, which counts
        megatron_fused_ce.counters().fused += 1
    return (log_prob[:, -longest:][attention[:, end:]],)


@stack("nemo_rl.models.megatron.train", "nemo_rl.distributed.model_utils")
def nemo_rl(model: Any, case: Case, ours: bool, train: Any, functions: Any) -> Made:
    """Its model_forward, which without the diff needs its patch of GPTModel."""
    if not ours:
        functions.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=8)
    data, fused = Of(get_multimodal_dict=lambda **_: {}), {"use_fused_linear_logprobs": True}
    return (train.model_forward(model, data, case.equally_long, None, None, **fused).flatten(),)


@stack("megatron.rl.rl_utils", "megatron.training.global_vars", enabled={}, has_diff=False)
def train_rl(model: Any, case: Case, ours: bool, utils: Any, variables: Any) -> Made:
    """Megatron-LM's own train_rl.py, by the flag alone."""
    utils.get_args = lambda: Of(fp16=False, bf16=case.dtype == "bf16")
    vars(variables)["_GLOBAL_TIMERS"] = mock.MagicMock()
    ids = case.equally_long
    positions = torch.arange(ids.shape[1])[None]
    return (utils.get_logprobs(model, ids, positions, no_grad=not case.grad).flatten(),)


@stack(enabled={}, has_diff=False)
def labels(model: Any, case: Case, ours: bool) -> Made:
    """Minus a model's loss, as Bridge, ms-swift and DPO take it, by the flag alone."""
    ids = case.equally_long
    return (-model(ids, None, None, labels=ids.roll(-1, 1)).flatten(),)
