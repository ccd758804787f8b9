"""``plan --from-log``: the arguments, GPUs and peak in a log of Megatron, however it reached the file."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fused_ce.plan import closed_world, command, megatron_log
from megatron_fused_ce.plan.answer import sentences
from megatron_fused_ce.plan.command import plan_of, setting_of
from tests.support.checkouts import on_checkouts

ROOT = Path(__file__).resolve().parents[2]
ACTIONS = command._parser(own=False)._actions
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
    " --global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel --swiglu"
    " --use-distributed-optimizer --disable-bias-linear --no-gradient-accumulation-fusion"
    " --position-embedding-type rope"
)
WORDS = f"{SIZES} --bf16 --vocab-size 250 --recompute-granularity selective --recompute-modules core_attn mlp"
VOCABULARY = " > padded vocab (size: 250) with 6 dummy tokens (new size: 256)\n"
PEAK = "[Rank {0}] (after 2 iterations) memory (MB) | allocated: 10.5 | max allocated: {1} | reserved: 9 |\n"


def printed(value: object) -> str:
    """As Megatron has it in its arguments: its own types for precisions and backends."""
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "auto": "AttnBackend.auto"}
    return names.get(str(value), str(value))


def block(words: str = WORDS, gpus: int = 8, **more: object) -> str:
    """What a run with these arguments prints, with 0.19's size of a mock vocabulary left to the tokenizer."""
    values = vars(command._parser(own=False).parse_args(shlex.split(words)))
    values |= {"world_size": gpus, "tokenizer_type": "HuggingFaceTokenizer", "data_path": ["a b", "c"]}
    values |= {"tokenizer_sentencepiece_ignore_extra_whitespaces": True, "config_logger_dir": "", **more}
    lines = [f"  {name} {'.' * (48 - len(name))} {printed(value)}" for name, value in values.items()]
    dashes = "-" * 20
    return "\n".join([
        f"{dashes}---- arguments ----{dashes}", *sorted(lines), f"{dashes} end of arguments {dashes}-\n"
    ])  # fmt: skip


def others_between(text: str, prefix: str) -> str:
    """Rank 0's lines behind ``prefix``, among those of other ranks."""
    chance, lines = random.Random(0), []
    for line in text.splitlines():
        rank = chance.randint(1, 7)
        lines += [prefix.format(rank) + "warnings.warn(  bf16 is on", prefix.format(0) + line]
    return "\n".join(lines)


BLOCK = block(vocab_size=None)
SMALLER = BLOCK.replace("  seq_length .", "  garbled .").replace("  num_layers .", "[rank3]: oh num_layers .")
CUT = BLOCK[: len(BLOCK) // 2]
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...\n"
)
LOGS = {
    "plain": BLOCK + VOCABULARY,
    "Windows line ends": (BLOCK + VOCABULARY).replace("\n", "\r\n"),
    "torchrun's prefix": others_between(BLOCK + VOCABULARY, "[rank{0}]:"),
    "torchrun's tee": others_between(BLOCK + VOCABULARY, "[default{0}]:"),
    "srun --label": others_between(BLOCK + VOCABULARY, "{0}: "),
    "dates": others_between(BLOCK + VOCABULARY, "2026-11-24 08:00:0{0} | INFO | "),
    "no blanks at the end": "\n".join(line.rstrip() for line in (BLOCK + VOCABULARY).splitlines()),
    "by logging": BLOCK + "INFO:megatron.core.tokenizers.utils.build_tokenizer:" + VOCABULARY,
    "several blocks": block(WORDS + " --num-layers 8") + BLOCK + VOCABULARY,
    "the last is cut off": BLOCK + VOCABULARY + CUT,
    "the last has lost a line": BLOCK + VOCABULARY + SMALLER,
    "out of memory": BLOCK + VOCABULARY + OUT_OF_MEMORY,
    "a mock tokenizer": block(vocab_size=250, tokenizer_type="NullTokenizer", null_tokenizer_eod_id=None),
    "a mock tokenizer before 0.18": block(vocab_size=249, tokenizer_type="NullTokenizer"),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_planned_as_its_launch(name, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(LOGS[name])
    launch = setting_of(["--from-launch", WORDS, "--gpus", "8"])
    assert setting_of(["--from-log", str(log), "--gpu", "h200-141gb"]) == launch


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "no line .* arguments .*: it is in the output of rank 0"),
        ("iteration 1 | lm loss: 2.0\n", "no line"),
        (CUT, r"from line 1 has lost lines \(\w+, \w+, \w+\): give a log with all of it"),
        (BLOCK.rpartition("\n---")[0], r"has lost lines \(no end\)"),
        (SMALLER, r"\(num_layers, seq_length\)"),
        (BLOCK, "--vocab-size is missing"),
        (block(language_model="namespace(num_layers=4)"), "a launch by --yaml-cfg, .* is not read"),
    ],
)
def test_a_log_without_its_arguments_is_refused(log, said):
    with pytest.raises(ValueError, match=said):
        launch = megatron_log.of_log(log, ACTIONS)
        setting_of(["--from-launch", shlex.join(launch.arguments)])


