"""Operands of a trained head: a small language model learns real text for minutes, its last layer is kept.

    python -m scripts.bench.trained /tmp/operands.pt
    python -m scripts.bench --preset trained --operands /tmp/operands.pt --peers torch-compile liger cce

Random logits are flat, a trained head's are peaked: most of a row of P - Y is near 0. That changes what a
filter skips, how large errors are, and the time of a bare GEMM too, since power depends on the data.

Text: sources, headers and documentation on this machine, each content once, whole files held out. Tokens: a
byte-level BPE learned on a quarter of it. Model: RMSNorm, rotary attention, SwiGLU, untied embeddings; bf16
autocast over fp32 weights, AdamW, this package's loss. Written: ``hidden [T, H]`` after the last norm and
``weight [V, H]`` in bf16, ``labels [T]``, of held-out text, and ``about``: how they were made.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.cli.command_line import (
    Parser,
    UsageError,
    command,
    number,
    require_gpus,
    seconds,
    whole,
    writable_file,
)
from megatron_fused_ce.scripts.runs.real_text import byte_level_bpe, texts

PLACES = ["/usr/lib", "/usr/include", "/usr/share/doc", "/usr/local/cuda/include"]
PLACES += [sysconfig.get_path("stdlib"), *(folder for folder in sys.path if folder.endswith("-packages"))]
HELD_OUT = 50  # one file in so many
HEAD_SIZE = 64
UNCOUNTED = 3  # steps: they compile

# --- text and tokens -------------------------------------------------------------------------


def learn_tokens(sample: list[str], vocab: int) -> Callable[[list[str]], Tensor]:
    """A byte-level BPE of at most ``vocab`` ids, as texts to ``[N]`` int32, id 0 at the end of each."""
    tokenizer = byte_level_bpe(sample, vocab, ["<|end|>"])

    def ids(some: list[str]) -> Tensor:
        row = array("i")
        for at in range(0, len(some), 512):
            for one in tokenizer.encode_batch_fast(some[at : at + 512]):
                row.extend([*one.ids, 0])
        return torch.frombuffer(row, dtype=torch.int32)

    return ids


def windows(data: Tensor, which: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Ids ``[B, L]`` and labels ``[B * L]`` of the windows ``which [B]``."""
    first = which.to(data.device)[:, None] * length
    rows = data[first + torch.arange(length + 1, device=data.device)].long()
    return rows[:, :-1], rows[:, 1:].flatten()


# --- the model -------------------------------------------------------------------------------

#: Parameters of a layer; each tensor has all layers'.
OF_LAYER = ("before", "qkv", "out", "between", "gate_up", "down")


def parameters_of(given: argparse.Namespace) -> dict[str, Tensor]:
    V, H, count, inner = given.vocab, given.hidden, given.layers, 5 * given.hidden // 2
    sizes = {"embedding": (V, H), "head": (V, H), "qkv": (count, 3 * H, H), "out": (count, H, H)}
    sizes |= {"gate_up": (count, 2 * inner, H), "down": (count, H, inner)}
    made = {name: 0.02 * torch.randn(size, device=given.device) for name, size in sizes.items()}
    for name in ("out", "down"):  # these are added to x
        made[name] /= math.sqrt(2 * count)
    gains = {"before": (count, H), "between": (count, H), "last": (H,)}
    made |= {name: torch.ones(size, device=given.device) for name, size in gains.items()}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], gain, 1e-6).bfloat16()


