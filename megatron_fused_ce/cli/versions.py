"""The oldest versions that this package runs with, and the error for an older one.

Checked at the first use: pip asks for any torch (setup.py), so that it replaces none. Tested versions:
docs/support.md.
"""

from __future__ import annotations

import re

OLDEST = {"torch": (2, 6), "triton": (3, 2), "megatron-core": (0, 15)}
#: A newer one runs if it has the patched functions (:mod:`.import_hook`) in known forms (:mod:`.forms`).
NEWEST_MEGATRON = (0, 19)


def numbers(version: str) -> tuple[int, int]:
    """Major and minor version, (2, 6) of ``2.6.0a0+nv25.01``; (0, 0) if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def words(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def too_old(package: str, version: str) -> str | None:
    """Why ``version`` is too old, in one line; None if it is not."""
    if numbers(version) >= OLDEST[package]:
        return None
    return (
        f"megatron_fused_ce needs {package} {words(OLDEST[package])} or newer and found {version}: "
        f"upgrade {package}"
    )


def require(package: str, version: str) -> None:
    """Raise ImportError if ``version`` is too old."""
    reason = too_old(package, version)
    if reason is not None:
        raise ImportError(reason)
