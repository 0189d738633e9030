"""What of an agent's settings each of its workers gets. Pure."""

from __future__ import annotations

import dataclasses

from rankdumpd.settings import AgentSettings

LEAST_QUEUE_BYTES = 1 << 20


def share_of(
    settings: AgentSettings,
    index: int,
    *,
    state_dir: str,
    runtime_dir: str,
    memory_bytes: int,
    cores: int,
) -> AgentSettings:
    """Return the settings of one worker: its own places, and its part of all memory and cores."""
    workers = settings.workers
    queue_bytes = max(LEAST_QUEUE_BYTES, settings.queue_bytes // workers)
    return dataclasses.replace(
        settings,
        listen=beside(settings.listen, index),
        state_dir=state_dir,
        workers=1,
        encode_threads=max(1, (settings.encode_threads or cores) // workers),
        queue_bytes=queue_bytes,
        report_bytes=max(LEAST_QUEUE_BYTES, settings.report_bytes // workers),
        memory_bytes=max(queue_bytes, memory_bytes // workers),
        runtime_dir=runtime_dir,
        # Up to a whole one: as many ranks as may come do, where they are shared out evenly.
        max_sessions=-(-settings.max_sessions // workers),
        disk_bytes=_part(settings.disk_bytes, workers),
        job_bytes=_part(settings.job_bytes, workers),
        retain_bytes=_part(settings.retain_bytes, workers),
    )


def _part(limit_bytes: int, workers: int) -> int:
    """Return a worker's part of a limit; none of none, and never none of a limit."""
    return max(1, limit_bytes // workers) if limit_bytes else 0


def beside(listen: str, index: int) -> str:
    """Return where a worker listens: on a socket beside the public one, or any port."""
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    return f"{listen.rpartition(':')[0]}:0"


def redirect_to(address: str) -> str:
    """Return how a worker's address is told to a rank: what of it differs from the public one."""
    return address.rpartition("/" if address.startswith("unix:") else ":")[2]
