"""Launches of Megatron's training scripts on a CPU by torchrun: a tiny model, and every digit it logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_fused_ce.scripts.runs.pretrain import CPU_ONLY_ARGS

ROOT = Path(__file__).resolve().parents[2]
EXACT = "[megatron_cpu] exact "
#: Several micro-batches a step, and evaluation. Vocabulary 127 + eod, padded to 128·TP.
BASE_ARGS = f"""
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --lr 1e-3 --lr-decay-style constant
    --mock-data --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --eval-iters 1 --eval-interval 3 --log-interval 1 --tensor-model-parallel-size 2 {CPU_ONLY_ARGS}
"""


def words_of(script, *arguments):
    return ["-m", "megatron_fused_ce.scripts.lib.megatron_cpu", str(script), *arguments]


def by_torchrun(words, folder, megatron, ranks=2, **settings):
    """Status and output of ``torchrun words...`` with the Megatron in that folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    folders = (str(megatron), str(ROOT), os.environ.get("PYTHONPATH"))
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *words], cwd=folder, env={**os.environ, **settings}, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def told_by_ranks(output):
    """The end of what the ranks said, without torchrun's own traceback after it."""
    return output.partition("torch/distributed/run.py")[0][-3000:]


def exact_lines(output):
    """What the last rank logs of each iteration, every digit."""
    lines = [line for line in output.splitlines() if line.startswith(EXACT)]
    return [json.loads(line.removeprefix(EXACT)) for line in lines]
