"""The table of known forms as it was at an earlier release."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def table_until(release: str) -> Iterator[None]:
    """What the package would know had it been written at that release; nothing of Megatron's for ''."""
    from megatron_fused_ce.adapter import known_forms

    def is_older(since: str) -> bool:
        return bool(since) and [*map(int, since.split("."))] <= [*map(int, release.split("."))]

    def kept(forms: dict[str, str]) -> dict[str, str]:
        return {digest: since for digest, since in forms.items() if release and is_older(since)}

    with pytest.MonkeyPatch.context() as patch:
        releases = known_forms.RELEASES.split()
        patch.setattr(known_forms, "RELEASES", " ".join(r for r in releases if release and is_older(r)))
        of_all = {
            module: {name: kept(forms) for name, forms in names.items()}
            for module, names in known_forms.FORMS.items()
        }
        patch.setattr(known_forms, "FORMS", of_all)
        if release:
            names = {
                pool: {since: read for since, read in begun.items() if is_older(since)}
                for pool, begun in known_forms.NAMES.items()
            }
            patch.setattr(known_forms, "NAMES", names)
        yield
