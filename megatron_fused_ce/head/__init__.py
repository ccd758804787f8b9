"""The head, from the arguments of a call to losses and gradients; :mod:`.head.loop` is the page to read."""

import torch

from megatron_fused_ce.cli import versions

versions.require("torch", torch.__version__)  # every function of the package comes through here
