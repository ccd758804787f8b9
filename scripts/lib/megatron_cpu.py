"""Run an unmodified Megatron-LM script on a CPU: stand-ins for what it asks of CUDA.

    torchrun --nproc-per-node 2 -m megatron_fused_ce.scripts.lib.megatron_cpu \
        /path/to/Megatron-LM/pretrain_gpt.py --distributed-backend gloo ...

The script is run as ``python SCRIPT args...`` would run it (``sys.argv``, ``sys.path[0]``,
``__main__``), with gloo as the backend. With ``--fused-chunked-ce`` among its arguments it goes
through ``megatron_fused_ce.launch``, the same entry as on GPUs.

Nothing of the model's arithmetic is replaced. Megatron's own code runs on CPU tensors; each stand-in
says who asks for it (paths below ``megatron/``).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import runpy
import subprocess
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_fused_ce.scripts.lib import gloo

NO_FUSED_WGRAD = "--no-gradient-accumulation-fusion"
PLUGIN_FLAG = "--fused-chunked-ce"


# --- devices ---------------------------------------------------------------------------------


def _on_cpu(value: Any) -> Any:
    """`value`, or the CPU where it names a CUDA device."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return torch.device("cpu")
    return value


class CudaIsCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device gets the CPU.

    ``Tensor.type()`` says the reverse: core/optimizer compares with ``'torch.cuda.FloatTensor'``.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            device = kwargs["device"]
            is_index = isinstance(device, int)  # what torch.cuda.current_device() returns
            kwargs["device"] = torch.device("cpu") if is_index else _on_cpu(device)
        return func(*map(_on_cpu, args), **kwargs)


# --- torch.cuda ------------------------------------------------------------------------------


