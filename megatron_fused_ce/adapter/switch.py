"""Turns the fused head on and off; counts its evaluations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_fused_ce.adapter import arguments, forms, import_hook
from megatron_fused_ce.config import FusedCEConfig, why_no_config


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


class _Enabled(NamedTuple):
    """What :func:`enable` was given."""

    config: FusedCEConfig | None
    deferred_logits: bool
    trust: frozenset[str]


_counters = Counters()
_enabled: _Enabled | None = None


def counters() -> Counters:
    """The counters of this process, live."""
    return _counters


def enable(
    config: FusedCEConfig | None = None,
    *,
    deferred_logits: bool = False,
    trust: Iterable[str] = (),
) -> None:
    """Turn the fused head on for models built from now on, whatever launched them.

    The same as ``--fused-chunked-ce`` for launches without Megatron's command line (Megatron-Bridge,
    NeMo, own scripts). Call it before the model is built, on every rank, with the same arguments; Megatron
    may have been imported already or not. Runs no collective.

    Args:
        config: options of the head. None: those of the launch where it has ``--fused-chunked-ce``, with its
            trusted digests beside those given here; else the defaults.
        deferred_logits: a model called without labels returns deferred logits of this rank's part, for
            callers of :meth:`.DeferredLogits.log_probs`; any other use of them makes real ones.
        trust: the same as ``--fused-ce-trust``: digests, from the log, of functions that are not known and
            that the head may stand in for.

    Raises:
        TypeError: ``config`` is no :class:`FusedCEConfig`.
        ValueError: it has a ``logit_scale``, which Megatron's own path would not apply; ``trust`` has
            something else than digests.
        ImportError: an imported Megatron or torch is too old, or Megatron lacks a patched function.
    """
    global _enabled
    wrong = why_no_config(config)
    if wrong is not None:
        raise wrong
    if config is not None and config.logit_scale != 1.0:
        raise ValueError(
            f"logit_scale is {config.logit_scale}; under Megatron the model scales its logits (MuP's output "
            "multiplier is taken over from it): leave it at 1"
        )
    digests = frozenset([trust] if isinstance(trust, str) else trust)
    wrong_digest = next((text for text in digests if not forms.is_digest(text)), None)
    if wrong_digest is not None:
        raise ValueError(
            f"trust takes digests of 16 hexadecimal digits, as the log names them, got {wrong_digest!r}"
        )
    _enabled = _Enabled(config, deferred_logits, digests)
    import_hook.install(asked_for)


def disable() -> None:
    """Leave models built from now on to Megatron, unless the command line asks for the fused head."""
    global _enabled
    _enabled = None


def returns_deferred_logits() -> bool:
    """Whether :func:`enable` asked for deferred logits from models without labels."""
    return _enabled is not None and _enabled.deferred_logits


def active_config() -> FusedCEConfig | None:
    """The config for a model built now: :func:`enable`'s, else the launch's, else None."""
    if _enabled is not None and _enabled.config is not None:
        return _enabled.config
    of_launch = arguments.config_from_args(arguments.launch_args())
    return of_launch if of_launch is not None or _enabled is None else FusedCEConfig()


def trusted() -> frozenset[str]:
    """Digests of edited functions that the head may stand in for."""
    if _enabled is not None and _enabled.config is not None:
        return _enabled.trust
    given: frozenset[str] = frozenset() if _enabled is None else _enabled.trust
    return given.union(getattr(arguments.launch_args(), "fused_ce_trust", None) or ())


def asked_for() -> bool:
    """Whether :func:`enable` or the command line turned the fused head on, before anything is parsed."""
    return _enabled is not None or arguments.flag_given()
