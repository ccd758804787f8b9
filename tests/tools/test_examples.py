"""scripts/examples/: every launch, up to the model's configuration, by Megatron's own argument parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_fused_ce import FusedCEConfig
from tests.support.forked_launches import Server
from tests.support.launches import LAUNCHES
from tests.support.megatron import CORE_0_19

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
needs_megatron = pytest.mark.skipif(not CORE_0_19.is_dir(), reason="run scripts/dev/setup_env.sh")


def run(folder: Path, name: str, *arguments: str, **settings: str) -> tuple[str, dict]:
    """An example as rank 0, a probe in the place of Megatron's scripts: output, findings."""
    for script in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        (folder / script).symlink_to(ROOT / "tests" / "support" / "pretrain_probe.py")
    # Says what it was asked for.
    (folder / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "torchrun").chmod(0o755)
    here = {"PATH": f"{folder}:{os.environ['PATH']}", "MEGATRON_LM_PATH": str(folder)}
    env = os.environ | here | settings
    # Transformer Engine's kernel is not on a CPU.
    words = [EXAMPLES / f"{name}.sh", "--no-rope-fusion", *arguments]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=True)
    asked = get_args_parser().parse_args(done.stdout.splitlines())  # torchrun's own
    world_size = str(int(asked.nproc_per_node) * int(asked.nnodes))
    words = [*(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args]
    status, output = Server(CORE_0_19).launch(words, folder, ranks=[0], WORLD_SIZE=world_size)
    found = re.search(r"^PROBE(.*)", output, re.MULTILINE)
    assert found and status == 0, output[-3000:]
    return output, json.loads(found[1])


@needs_megatron
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.sh")} - {"launch"}))
def test_megatron_takes_every_argument(tmp_path, name):
    """And the scripts add one line: without it the words are stock Megatron's."""
    expected = LAUNCHES[name]
    own = [line.strip() for line in (EXAMPLES / f"{name}.sh").read_text().splitlines()]
    assert [line for line in own if "fused" in line and line[0] != "#"] == ["--fused-chunked-ce"]
    output, found = run(tmp_path, name)
    assert found["config"] == repr(FusedCEConfig()) and found["mock_data"]
    assert not found["cross_entropy_loss_fusion"]
    assert found["script"] == ("pretrain_hybrid.py" if "hybrid" in name else "pretrain_gpt.py")
    assert (found["world_size"], found["data_parallel_size"]) == (expected["gpus"], expected["data_parallel"])
    # One rank's rows are whole tiles, and no row is padding.
    assert found["padded_vocab_size"] == found["vocab_size"]
    assert found["vocab_size"] % (8 * found["tensor_model_parallel_size"]) == 0
    assert found["sequence_parallel"] == (found["tensor_model_parallel_size"] > 1)
    assert found["mtp_num_layers"] == (1 if "mtp" in name else None)
    if expected["billions"] is not None:
        (count,) = re.findall(r"Total number of parameters in billions: ([\d.]+)", output)
        assert float(count) == pytest.approx(expected["billions"], abs=0.005)
        # Weights, gradients and optimizer leave room for activations on 80 GB.
        assert found["weights_bytes"] < 45 * 2**30


@needs_megatron
def test_settings_and_arguments_of_the_caller_count(tmp_path):
    _, found = run(tmp_path, "llama3_8b", "--fused-ce-strategy", "store", TP="4", GPUS="16")
    assert found["config"] == repr(FusedCEConfig(strategy="store"))
    assert (found["tensor_model_parallel_size"], found["data_parallel_size"]) == (4, 4)


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_no_checkout_is_one_line_and_status_2(path):
    environment = os.environ | {"MEGATRON_LM_PATH": path}
    done = subprocess.run(EXAMPLES / "llama3_8b.sh", env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "set it to a checkout" in done.stderr