class _Stream:
    """A stream or an event (the DDP wrap, timers): a CPU has one queue, and all before now has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Any = None) -> None: ...

    record = wait = wait_event = wait_stream

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


_THE_STREAM = _Stream()

_CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # one device per rank, and it is there
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_name": lambda device=None: "CPU stand-in",
    "get_device_properties": lambda device=None: types.SimpleNamespace(
        name="CPU stand-in", major=8, minor=0, total_memory=0, multi_processor_count=1
    ),
    # nothing is asynchronous
    **dict.fromkeys(("set_device", "synchronize", "set_stream"), _ignore),
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": lambda device=None: _THE_STREAM,
    "default_stream": lambda device=None: _THE_STREAM,
    "is_current_stream_capturing": lambda: False,
    # no allocator to report on
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), _ignore),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved", "device_memory_used"), lambda device=None: 0),
    "memory_stats": lambda device=None: collections.defaultdict(int),
    # the CPU's generator is the device's
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "_lazy_call": lambda callback, **kwargs: callback(),
}


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function object of its own: torch._dynamo refuses one object under two torch names."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


def _keep_until_sent(isend: Callable[..., Any]) -> Callable[..., Any]:
    """``isend`` whose tensor's memory lives until it is sent.

    core/pipeline_parallel frees a stage's output once its send is launched, which CUDA's streams allow and
    gloo's threads do not: virtual stages would train on freed memory.
    """
    under_way: list[tuple[Any, torch.Tensor]] = []

    def sent_from_kept_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        under_way[:] = [(work, kept) for work, kept in under_way if not work.is_completed()]
        kept = tensor.detach()
        work = isend(kept, *args, **kwargs)
        under_way.append((work, kept))
        return work

    return sent_from_kept_memory


def _stand_in_for_torch_cuda() -> None:
    for name, function in _CUDA_FUNCTIONS.items():
        setattr(torch.cuda, name, _renamed(function, name))
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.Event = _Stream  # type: ignore[assignment, misc]
    torch.cuda.default_generators = (torch.default_generator,)
    # torch.optim asks whether its stream captures; a build of torch for CUDA would ask the driver.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _ignore
    # Combined 1F1B.
    torch.Tensor.record_stream = _ignore  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment, method-assign]

    barrier = torch.distributed.barrier

    # core/parallel_state.py gives device_ids, which gloo refuses.
    def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    torch.distributed.barrier = _barrier  # type: ignore[assignment]
    # Both names: a batch of sends compares its operations with the second one.
    torch.distributed.isend = _keep_until_sent(torch.distributed.isend)
    torch.distributed.distributed_c10d.isend = torch.distributed.isend


# --- Megatron's modules, changed as they are imported ----------------------------------------


def compile_dataset_helpers() -> None:
    """Build ``helpers_cpp`` beside ``megatron.core.datasets``, for the running interpreter.

    Megatron's own builds for PATH's ``python3-config``. A wheel brings it built, and no Makefile.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        return
    folder = os.path.dirname(sys.modules["megatron.core.datasets.utils"].__file__ or "")
    found = subprocess.run([sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit("megatron_cpu: Megatron's dataset helpers are built with pybind11: pip install pybind11")
    includes = found.stdout.strip()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = ["make", "-C", folder, f"LIBEXT={suffix}", f"CPPFLAGS={includes}"]
    if subprocess.run(command).returncode != 0:
        sys.exit("megatron_cpu: megatron.core.datasets' helpers_cpp did not build (output above)")


def _with(**values: Any) -> Callable[[Any], None]:
    """Sets these in a module."""
    return lambda module: vars(module).update(values)


def stand_in_for_torch_norm(module: Any) -> None:
    """Let ``WrappedTorchNorm`` run under sequence parallelism (on GPUs too: local layers).

    It refuses, because torch's norms do not mark their weights for the gradient all-reduce: these do.
    """
    wrapped = module.WrappedTorchNorm

    class WrappedTorchNorm(wrapped):  # type: ignore[misc, valid-type]
        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            without = copy.copy(config)
            without.sequence_parallel = False
            norm = wrapped.__new__(wrapped, without, *args, **kwargs)
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

    module.WrappedTorchNorm = WrappedTorchNorm


def _stand_in_for_final_norm(module: Any) -> None:
    # Both stacks hard-code Transformer Engine's.
    def torch_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return WrappedTorchNorm(config=config, hidden_size=hidden_size, eps=eps)

    module.TENorm = torch_norm


def _stand_in_for_moe_utils(module: Any) -> None:
    vars(module).setdefault("te_general_gemm", None)  # read up to 0.16 without Transformer Engine too

    # Megatron's makes arrays of what is on a GPU alone, and gloo takes no tensors as sizes.
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, **others: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _stand_in_for_training_log(module: Any) -> None:
    """Megatron logs three decimals of the gradient norm: the last rank prints every digit besides."""
    training_log = module.training_log
    signature = inspect.signature(training_log)

    def exact_training_log(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            losses = {
                name: loss.item()
                for name, loss in values["loss_dict"].items()
                if isinstance(loss, torch.Tensor) and loss.numel() == 1
            }
            norm = values["grad_norm"]  # None where the step was skipped
            norm = float("nan") if norm is None else float(norm)
            exact = {"iteration": values["iteration"], "grad norm": norm}
            print(f"[megatron_cpu] exact {json.dumps(exact | losses)}", flush=True)
        return training_log(*args, **kwargs)

    module.training_log = exact_training_log


def _stand_in_for_device_mesh(module: Any) -> None:
    """Both FSDP wrappers make meshes of "cuda"."""
    mesh = module.DeviceMesh

    def from_group(group: Any, device_type: str, **kwargs: Any) -> Any:
        return mesh.from_group(group, "cpu", **kwargs)

    module.DeviceMesh = types.SimpleNamespace(from_group=from_group)


def _stand_in_for_spawned_processes(module: Any) -> None:
    """A process that saves would import the script again, without stand-ins: it is forked."""
    real = module.mp

    def get_context(method: str | None = None) -> Any:
        return real.get_context("fork" if method == "spawn" else method)

    module.mp = types.SimpleNamespace(**{**vars(real), "get_context": get_context})


def _stand_in_for_inference_layers(module: Any) -> None:
    """After 0.19 it calls ``isinstance`` with classes that Transformer Engine would define."""
    if not isinstance(getattr(module, "InferenceColumnParallelLinear", None), type):
        module.is_inference_column_parallel_linear = lambda layer: False


def _stand_in_for_local_layers(module: Any) -> None:
    """With --defer-embedding-wgrad-compute all local layers use lists that the output layer alone has."""
    make = module.ColumnParallelLinear.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        deferred = getattr(self.config, "defer_embedding_wgrad_compute", False)
        if deferred and self.embedding_activation_buffer is None:
            self.config = copy.copy(self.config)
            self.config.defer_embedding_wgrad_compute = False

    module.ColumnParallelLinear.__init__ = __init__


_MODULE_STAND_INS: dict[str, Callable[[Any], None]] = {
    "megatron.core.datasets.utils": _with(compile_helpers=compile_dataset_helpers),
    "megatron.legacy.fused_kernels": _with(load=_ignore),  # up to 0.16 it wants CUDA_HOME
    "megatron.core.transformer.torch_norm": stand_in_for_torch_norm,
    "megatron.core.models.hybrid.hybrid_block": _stand_in_for_final_norm,
    "megatron.core.ssm.mamba_block": _stand_in_for_final_norm,
    "megatron.core.parallel_state": _with(get_nccl_options=_ignore),  # asked for under FSDP2
    "megatron.core.distributed.torch_fully_sharded_data_parallel": _stand_in_for_device_mesh,
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _stand_in_for_device_mesh,
    "megatron.core.tensor_parallel.layers": _stand_in_for_local_layers,
    "megatron.core.tensor_parallel.inference_layers": _stand_in_for_inference_layers,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _stand_in_for_spawned_processes,
    "megatron.core.transformer.moe.moe_utils": _stand_in_for_moe_utils,
    "megatron.training.training": _stand_in_for_training_log,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a module's stand-in once, right after the module's own code has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        stand_in = _MODULE_STAND_INS.pop(fullname, None)
        if stand_in is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the other finders, and by this one: None
        _MODULE_STAND_INS[fullname] = stand_in  # who only asks for a spec imports nothing
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            stand_in(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# --- apex's fused weight gradient ------------------------------------------------------------


def install_fused_wgrad() -> None:
    """Offer apex's extension for ``--gradient-accumulation-fusion``: ``main_grad += dYᵀ·X``."""

    def accumulate(hidden: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        with torch.no_grad():
            main_grad.addmm_(grad_output.t().to(main_grad.dtype), hidden.to(main_grad.dtype))

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = accumulate
    module.wgrad_gemm_accum_fp16 = accumulate
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, loader=None)
    sys.modules[module.__name__] = module


# --- entry -----------------------------------------------------------------------------------


def install(*, fused_wgrad: bool = False) -> None:
    """Install every stand-in in this process; call before megatron is imported."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by training/arguments.py
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # jit_fuser is torch.compile
    if not hasattr(typing, "override"):  # of Python 3.12, for training/ from 0.18 on
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]
    _stand_in_for_torch_cuda()
    gloo.use_one_thread()
    # Warns at every fork that the CPU's generator moved: here that generator is the device's.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    sys.meta_path.insert(0, _AfterImport())
    if fused_wgrad:
        install_fused_wgrad()
    CudaIsCpu().__enter__()  # for the rest of the process


def run(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``python SCRIPT arguments...`` would, through the launcher if the flag is there."""
    if PLUGIN_FLAG in arguments:
        from megatron_fused_ce.launch import run_script

        run_script(script, list(arguments))
    else:
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


def main() -> None:
    """``SCRIPT args...``: install the stand-ins, then run the script."""
    script, *arguments = sys.argv[1:] or [""]
    if not os.path.isfile(script):
        sys.exit(f"usage: megatron_cpu SCRIPT args..., no script {script}")
    install(fused_wgrad=NO_FUSED_WGRAD not in arguments)
    run(script, arguments)
    if torch.distributed.is_initialized():  # Megatron does this itself from 0.17 on
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    gloo.leave()
