"""Results on disk: one schema, its writer and its reader.

A file is ``{"schema": 1, "made_by": {...}, "rows": [...]}``. ``made_by`` has `MADE_BY`: where the figures
come from. Each row has `ROW` (None where a program does not measure it), and whatever else its program
knows.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import UsageError, read_text
from megatron_fused_ce.scripts.lib import gpu

Row = dict[str, Any]
SCHEMA = 1
#: Of a file: the commit, the device, versions, and the command line.
MADE_BY = ("commit", "device", "python", "torch", "triton", "megatron", "transformer_engine", "command")
#: Of a row: what was measured, milliseconds of a step (median), its ratio to what the program names, the
#: spread of the time or ratio, MiB at the peak, and the host's milliseconds.
ROW = ("shape", "variant", "time_ms", "ratio", "spread", "peak_mib", "host_ms")

SCRIPTS = Path(__file__).resolve().parents[1]
#: The checkout; of an installed package the folder that it lies in.
REPOSITORY = Path(sys.modules["megatron_fused_ce"].__file__ or "").resolve().parents[1]
PACKAGE = REPOSITORY / "megatron_fused_ce"
#: As named on a command line: below the current folder.
RESULTS = Path("docs/benchmarks/results")


# --- writing ---------------------------------------------------------------------------------


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside ``path`` and move there: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


def finite(value: Any) -> Any:
    """JSON has no inf and nan: their names instead."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def git(folder: Path | str, *words: str) -> str:
    """What it prints; bytes that are no text are replaced."""
    how: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "errors": "replace"}
    return str(subprocess.run(["git", "-C", str(folder), *words], **how).stdout)


def commit() -> str:
    """The checkout's commit, with ``-dirty`` where the package or its kernels differ from it.

    Where the code travelled without its repository, or with a stale one: the environment's
    ``FUSED_CE_COMMIT``, which comes first; ``unknown`` without either.
    """
    if named := os.environ.get("FUSED_CE_COMMIT"):
        return named

    try:
        changed = git(REPOSITORY, "status", "--porcelain", "--", "megatron_fused_ce", "kernels")
        return git(REPOSITORY, "rev-parse", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version(*names: str) -> str | None:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def device_name() -> str:
    """The GPU's, '' without one. In a process of its own: CUDA here would take memory from launches."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def made_by(device: str, command: Sequence[str], **more: Any) -> Row:
    """Where figures made here and now come from; ``device`` '': this machine's processor.

    Of paths in the command their last part stays: the others say nothing elsewhere.
    """
    words = (Path(word).name if word.startswith(("/", "~")) else word for word in command)
    return {
        "commit": commit(),
        "device": device or f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton", "pytorch-triton"),
        "megatron": version("megatron-core"),
        "transformer_engine": version("transformer-engine", "transformer_engine"),
        "command": shlex.join(words),
        **more,
    }


def write(path: Path, rows: Sequence[Row], source: Row) -> None:
    """The file, a row a line, complete at any time; in ``made_by`` the GPU's `gpu.span`.

    Raises ValueError where `check` does.
    """
    source = source | ({"gpu": seen} if (seen := gpu.span()) else {})
    content = {"schema": SCHEMA, "made_by": source, "rows": [{**dict.fromkeys(ROW), **row} for row in rows]}
    check(content := finite(content))
    head = json.dumps({"schema": SCHEMA, "made_by": content["made_by"]}, indent=1)[:-2]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in content["rows"])
    write_whole(path, f'{head},\n "rows": [\n{lines}\n]}}\n')


def default_path(folder: Path, device: str, name: str) -> Path:
    """``FOLDER/DATE-DEVICE-NAME.json``: ``NVIDIA H200`` is ``h200``."""
    words = [word for word in re.split(r"[^a-z0-9]+", device.lower()) if word]
    slug = "-".join(word for word in words if word != "nvidia") or "unknown"
    return folder / f"{date.today().isoformat()}-{slug}-{name}.json"


# --- reading ---------------------------------------------------------------------------------


def check(content: Any) -> None:
    """Raises ValueError, saying where, for what is no file of this schema."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    source, rows = content.get("made_by"), content.get("rows")
    source = source if isinstance(source, dict) else {}
    if missing := set(MADE_BY) - source.keys():
        raise ValueError(f"made_by lacks {', '.join(sorted(missing))}")
    if not source["commit"] or not source["device"]:
        raise ValueError("made_by names no commit or no device")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("rows is no list of rows")
    for at, row in enumerate(rows):
        if missing := set(ROW) - row.keys():
            raise ValueError(f"row {at} lacks {', '.join(sorted(missing))}")
        for key in ROW:
            value, is_name = row[key], key in ("shape", "variant")
            if is_name and not (isinstance(value, str) and value):
                raise ValueError(f"row {at}: {key} is no name: {value!r}")
            if not is_name and value is not None and (type(value) not in (int, float) or value < 0):
                raise ValueError(f"row {at}: {key} is no number from 0 on: {value!r}")


def read(path: Path) -> Row:
    """A file's content.

    Raises UsageError, naming the file, where it cannot be read or holds something else.
    """
    try:
        content = json.loads(read_text(path))
        check(content)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as a result: {error}") from None
    return dict(content)


def rows(path: Path) -> list[Row]:
    """A file's rows, each with what ``made_by`` says. Raises UsageError."""
    content = read(path)
    return [{**content["made_by"], **row} for row in content["rows"]]
