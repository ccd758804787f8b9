"""gloo as ranks on a CPU need it: one worker thread a group, and an end that no worker outlives.

Both are about torch's ``ProcessGroupGloo``, seen with torch 2.13:

- Every group runs its collectives in two worker threads. Before and after each, a worker moves the
  operation's name into a string of the group's, and takes no lock for that
  (``ProcessGroupGloo::runLoop``). With names too long to be kept inside the string, two workers free
  one buffer: "malloc(): unaligned tcache chunk detected" or SIGSEGV, later, anywhere.
- A worker gives back a finished collective's tensors after the collective is done. If Python has begun
  to end by then, taking the GIL ends the thread inside a destructor: SIGABRT after the last line.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from typing import Any


def use_one_thread() -> None:
    """Give every gloo group made from now on, in this process, one worker thread. Idempotent.

    All ranks of a group launch its collectives in one order, so nothing waits for a second worker.
    """
    import torch.distributed as dist

    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None:
        return
    as_made = getattr(gloo, "as_torch_makes_it", gloo.__init__)

    def threaded(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        asked = args[0] if args else kwargs.get("options", kwargs.get("timeout"))
        if asked is None or isinstance(asked, datetime.timedelta):
            options = gloo._Options()
            options._devices = [gloo.create_default_device()]
            if asked is not None:
                options._timeout = asked
            asked = options
        asked._threads = 1
        as_made(self, store, rank, size, asked)

    gloo.as_torch_makes_it = as_made
    gloo.__init__ = threaded


def leave(status: int = 0) -> None:
    """End this process before a worker thread can meet an interpreter that ends."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end(status: int) -> None:
    """``sys.exit``; :func:`leave` where this process was one of several on a CPU.

    A command that ends before it needs torch does not wait for it here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "torch" in sys.modules:
        import torch

        if not torch.cuda.is_available():
            leave(status)
    sys.exit(status)
