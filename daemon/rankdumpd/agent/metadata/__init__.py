"""What stands beside the tensors of a rank: metadata, graphs, order, and last the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from rankdump.contract.exchange import KernelArguments, SessionRequest
from rankdump.contract.key import one_line, sanitised
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout.place import NAME_MAX_BYTES
from rankdump.contract.layout.profile import Profile
from rankdump.contract.manifest import Manifest, manifest_name
from rankdump.contract.plan import DumpPlan
from rankdumpd.agent.metadata.configuration import configuration
from rankdumpd.agent.tree import Tree

ORDER_HEADER = "NodeExecutionOrder-FullNameWithScope"
_CONFIGURATION = "data_dump.json"
_SOURCES = {"acl": "acl.json"}
"""What a dialect calls its file."""
_TARGETS = ("Ascend", "GPU", "CPU")


def introduce(tree: Tree, request: SessionRequest, plan: DumpPlan, profile: Profile) -> None:
    """Write a rank's configuration and its `config.json`, unless they are there.

    MindInsight passes over a rank without either: a plan that came without a `data_dump.json`
    becomes one. The file of another dialect stands beside it, under its own name.
    """
    folder = f"{layout.rank_folder(request.rank)}/{layout.METADATA_FOLDER}"
    target = request.device_target if request.device_target in _TARGETS else "CPU"
    about = {"device_target": target, "ms_version": profile.version}
    source, name = request.config_source, _SOURCES.get(plan.dialect, _CONFIGURATION)
    files = {
        _CONFIGURATION: configuration(plan, request.device),
        "config.json": json.dumps(about, separators=(",", ":")).encode(),
        **({name: source} if source else {}),
    }
    for name, data in files.items():
        if not tree.has(folder, name):
            tree.put(folder, name, (data,), mark=name)


def write_program_order(tree: Tree, rank: int, orders: Mapping[int, Sequence[str]]) -> None:
    """Write the operators of each graph, by their full scope names, as the rank ran them."""
    for graph, names in sorted(orders.items()):
        lines = (ORDER_HEADER, *map(one_line, names))
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
        last = tree.lines(folder, name)[-1:] if repeated else []
        if last != [str(iteration)]:
            tree.append_lines(folder, name, (str(iteration),))


def write_graph(tree: Tree, rank: int, files: Mapping[str, bytes]) -> None:
    """Write the files of a graph by name; those of an earlier description are replaced."""
    folder = f"{layout.rank_folder(rank)}/{layout.GRAPH_FOLDER}"
    for name, data in files.items():
        tree.put(folder, name, (data,), mark=name)


def write_arguments(
    tree: Tree, arguments: KernelArguments, *, folder_of: Callable[[int], str], mark: str
) -> list[str]:
    """Write what operators were configured with; return those whose file name is too long.

    `folder_of` gives the folder of a graph's tensors.

    Source: mindspore-dump.md 2.9. No name there is ever mapped to a shorter one.
    """
    too_long: list[str] = []
    for each in arguments.operators:
        name = f"{sanitised(each.op_type) or '_'}.{sanitised(each.op_name) or '_'}.json"
        if len(name.encode()) > NAME_MAX_BYTES:
            too_long.append(each.op_name)
            continue
        text = json.dumps(dict(each.values), indent=4, sort_keys=True, ensure_ascii=False)
        tree.put(folder_of(each.graph), name, (text.encode(),), mark=mark)
    return too_long


def write_manifest(tree: Tree, rank_folder: str, manifest: Manifest) -> None:
    """Write the manifest of an iteration: from now on it counts as complete."""
    status = manifest.status
    name = manifest_name(status.iteration, status.session_id)
    tree.put(f"{rank_folder}/{layout.MANIFEST_FOLDER}", name, (manifest.to_json(),), mark=name)


def _order_folder(rank: int) -> str:
    return f"{layout.rank_folder(rank)}/{layout.ORDER_FOLDER}"
