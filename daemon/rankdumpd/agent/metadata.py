"""What stands beside the tensors of a rank: metadata, execution order, and last the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from rankdump.contract.exchange import SessionRequest
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.manifest import Manifest, manifest_name
from rankdumpd.agent.tree import Tree

# The tree follows the rules of this release; its readers compare the number with their own.
PROFILE_VERSION = "2.3.0"
ORDER_HEADER = "NodeExecutionOrder-FullNameWithScope"
_TARGETS = ("Ascend", "GPU", "CPU")


def introduce(tree: Tree, request: SessionRequest) -> None:
    """Write a rank's copy of the configuration and its `config.json`, unless they are there."""
    folder = f"{layout.rank_folder(request.rank)}/{layout.METADATA_FOLDER}"
    target = request.device_target if request.device_target in _TARGETS else "CPU"
    about = {"device_target": target, "ms_version": PROFILE_VERSION}
    files = {
        "data_dump.json": request.config_source,
        "config.json": json.dumps(about, separators=(",", ":")).encode(),
    }
    for name, data in files.items():
        if data and not tree.has(folder, name):
            tree.put(folder, name, (data,), mark=name)


def write_program_order(tree: Tree, rank: int, orders: Mapping[int, Sequence[str]]) -> None:
    """Write the operators of each graph, by their full scope names, as the rank ran them."""
    for graph, names in sorted(orders.items()):
        lines = (ORDER_HEADER, *map(_one_line, names))
        name = f"ms_execution_order_graph_{graph}.csv"
        data = "".join(f"{line}\n" for line in lines).encode()
        tree.put(_order_folder(rank), name, (data,), mark=name)


def append_iteration(
    tree: Tree, rank: int, graphs: Iterable[int], iteration: int, *, repeated: bool
) -> None:
    """Add the iteration to each graph's list; when repeated, only where it is not the last."""
    folder = _order_folder(rank)
    for graph in sorted(graphs):
        name = f"ms_global_execution_order_graph_{graph}.csv"
        last = tree.text(folder, name).splitlines()[-1:] if repeated else []
        if last != [str(iteration)]:
            tree.append_line(folder, name, str(iteration))


def write_manifest(tree: Tree, manifest: Manifest) -> None:
    """Write the manifest of an iteration: from now on it counts as complete."""
    status = manifest.status
    folder = f"{layout.rank_folder(status.rank)}/{layout.MANIFEST_FOLDER}"
    name = manifest_name(status.iteration, status.session_id)
    tree.put(folder, name, (manifest.to_json(),), mark=name)


def _order_folder(rank: int) -> str:
    return f"{layout.rank_folder(rank)}/{layout.ORDER_FOLDER}"


def _one_line(name: str) -> str:
    return "".join(c if c.isprintable() else "_" for c in name)
