"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from megatron_fused_ce.scripts.lib.results import write_whole


def pyplot() -> Any:
    """matplotlib's, drawing to files; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write the figure, each panel without the frame's upper and right line, and forget it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi)
    pyplot().close(figure)
    write_whole(path, picture.getvalue())
