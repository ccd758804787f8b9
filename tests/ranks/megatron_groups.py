"""Megatron's process groups, kept from case to case.

Every gloo group polls in threads of its own, a hundred times a second, as long as it lives, and
``destroy_model_parallel`` only forgets them: after some tens of cases the ranks would do little else.
"""

from __future__ import annotations

import torch.distributed as dist

_layout: tuple[int, int, int | None] | None = None


def have(tensor: int, pipeline: int = 1, virtual: int | None = None) -> None:
    """Megatron's parallel state is of this layout from now on. Made anew, by all ranks, where it differs."""
    from megatron.core import parallel_state

    global _layout
    wanted = (tensor, pipeline, virtual)
    if wanted == _layout:
        return
    parallel_state.destroy_model_parallel()
    if _layout is not None:
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual_pipeline_model_parallel_size=virtual
    )
    _layout = wanted