def test_the_vocabulary_can_be_given_or_padded_before(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(BLOCK)
    words = ["--from-log", str(log), "--gpu", "h200-141gb", "--vocab-size", "250"]
    assert setting_of(words).padded_vocab_size == 256
    log.write_text(block(vocab_size=None, padded_vocab_size=272))
    assert setting_of(words[:4]).padded_vocab_size == 272


def test_the_gpu_is_asked_for(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(BLOCK + VOCABULARY)
    assert command.main(["--from-log", str(log)]) == 2
    assert "a log does not say the GPU: give --gpu, one of h100-80gb" in capsys.readouterr().err
    assert command.main(["--from-log", str(log), "--gpu-memory", "40"]) == 0


def test_which_block_and_what_was_measured(tmp_path):
    """Only what stands behind a block is its run's: the largest rank's peak, and whether memory ran out."""
    first = block(WORDS + " --num-layers 8") + PEAK.format(0, "4096.0") + OUT_OF_MEMORY
    log = first + BLOCK + VOCABULARY + PEAK.format(0, "1024.25") + PEAK.format(4, "2048.00")
    launch = megatron_log.of_log(log, ACTIONS)
    line = first.count("\n") + 1
    assert launch.notes == (f"The log has 2 blocks of arguments: the one from line {line}, the last.",)
    assert (launch.measured_bytes, launch.out_of_memory) == (2 * 2**30, False)
    launch = megatron_log.of_log(BLOCK + VOCABULARY + OUT_OF_MEMORY + CUT, ACTIONS)
    assert (launch.measured_bytes, launch.out_of_memory) == (None, True)
    assert launch.notes[0].endswith("the last that is whole.")


def test_with_the_flag_the_peak_is_beside_the_flags(tmp_path):
    flags = "--fused-chunked-ce --fused-ce-strategy recompute --fused-ce-num-chunks 2"
    # So large that `auto` takes grad_in_forward, whose wait a smaller head would show.
    sizes = "--seq-length 65536 --max-position-embeddings 65536 --hidden-size 1024 --vocab-size 32000"
    log = tmp_path / "train.log"
    log.write_text(block(f"{WORDS} {sizes} {flags}") + PEAK.format(0, "99.0"))
    found = plan_of(["--from-log", str(log), "--gpu", "h200-141gb"])
    assert found.planned == found.advice.way("recompute").peak != found.advice.way("auto").peak


LARGE = (
    "--num-layers 40 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 8192"
    " --group-query-attention --num-query-groups 8 --tensor-model-parallel-size 8 --sequence-parallel --bf16"
    " --swiglu --vocab-size 128256 --use-distributed-optimizer"
    " --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights"
)


NONE = "The head .* 0.80 → 0.70 GiB a GPU. The whole: no verdict, "


@pytest.mark.parametrize(
    ("more", "behind", "first"),
    [
        ({}, "", r"It fits either way; --fused-chunked-ce saves \d\.\d+ GiB"),
        ({}, PEAK.format(0, "44000.0"), r"It fits either way; .* 42\.97 without\."),
        ({}, PEAK.format(0, "90000.0"), rf"{NONE}87\.89 GiB were measured where \d+\.\d+ are planned\."),
        ({}, OUT_OF_MEMORY, rf"The run ended out of memory\. {NONE}\d+\.\d+ GiB are planned, which fit"),
        ({"hybrid_layer_pattern": "MGDM"}, "", f"{NONE}layers of kind D G are not counted"),
        ({"perform_rl_step": True, "grpo_group_size": 16}, "", f"{NONE}--grpo-group-size .*, and 1 more"),
        ({"logits_load_dir": "x", "fp8": "hybrid"}, "", "No effect: .*--logits-load-dir"),
        ({"tensor_parallel_num_weight_shards": 16}, "", "No effect: .*gtp_remat"),
        ({"tensor_parallel_num_weight_shards": 8, "save_dgrads_interval": None}, "", "It fits either way"),
        ({"modelopt_enabled": True}, "", "No effect: .*ModelOpt reads the logits"),
        ({"modelopt_enabled": True, "export_kd_teacher_load": "x"}, "", f"{NONE}--export-kd-teacher-load"),
        ({"my_own": 3}, "", rf"{NONE}my_own is none of Megatron's arguments\."),
        ({"consumed_train_samples": 512, "lr": 1e-3, "seed": 1}, "", "It fits either way"),
        ({"cp_comm_type": "['p2p']", "inference_cuda_graph_scope": "GraphScope.none"}, "", "It fits"),
        ({"eval_micro_batch_size": 1, "encoder_num_layers": 40, "encoder_seq_length": 8192}, "", "It fits"),
        ({"eval_micro_batch_size": 8}, "", f"{NONE}--eval-micro-batch-size may change memory and is not")
    ],
)  # fmt: skip
def test_the_first_line_of_a_log(more, behind, first, tmp_path):
    """What is said of arguments that are not counted, of a measured peak, of a run that died."""
    log = tmp_path / "train.log"
    log.write_text(block(LARGE, 128, **more) + behind)
    found = plan_of(["--from-log", str(log), "--gpu", "h200"])
    assert re.match(first, sentences(found)[0].text), sentences(found)[0].text


PRINTS = """
import os, re, sys
sys.modules.setdefault("regex", re)
sys.path.insert(0, sys.argv[1])
os.environ.update(RANK="0", WORLD_SIZE="8", LOCAL_RANK="0")
from megatron_fused_ce.scripts.lib import megatron_cpu
megatron_cpu.install(fused_wgrad=False)
from megatron.training.arguments import parse_args, validate_args
for words in sys.argv[2:]:
    sys.argv = ["pretrain_gpt.py", *words.split()]
    validate_args(parse_args())
"""
REAL = (
    "",
    "--fp16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--bf16 --num-experts 8 --expert-model-parallel-size 2 --moe-layer-freq ([0]+[1]*3) --moe-router-topk 4"
    " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --grad-reduce-in-bf16",
    "--bf16 --group-query-attention --num-query-groups 2 --recompute-activations --attention-backend unfused"
    " --untie-embeddings-and-output-weights --normalization RMSNorm --attention-dropout 0 --kv-channels 32",
    "--bf16 --multi-latent-attention --q-lora-rank 16 --mtp-num-layers 1 --cross-entropy-loss-fusion",
)


@on_checkouts
def test_what_megatron_itself_prints(checkout):
    """Its parser and its checks, on one rank of eight."""
    base = f"{SIZES} --max-position-embeddings 128"
    others = "--tokenizer-type NullTokenizer --vocab-size 250 --mock-data --train-iters 2 --lr 1e-4"
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, checkout, *(f"{base} {more} {others}" for more in REAL)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    logs = done.stdout.split(" end of arguments ")
    known = [name for one in ACTIONS for name in (one.dest, *one.option_strings)]
    for more, log in zip(REAL, logs[:-1], strict=True):
        launch = megatron_log.of_log(f"{log} end of arguments ---------------------", ACTIONS)
        size = launch.arguments[launch.arguments.index("--vocab-size") + 1]
        assert launch.gpus == 8 and size in ("250", "251")  # before 0.18, one more
        found = setting_of(["--from-launch", shlex.join(launch.arguments), "--gpus", "8"])
        assert found == setting_of(["--from-launch", f"{base} {more} --vocab-size {size}", "--gpus", "8"])
        # Nothing of what its checks derive is taken for an argument that was given.
        own, _ = command._parser(own=False).parse_known_args(list(launch.arguments))
        own.ignore = []
        assert set(closed_world.judge(launch, own, known).uncounted) <= {"--bf16"}  # attention in fp32
