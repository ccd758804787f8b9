"""Models by name, a line each in ``models.tsv``: published parameters, their source, Megatron's arguments.

Sizes are those of the ``config.json`` that each model is published with (``source`` names it), checked
against Megatron settings of others: NeMo at 8cfedd7 (``nemo/collections/llm/gpt/model``: Llama, Qwen,
DeepSeek), Megatron-Bridge at 067f987 (``docs/models``: Nemotron, Gemma, GPT-OSS, GLM, Mistral) and slime at
624b824 (``scripts/models``: Qwen3, GLM, Kimi, Moonlight). ``tests/plan/test_sums.py`` counts them.

Counted otherwise than they are: Gemma's GELU gate as SwiGLU; OLMo 2's norms, behind its blocks alone, as one
before each; GPT-OSS's windows and sinks as plain attention.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NamedModel:
    #: billions of parameters as published, multi-token prediction not counted, and where
    published: str
    source: str
    #: Megatron's
    arguments: str
    #: the figure (with a star in the file) is the checkpoint's: with multi-token prediction, whose copies of
    #: embedding and head count
    with_prediction: bool = False


def _read() -> dict[str, NamedModel]:
    lines = Path(__file__).with_name("models.tsv").read_text().splitlines()
    rows = (line.split("\t") for line in lines)
    return {
        name: NamedModel(published.rstrip("*"), source, arguments, published.endswith("*"))
        for name, published, source, arguments in rows
    }


MODELS = _read()


def known_name(text: str, names: Collection[str] = tuple(MODELS)) -> str:
    """The name in ``names`` that equals ``text``, whatever the case.

    Raises:
        ValueError: no such name; names a close one, else all of them.
    """
    lower = text.lower()
    if lower in names:
        return lower
    close = difflib.get_close_matches(lower, names, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"no model {text!r}; {hint}")


def head_sizes(name: str) -> tuple[int, int]:
    """``H`` and the vocabulary of a named model's head."""
    words = MODELS[name].arguments.split()
    hidden_size, vocab = (int(words[words.index(flag) + 1]) for flag in ("--hidden-size", "--vocab-size"))
    return hidden_size, vocab
