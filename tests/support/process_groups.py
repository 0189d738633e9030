"""End of a process group that a test has begun in this process."""

from __future__ import annotations

import gc

import torch.distributed as dist


def end_group() -> None:
    """Destroy the default process group, after the models that hold it.

    The reducer of a DistributedDataParallel that is found as garbage later would destroy the group
    in whatever test runs then, with the interpreter's lock, for which a thread of gloo may wait.
    """
    gc.collect()
    dist.destroy_process_group()
