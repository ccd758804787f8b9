"""scripts/lib: results on disk, logs, live storages, a refusal that is lifted."""

from __future__ import annotations

import json
import math
import types

import pytest
import torch

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import logs, results, runner
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages

ROW = {**dict.fromkeys(results.ROW), "shape": "llama-3-8b", "variant": "store", "time_ms": 1.5, "T": 64}


def test_what_is_written_is_read_with_its_source(tmp_path):
    path = tmp_path / "new" / "x.json"
    source = results.made_by("", ["bench", "--tp", "2", "--out", "/somewhere/else/x.json"])
    results.write(path, [ROW, ROW | {"loss": [math.nan]}], source)
    first, second = results.rows(path)
    assert first == {**source, **ROW} and second["loss"] == ["nan"]
    assert first["commit"] and first["device"].endswith("CPU")
    assert first["command"] == "bench --tp 2 --out x.json", "no path of a machine is kept"
    with pytest.raises(ValueError, match="row 0: time_ms is no number from 0 on: 'inf'"):
        results.write(path, [ROW | {"time_ms": math.inf}], source)
    assert [file.name for file in path.parent.iterdir()] == ["x.json"] and len(results.rows(path)) == 2


#: A file's defects, and what is said of them.
DEFECTS = {
    "its schema is not 1": {"schema": 2},
    "made_by lacks command, megatron, python": {"made_by": {"commit": "a", "device": "b"}},
    "row 0 lacks host_ms, peak_mib, ratio, shape, spread, time_ms, variant": {"rows": [{}]},
    "variant is no name": {"rows": [ROW | {"variant": ""}]},
    "time_ms is no number from 0 on: True": {"rows": [ROW | {"time_ms": True}]},
    "peak_mib is no number from 0 on: -1": {"rows": [ROW | {"peak_mib": -1}]},
}


def test_each_defect_of_a_file_is_said(tmp_path):
    path, source = tmp_path / "x.json", results.made_by("NVIDIA H200", ["bench"])
    for words, wrong in DEFECTS.items():
        path.write_text(json.dumps({"schema": results.SCHEMA, "made_by": source, "rows": [ROW]} | wrong))
        with pytest.raises(UsageError, match=f"x.json cannot be read as a result: .*{words}"):
            results.rows(path)


def test_committed_files_follow_the_schema():
    for path in (results.REPOSITORY / results.RESULTS).glob("*.json"):
        results.read(path)


def test_what_logs_say():
    """Exact figures replace rounded ones; memory runs out in many words."""
    exact = '[megatron_cpu] exact {"iteration": 3, "grad norm": 2.58612345, "lm loss": 5.53793219}'
    line = " iteration 3/ 3 | lm loss: 5.0E+00 | grad norm: 2.6 | loss scale: 2.0 |"
    found = logs.parse_logs([f"{exact}\n{line}"])
    assert (found.losses, found.grad_norms) == ({"lm loss": [5.53793219]}, [2.58612345])
    for words in (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
    ):
        assert logs.parse_logs([f"[rank0]: {words}"]).status == "out of memory"


def test_lifted_refusal_leaves_the_rest_of_the_check():
    def validate_args(args, defaults):
        assert args.cross_entropy_fusion_impl == "native", "refused"
        args.checked = defaults
        return args

    runner.lift_te_refusal(arguments := types.SimpleNamespace(validate_args=validate_args))
    args = arguments.validate_args(types.SimpleNamespace(cross_entropy_fusion_impl="te"), {"a": 1})
    assert (args.cross_entropy_fusion_impl, args.checked) == ("te", {"a": 1})


def test_logits_of_a_rank():
    sizes = {"seq_length": 64, "micro_batch_size": 2, "context_parallel_size": 2}
    args = types.SimpleNamespace(**sizes, padded_vocab_size=1024, tensor_model_parallel_size=4)
    assert runner.num_logits(args) == 64 * 256


def test_what_lives_is_counted_once_and_kept_alive_by_nobody():
    T, H, V, older = 24, 16, 40, torch.zeros(24, 40)
    hidden, weight, size = torch.randn(T, H), torch.randn(V, H), T * V * 4  # of fp32
    with LogitStorages(vocab_rows=V, hidden_size=H) as logits:
        for _ in range(3):
            product = hidden @ weight.T
            assert logits.live_bytes == size
            del product
            assert logits.live_bytes == 0
        assert (logits.peak_bytes, logits.num_storages) == (size, 3), "those in turn do not add up"
        first = hidden @ weight.T
        views = [first.view(2, T // 2, V), first[3:5], first.transpose(0, 1), first.exp_()]
        del first
        assert logits.live_bytes == size, "the views keep the storage"
        views.clear()
        # A buffer counts from the first logits on, once, with its size; what is older or a weight's, never.
        buffer, *_ = torch.empty(T // 4 * V), older[3:5], torch.empty(V, H)
        assert logits.live_bytes == 0
        for rows in hidden.split(T // 4):
            torch.mm(rows, weight.T, out=buffer.view(T // 4, V))
        assert logits.live_bytes == size // 4
        left = weight @ hidden.T
        assert left.shape == (V, T) and logits.live_bytes == size * 5 // 4, "transposed, they count as well"
    del buffer, left
    assert logits.live_bytes == 0, "what outlives the block leaves the count when it is freed"
