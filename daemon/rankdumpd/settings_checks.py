"""Checks of the settings of a process beyond single values: addresses, the group on this host and
folders that exclude each other. They begin nothing; a start, `--check-config` and a reload make
them.
"""

from __future__ import annotations

import os
from pathlib import Path

from rankdump._core import tree_root
from rankdump.errors import ConfigError, RejectedError
from rankdumpd.agent.shm.slab_folder import find_group_id
from rankdumpd.ingest.folder import check_separate_folders
from rankdumpd.server.grpc_server import check_address
from rankdumpd.server.metrics_page import parse_metrics_address
from rankdumpd.settings import AgentSettings, DaemonSettings
from rankdumpd.workers.supervisor import build_worker_address


def check_agent_settings(settings: DaemonSettings) -> None:
    """Raise the ConfigError with which an agent or a standalone daemon would not start."""
    agent = settings.agent
    check_address("agent.listen", agent.listen, has_tls=settings.tls.on)
    if agent.workers > 1:
        # The path of a worker's socket is longer.
        last = build_worker_address(agent.listen, agent.workers - 1)
        check_address("agent.listen", last, has_tls=settings.tls.on)
    _check_common_settings(settings)
    if agent.ingest_dir:
        _check_ingest(agent)


def check_coordinator_settings(settings: DaemonSettings) -> None:
    """Raise the ConfigError with which a coordinator would not start."""
    check_address("coordinator.listen", settings.coordinator.listen, has_tls=settings.tls.on)
    _check_common_settings(settings)


def _check_common_settings(settings: DaemonSettings) -> None:
    # The socket of a coordinator belongs to that group as well.
    find_group_id(settings.agent.runtime_group)
    if settings.metrics.listen:
        parse_metrics_address(settings.metrics.listen, has_tls=settings.tls.on)


def _check_ingest(settings: AgentSettings) -> None:
    tree = settings.ingest_into
    try:
        check_separate_folders(Path(settings.ingest_dir), Path(tree))
        tree_root.check_root(tree, tree_root.split_roots(settings.roots), resolve=os.path.realpath)
    except ConfigError as error:
        allowed = error.allowed
    except RejectedError as error:
        allowed = str(error)
    else:
        return
    raise ConfigError("settings", "agent.ingest_into", tree, allowed)
