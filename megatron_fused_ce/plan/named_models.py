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
from pathlib import Path
from typing import NamedTuple


class NamedModel(NamedTuple):
    """A line of the file."""

    #: billions of parameters as published; with a star the checkpoint's, which counts multi-token prediction
    #: and its copies of embedding and head
    published: str
    source: str
    arguments: str  # Megatron's


_LINES = (line.split("\t") for line in Path(__file__).with_name("models.tsv").read_text().splitlines())
MODELS = {name: NamedModel(*cells) for name, *cells in _LINES}


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
