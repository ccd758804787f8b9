"""Turning the fused head on and off, and the counters that prove that it ran."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from megatron_fused_ce.config import FusedCEConfig


@dataclass
class Counters:
    """Heads of this process since it started (or since :meth:`reset`)."""

    #: evaluated without logits
    fused: int = 0
    #: deferred, then needed as real logits by something else
    materialised: int = 0
    #: computed by Megatron's own layer (see adapter/stock_path.py for when)
    stock: int = 0

    def reset(self) -> None:
        self.fused = self.materialised = self.stock = 0


_counters = Counters()
_enabled_config: FusedCEConfig | None = None


def counters() -> Counters:
    """The counters of this process, live."""
    return _counters


def enable(config: FusedCEConfig | None = None) -> None:
    """Turn the fused head on for models built from now on, whatever launched them.

    The same as ``--fused-chunked-ce`` for launches without Megatron's command line (Megatron-Bridge,
    NeMo, own scripts). Call it before the model is built, on every rank, with the same ``config``;
    Megatron may have been imported already or not. Runs no collective.
    """
    global _enabled_config
    from megatron_fused_ce.adapter import import_hook

    _enabled_config = config or FusedCEConfig()
    import_hook.install()


def disable() -> None:
    """Leave models built from now on to Megatron, unless the command line asks for the fused head."""
    global _enabled_config
    _enabled_config = None


def active_config() -> FusedCEConfig | None:
    """What applies to a model built now: :func:`enable`'s config, else the command line's, else None.

    Megatron's parsed arguments count where they ask for it; else ``sys.argv`` does, since
    ``--yaml-cfg`` replaces what was parsed from the command line.
    """
    if _enabled_config is not None:
        return _enabled_config
    from megatron_fused_ce.adapter import arguments

    parsed = arguments.config_from_args(arguments.megatron_args())
    return parsed if parsed is not None else arguments.config_from_argv(sys.argv[1:])
