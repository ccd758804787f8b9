"""Stands for pretrain_gpt.py in a test's checkout: logs as Megatron does, and needs no torch.

With the flag and several chunks it goes wrong as its words say: ``--full``, ``--break``, ``--wrong``,
``--nan``, ``--norm``, ``--short``, ``--idle``, ``--stored``; native's loss as ``--native-nan`` and
``--native-wrong`` say. ``$LAUNCHES``: a file that gets each launch's words.
"""

import os
import sys


def value(name: str, otherwise: int) -> int:
    return int(words[len(words) - words[::-1].index(name)]) if name in words else otherwise


words = sys.argv[1:]
if "LAUNCHES" in os.environ:
    with open(os.environ["LAUNCHES"], "a") as file:
        print(*words, file=file)
flag, native = "--fused-chunked-ce" in words, "native" in words
chunks = value("--fused-ce-num-chunks", 0)
goes_wrong = words if flag and chunks > 1 else []
if "--refused" in words:
    raise SystemExit("pretrain_gpt.py: error: unrecognized arguments: --refused")
if chunks and not flag:
    raise RuntimeError("the plugin's flags belong to the launch with the flag")
if "--full" in goes_wrong or value("--seq-length", 0) > value("--most-tokens", 1 << 30):
    raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.")
if "--break" in goes_wrong:
    raise RuntimeError("no kernel for this GPU")
print(f"[Rank 0] memory (MB) | allocated: 1.00 | max allocated: {500 if flag else 900}.00 |")
end = value("--exit-interval", value("--train-iters", 12)) - ("--short" in goes_wrong)
for i in range(1, end + 1):
    ms = 10 + 2 * (chunks > 0) + (90 // i if i < 3 else 0)
    loss = 5.0 - 0.1 * i + 0.1 * ("--wrong" in goes_wrong)
    loss += native * (0.06 if "--native-wrong" in words else 1e-6)
    if "--nan" in goes_wrong or (native and "--native-nan" in words):
        loss = float("nan")
    norm = 1.0 + 1e-3 * ("--norm" in goes_wrong)
    print(
        f" iteration {i:8d}/ {end} | elapsed time per iteration (ms): {ms:.1f} | lm loss: {loss:.6E} | "
        f"grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
if flag and "--idle" not in goes_wrong:
    stored = int("--stored" in goes_wrong)
    print(f"[fused-ce] heads: {end} fused, 0 on the stock path; logits materialised: {stored}")
