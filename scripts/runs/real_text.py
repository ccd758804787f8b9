"""Real text as Megatron-LM reads it: sources and documentation of what is installed, tokenised on a CPU.

    python -m scripts.runs.real_text --megatron ~/Megatron-LM --out build/text --megabytes 40

Writes to --out: text.jsonl; tokenizer/, a byte-level BPE of it that Hugging Face's and Megatron's
HuggingFaceTokenizer load; and by Megatron's own tools/preprocess_data.py real_text_document.bin and .idx, for
``--data-path OUT/real_text_document --tokenizer-type NullTokenizer --vocab-size V-1``: a document ends with
the last of the V ids for both tokenizers. Needs the packages tokenizers and transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import Parser, UsageError, command, whole, writable_folder

ENDS = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".cuh")
FEWEST_BYTES, MOST_BYTES = 256, 1 << 20
END = "<|endoftext|>"


def texts(roots: list[Path], megabytes: float) -> Iterator[str]:
    """Of files below the folders, each content once, in an order that the file's names alone decide."""
    files = {Path(at) / name for root in roots for at, _, names in os.walk(root) for name in names}
    chosen = sorted(file for file in files if file.suffix in ENDS)
    random.Random(0).shuffle(chosen)
    seen, left = set[bytes](), 1e6 * megabytes
    for file in chosen:
        try:
            content = file.read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        key = hashlib.sha1(content).digest()
        if FEWEST_BYTES <= len(content) < MOST_BYTES and key not in seen:
            seen.add(key)
            yield text
            left -= len(content)
        if left <= 0:
            return


def byte_level_bpe(some: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Any:
    """A tokenizer of ``vocab`` ids learned from these texts; the first ids are ``special``.

    Raises UsageError where the text has too few.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe, of_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = of_bytes(add_prefix_space=False)
    known: dict[str, Any] = {"special_tokens": [*special], "initial_alphabet": of_bytes.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, **known)
    bpe.train_from_iterator(some, trainer)
    if (learned := bpe.get_vocab_size()) != vocab:
        raise UsageError(
            f"the text has {learned} tokens and not {vocab}: give more text, or a smaller --vocab"
        )
    return bpe


def train_tokenizer(lines: Path, vocab: int, folder: Path) -> None:
    """A byte-level BPE of ``vocab`` ids, the last of them END."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    with open(lines) as file:
        bpe = byte_level_bpe((json.loads(line)["text"] for line in file), vocab - 1)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END).save_pretrained(folder)


@command("real_text")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.runs.real_text", __doc__ or "")
    add = parser.add_argument
    add("--megatron", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout")
    add("--roots", type=Path, nargs="+", metavar="PATH", help="of text [Python's packages, /usr/share/doc]")
    add("--megabytes", type=whole(), default=40, help="of text [40: 10.7 million tokens]")
    add("--vocab", type=whole(), default=65024, help="[65024]")
    add("--out", type=Path, default=Path("build/text"))
    given = parser.parse_args(words)
    out = writable_folder(given.out.resolve())
    out.mkdir(parents=True, exist_ok=True)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "include")]
    roots = given.roots or [Path(path) for path in (*installed, "/usr/share/doc")]
    lines = out / "text.jsonl"
    with open(lines, "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(roots, given.megabytes))
    train_tokenizer(lines, given.vocab, out / "tokenizer")
    preprocess = f"--append-eod --input {lines} --output-prefix {out / 'real'} --workers {os.cpu_count()}"
    preprocess += f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {out / 'tokenizer'}"
    script = given.megatron / "tools" / "preprocess_data.py"
    # The script appends its checkout to the path, behind a megatron-core that is installed.
    search = os.pathsep.join(filter(None, [str(given.megatron.resolve()), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, script, *preprocess.split()]
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": search}).returncode


if __name__ == "__main__":
    sys.exit(main())