def rotated(x: Tensor) -> Tensor:
    """The pairs (i, i + d / 2) of ``x [..., L, d]``, each turned by its position times a power of 1e-4."""
    length, half = x.shape[-2], x.shape[-1] // 2
    place, at = (torch.arange(size, device=x.device, dtype=torch.float32) for size in (length, half))
    angles = place[:, None] * torch.exp(at * (-math.log(1e4) / half))
    (a, b), cos, sin = x.float().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def layer(x: Tensor, *of: Tensor) -> Tensor:
    """Attention and a gated MLP, each added to ``x [B, L, H]``; ``of``: `OF_LAYER`."""
    before, qkv, out, between, gate_up, down = of
    heads = F.linear(norm(x, before), qkv).unflatten(-1, (3, -1, min(HEAD_SIZE, x.shape[-1])))
    q, k, v = heads.transpose(1, 3).unbind(2)  # (B, heads, L, d)
    mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(norm(x, between), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def head(of: dict[str, Tensor], ids: Tensor, labels: Tensor, layer: Callable[..., Tensor]) -> list[Tensor]:
    """``hidden [B * L, H]``, ``weight [V, H]``, ``labels [B * L]`` and their losses, by this package."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        x = F.embedding(ids, of["embedding"]).bfloat16()
        for own in zip(*(of[name].unbind() for name in OF_LAYER), strict=True):
            x = layer(x, *own)
    operands = [norm(x, of["last"]).flatten(0, 1), of["head"].bfloat16(), labels]
    return [*operands, fused_linear_cross_entropy(*operands, config=FusedCEConfig("store"))]


def train(of: dict[str, Tensor], data: Tensor, given: argparse.Namespace, layer: Any) -> dict[str, float]:
    """Until ``given.until`` or for ``given.steps``, what ends first."""
    optimizer = torch.optim.AdamW(of.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=data.is_cuda)
    step, begun = 0, time.monotonic()
    for which in batches((len(data) - 1) // given.length, given.batch):
        now = time.monotonic()
        begun = now if step == UNCOUNTED else begun
        spent = (now - begun) / max(given.until - begun, 1.0) if step > UNCOUNTED else 0.0
        if (share := max(spent, step / given.steps)) >= 1:
            break
        # A hundred steps up, and by a cosine to a tenth.
        rate = given.lr * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = rate
        loss = head(of, *windows(data, which, given.length), layer)[-1].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(of.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.item()  # waits: the time is that of steps which ran
        if step % 100 == 0 or step == UNCOUNTED:
            say(f"step {step}: loss {told:.4f}, {100 * share:.0f} % done")
        step += 1
    tokens = step * given.batch * given.length
    return {"steps": step, "trained_tokens": tokens, "training_seconds": time.monotonic() - begun}


def batches(count: int, size: int) -> Iterator[Tensor]:
    """Of ``count`` windows ``size`` at a time, each once an epoch, in a new order."""
    while True:
        yield from torch.randperm(count)[: count - count % size].split(size)


def say(text: str) -> None:
    print(f"trained: {text}", file=sys.stderr, flush=True)


@command("bench.trained")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.trained", __doc__ or "")
    add = parser.add_argument
    add("file", type=Path, help="written by torch.save")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    add("--seconds", type=seconds, default=280.0, help="from the start to the training's end [%(default)s]")
    add("--megabytes", type=number(), default=150.0, help="of text [%(default)s]")
    add("--text", nargs="+", default=PLACES, metavar="FOLDER", help="[%(default)s]")
    add("--lr", type=number(), default=8e-4)
    sizes = {"tokens": 16384, "hidden": 1024, "vocab": 131072, "layers": 12, "length": 1024, "batch": 32}
    for name, default in (sizes | {"steps": 10**6}).items():
        add(f"--{name}", type=whole(most=10**8), default=default, help="[%(default)s]")
    given = parser.parse_args(words)
    given.until = time.monotonic() + given.seconds
    writable_file(given.file)
    if on_gpu := given.device == "cuda":
        require_gpus(1, "--device cpu tries it without, slowly")
        import_module("torch._dynamo").config.suppress_errors = True  # then it runs uncompiled
    places = [Path(place) for place in set(map(os.path.realpath, given.text))]
    found = list(texts(places, given.megabytes))
    held = found[::HELD_OUT]
    del found[::HELD_OUT]
    say(f"{len(found)} files to learn from, {len(held)} held out")
    if not (found and held):
        raise UsageError("no text: --text FOLDER")
    ids_of = learn_tokens(found[: -(-len(found) // 4)], given.vocab)
    data, rest = (ids_of(some).to(given.device) for some in (found, held))
    say(f"{len(data)} tokens to learn from, {len(rest)} held out")
    wanted, spare = given.tokens // given.length, (len(rest) - 1) // given.length
    if spare < wanted or len(data) <= given.batch * given.length:
        raise UsageError("too little text for --tokens, --length and --batch: more --megabytes or --text")
    about: dict[str, float] = {"files": len(found), "layers": given.layers, "text_tokens": len(data)}
    torch.manual_seed(0)
    of, run = parameters_of(given), torch.compile(layer, dynamic=False) if on_gpu else layer
    about |= {"ids_in_text": len(data.unique()), **train(of, data, given, run)}
    picked = torch.linspace(0, spare - 1, wanted).long()
    with torch.no_grad():
        *made, losses = head(of, *windows(rest, picked, given.length), layer)
    operands = dict(zip(("hidden", "weight", "labels"), (tensor.cpu() for tensor in made), strict=True))
    deviations = {f"std_of_{n}": operands[n].float().std().item() for n in ("hidden", "weight")}
    about |= {"held_out_loss": losses.mean().item(), **deviations}
    say(", ".join(f"{name} {value:.6g}" for name, value in about.items()))
    torch.save({**operands, "about": about}, given.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
