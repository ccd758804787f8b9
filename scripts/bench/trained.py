"""Operands of a trained head: a small language model learns real text for minutes, its last layer is kept.

    python -m scripts.bench.trained /tmp/operands.pt
    python -m scripts.bench --preset trained --operands /tmp/operands.pt --peers torch-compile liger cce

Random logits are flat, a trained head's are peaked: most of a row of P - Y is near 0. That changes what a
filter skips, how large errors are, and the time of a bare GEMM too, since power depends on the data.

Text: sources, headers and documentation on this machine, each content once. Tokens: a byte-level BPE learned
on a quarter of it. Model: torch's transformer layers between untied embeddings; bf16 autocast over fp32
weights, AdamW, this package's loss. Written: ``hidden [T, H]`` after the last norm and ``weight [V, H]`` in
bf16, ``labels [T]``, of the text's end, which is held out, and ``about``: how they were made.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.scripts.runs.real_text import byte_level_bpe, texts

PLACES = ["/usr/lib", "/usr/include", "/usr/share/doc", "/usr/local/cuda/include"]
PLACES += [sysconfig.get_path("stdlib"), *(folder for folder in sys.path if folder.endswith("-packages"))]


def windows_of(found: list[str], vocab: int, length: int) -> Tensor:
    """``[N, L + 1]`` ids of these texts, 0 at the end of each, in windows."""
    tokenizer, row = byte_level_bpe(found[: -(-len(found) // 4)], vocab, ["<|end|>"]), array("i")
    for text in found:
        row.extend([*tokenizer.encode(text).ids, 0])
    del row[len(row) // (length + 1) * (length + 1) :]
    return torch.frombuffer(row, dtype=torch.int32).view(-1, length + 1)


class Model(nn.Module):
    def __init__(self, vocab: int, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        how: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        one = nn.TransformerEncoderLayer(hidden, max(1, hidden // 64), 4 * hidden, 0.0, **how)
        self.body = nn.TransformerEncoder(one, layers, nn.LayerNorm(hidden), enable_nested_tensor=False)
        self.embedding, self.place = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        for table in (self.embedding, self.place, self.head):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """Of windows ``hidden [B * L, H]``, ``weight [V, H]``, ``labels [B * L]`` and their losses."""
        ids, labels = rows[:, :-1].long(), rows[:, 1:].long().flatten()
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        with torch.autocast(ids.device.type, torch.bfloat16):
            x = self.body(self.embedding(ids) + self.place.weight, mask, is_causal=True)
        operands = [x.flatten(0, 1).bfloat16(), self.head.weight.bfloat16(), labels]
        return [*operands, fused_linear_cross_entropy(*operands, config=FusedCEConfig("store"))]


def train(model: Model, data: Tensor, batch: int, steps: int, until: float, lr: float) -> int:
    """``steps`` steps, or until that moment; returns how many."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    begun, step, order = time.monotonic(), 0, torch.empty(0, dtype=torch.long)
    while (share := max(step / steps, (time.monotonic() - begun) / (until - begun))) < 1:
        if len(order) < batch:  # each window once an epoch
            order = torch.randperm(len(data))
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 100, 1 - 0.9 * share)
        loss = model(data[order[:batch].to(data.device)])[-1].mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        order, step, told = order[batch:], step + 1, loss.item()  # waits: its time is that of steps that ran
        if step % 100 == 1:
            print(f"trained: step {step}: loss {told:.4f}, {share:.0%} done", file=sys.stderr, flush=True)
    return step


@cli.command("bench.trained")
def main(words: list[str]) -> int:
    parser = cli.Parser("python -m scripts.bench.trained", __doc__ or "")
    add = parser.add_argument
    add("file", type=Path, help="written by torch.save")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    add("--seconds", type=cli.seconds, default=280.0, help="of the whole run, about [%(default)s]")
    add("--megabytes", type=cli.number(), default=150.0, help="of text [%(default)s]")
    add("--text", nargs="+", default=PLACES, metavar="FOLDER", help="[%(default)s]")
    add("--lr", type=cli.number(), default=8e-4)
    sizes = {"tokens": 16384, "hidden": 1024, "vocab": 131072, "layers": 12, "length": 1024, "batch": 32}
    for name, default in (sizes | {"steps": 10**6}).items():
        add(f"--{name}", type=cli.whole(most=10**8), default=default, help="[%(default)s]")
    given = parser.parse_args(words)
    until = time.monotonic() + given.seconds
    cli.writable_file(given.file)
    if given.device == "cuda":
        cli.require_gpus("--device cpu tries it without, slowly")
    found = list(texts([Path(place) for place in set(map(os.path.realpath, given.text))], given.megabytes))
    data = windows_of(found, given.vocab, given.length).to(given.device) if found else torch.empty(0, 1)
    data, rest = data.tensor_split([-(given.tokens // given.length)])
    if len(data) < given.batch:
        raise cli.UsageError("too little text for --tokens, --length and --batch: more --megabytes or --text")
    torch.manual_seed(0)
    model = Model(given.vocab, given.hidden, given.layers, given.length).to(given.device)
    about: dict[str, float] = {"files": len(found), "text_tokens": data.numel(), "layers": given.layers}
    about["ids_in_text"] = len(data.unique())
    about["steps"] = train(model, data, given.batch, given.steps, until, given.lr)
    with torch.no_grad():
        hidden, weight, labels, losses = (tensor.cpu() for tensor in model(rest))
    about |= {"std_of_hidden": hidden.float().std().item(), "std_of_weight": weight.float().std().item()}
    about["held_out_loss"] = losses.mean().item()
    print(f"trained: {', '.join(f'{name} {value:.6g}' for name, value in about.items())}", file=sys.stderr)
    torch.save({"hidden": hidden, "weight": weight, "labels": labels, "about": about}, given.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
