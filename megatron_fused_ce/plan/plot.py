"""A plan as a picture: the peak of each way of computing the loss, part by part, against the GPU."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_fused_ce.plan.advice import Advice
from megatron_fused_ce.plan.answer import GIB
from megatron_fused_ce.plan.report import PLACES, called

#: Parts of a moment that are drawn as one, and their colours.
SEGMENTS = {
    "weights": ("#08306b", ("weights", "gathered weights")),
    "gradients": ("#2171b5", ("gradients", "dummy gradients", "head's gradient")),
    "optimizer": ("#9ecae1", ("optimizer", "optimizer's copies")),
    "libraries": ("#bdbdbd", ("libraries", "cuBLAS workspaces")),
    "activations": ("#31a354", ("activations", "final norm")),
    "layer at work": ("#a1d99b", ("layer at work",)),
    "head": ("#e6550d", ("head",)),
}


def draw(advice: Advice, title: str, path: Path) -> None:
    """Write the picture to ``path`` (its ending says the format), whole or not at all.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.5 * len(advice.ways) + 2), layout="constrained")
    names = [called(way) for way in advice.ways]
    starts = [0.0] * len(names)
    for label, (color, parts) in SEGMENTS.items():
        moments = [way.estimate.bound for way in advice.ways]
        sizes = [sum(moment.parts.get(part, 0) for part in parts) / GIB for moment in moments]
        if any(sizes):
            axes.barh(names, sizes, left=starts, color=color, label=label, height=0.7)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    usable, capacity = advice.gpu.usable / GIB, advice.gpu.capacity / GIB
    axes.axvline(usable, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"{advice.gpu.name}: {usable:.1f} of {capacity:.1f} usable", (usable, 1), (-4, 3),
        xycoords=("data", "axes fraction"), textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    # In a column of their own, behind the longest bar and the limit.
    end = 1.02 * max(*starts, usable)
    for place, (start, way) in enumerate(zip(starts, advice.ways, strict=True)):
        axes.text(
            end,
            place,
            f"{start:.1f}, {PLACES[way.estimate.bound.name]}: {way.verdict}",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.3 * end)
    axes.invert_yaxis()
    axes.set_xlabel("GiB a GPU at the peak; right: the sum, when it is highest, and whether it fits")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(SEGMENTS), frameon=False, fontsize=8)
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        figure.savefig(partial, dpi=150)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        plt.close(figure)
