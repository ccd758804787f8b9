"""Adds the flags to Megatron's command line."""

from __future__ import annotations

import argparse
from functools import wraps
from types import ModuleType

from megatron_fused_ce.adapter import layout
from megatron_fused_ce.adapter.arguments import add_arguments, flag_given, refuse_options_without_flag


def patch(module: ModuleType) -> None:
    """Wrap ``add_megatron_arguments``: every version looks it up in its module when it parses."""
    stock = module.add_megatron_arguments

    @wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if flag_given():
            layout.check_language_module()
        return refuse_options_without_flag(add_arguments(stock(parser)))

    module.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]
