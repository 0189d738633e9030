"""Files beside the tensors of a rank: configuration, graphs, execution order, kernel arguments,
call stacks and, written last, the manifest. A stack file is valid JSON after every addition.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import xxhash

from rankdump._core.manifest import (
    FingerprintSeal,
    Manifest,
    make_fingerprint_name,
    make_manifest_name,
)
from rankdump._core.plan import UNNAMED_MODEL, DumpPlan
from rankdump._core.record import sanitize_line, sanitize_name
from rankdump._core.session_protocol import CallStacks, KernelArguments, SessionRequest
from rankdump._core.status import IterationStatus
from rankdump._core.tensor_fingerprint import format_fingerprint_file
from rankdump._core.tree_session import (
    SESSIONS_FOLDER,
    TreeSession,
    format_tree_session,
    make_session_file_name,
    make_session_prefix,
    parse_tree_session,
    update_session,
)
from rankdump._layout import tree_paths as layout
from rankdump._layout.api_files import (
    format_stack_entry,
    is_module_key,
    make_stack_key,
    read_stack_key,
)
from rankdump._layout.profile import Profile
from rankdump._layout.tree_layouts import DEFAULT_LAYOUT
from rankdump._layout.tree_paths import MAX_NAME_BYTES, FilePlace
from rankdump.errors import CorruptedError
from rankdumpd.agent.storage.tree import DumpTree

_DEBUG_MODES = {"always": 0, "overflow": 3, "exception": 4}


def render_configuration(plan: DumpPlan, device: int) -> bytes:
    """Return a plan as the text of a `data_dump.json`; if the plan is for all devices, with
    `device`.
    """
    body = {
        "common_dump_settings": _make_common_settings(plan, device),
        "e2e_dump_settings": _make_e2e_settings(plan),
    }
    return (json.dumps(body, indent=2) + "\n").encode()


def _make_common_settings(plan: DumpPlan, device: int) -> dict[str, object]:
    selection, content = plan.selection, plan.content
    operators, has_both_sides = selection.operators, selection.inputs and selection.outputs
    patterns = (f"name-regex({pattern})" for pattern in operators.patterns)
    devices = (device,) if selection.devices is None else selection.devices
    common: dict[str, object] = {
        "dump_mode": 2 if operators.marked else 0 if operators.everything else 1,
        "path": plan.output.root,
        "net_name": plan.output.net_name or UNNAMED_MODEL,
        "iteration": selection.iterations.text,
        "saved_data": content.saved,
        "input_output": 0 if has_both_sides else 1 if selection.inputs else 2,
        "kernels": [*operators.names, *operators.types, *patterns],
        "support_device": list(devices),
        "op_debug_mode": _DEBUG_MODES[selection.trigger],
        "statistic_category": list(content.statistics),
        "file_format": plan.output.file_format,
        "initial_iteration": selection.initial_iteration,
    }
    if selection.trigger == "overflow":
        # MindSpore rejects the key together with any other mode.
        common["overflow_number"] = selection.overflow_limit
    return common


def _make_e2e_settings(plan: DumpPlan) -> dict[str, object]:
    content = plan.content
    settings: dict[str, object] = {
        "enable": plan.output.layout == DEFAULT_LAYOUT.name,
        "trans_flag": True,
        "stat_calc_mode": "device" if content.on_device else "host",
        "device_stat_precision_mode": content.precision,
        "save_kernel_args": content.kernel_arguments,
        "sample_mode": int(content.sample_elements > 0),
    }
    if content.sample_elements:
        settings["sample_num"] = content.sample_elements
    return settings


ORDER_HEADER = "NodeExecutionOrder-FullNameWithScope"
_CONFIGURATION_FILE = "data_dump.json"
_SOURCE_FILES = {"acl": "acl.json"}
"""Name of the configuration file by dialect, where it is not `data_dump.json`."""
_DEVICE_TARGETS = ("Ascend", "GPU", "CPU")


def write_rank_metadata(
    tree: DumpTree, request: SessionRequest, plan: DumpPlan, profile: Profile
) -> None:
    """Write a rank's configuration and its `config.json`, unless they exist.

    MindInsight ignores a rank that lacks one of both files, so a `data_dump.json` is written for
    every plan. The configuration in another dialect is written beside it, under that dialect's file
    name.
    """
    folder = f"{layout.make_rank_folder(request.rank)}/{layout.METADATA_FOLDER}"
    target = request.device_target if request.device_target in _DEVICE_TARGETS else "CPU"
    about = {"device_target": target, "ms_version": profile.version}
    source, name = request.config_source, _SOURCE_FILES.get(plan.dialect, _CONFIGURATION_FILE)
    files = {
        _CONFIGURATION_FILE: render_configuration(plan, request.device),
        "config.json": json.dumps(about, separators=(",", ":")).encode(),
        **({name: source} if source else {}),
    }
    for name, data in files.items():
        if not tree.has(folder, name):
            tree.put(folder, name, (data,), mark=name)


def write_program_order(tree: DumpTree, rank: int, orders: Mapping[int, Sequence[str]]) -> None:
    """Write the operators of each graph with their full scope names, in the order in which the rank
    ran them.
    """
    for graph, names in sorted(orders.items()):
        lines = (ORDER_HEADER, *map(sanitize_line, names))
        name = f"ms_execution_order_graph_{graph}.csv"
        data = "".join(f"{line}\n" for line in lines).encode()
        tree.put(_order_folder(rank), name, (data,), mark=name)


def append_iteration(
    tree: DumpTree, rank: int, graphs: Iterable[int], iteration: int, *, repeated: bool
) -> None:
    """Append the iteration to each graph's list; with `repeated`, only where it is not the last
    entry.
    """
    folder = _order_folder(rank)
    for graph in sorted(graphs):
        name = f"ms_global_execution_order_graph_{graph}.csv"
        last = tree.lines(folder, name)[-1:] if repeated else []
        if last != [str(iteration)]:
            tree.append_lines(folder, name, (str(iteration),))


def write_graph(tree: DumpTree, rank: int, files: Mapping[str, bytes]) -> None:
    """Write the files of a graph by name; they replace the files of an earlier description."""
    folder = f"{layout.make_rank_folder(rank)}/{layout.GRAPH_FOLDER}"
    for name, data in files.items():
        tree.put(folder, name, (data,), mark=name)


def write_arguments(
    tree: DumpTree, arguments: KernelArguments, *, folder_of: Callable[[int], str], mark: str
) -> list[str]:
    """Write the arguments of operators; return the operators whose file names are too long.

    `folder_of` returns the folder of a graph's tensors. Source: MindSpore 2.3 Dump guide,
    `save_kernel_args`; these file names are never shortened.
    """
    too_long: list[str] = []
    for each in arguments.operators:
        name = f"{sanitize_name(each.op_type) or '_'}.{sanitize_name(each.op_name) or '_'}.json"
        if len(name.encode()) > MAX_NAME_BYTES:
            too_long.append(each.op_name)
            continue
        text = json.dumps(dict(each.values), indent=4, sort_keys=True, ensure_ascii=False)
        tree.put(folder_of(each.graph), name, (text.encode(),), mark=mark)
    return too_long


def write_fingerprints(
    tree: DumpTree,
    rank_folder: str,
    status: IterationStatus,
    fingerprints: Sequence[tuple[int, bytes]],
) -> FingerprintSeal:
    """Write the fingerprints of an iteration by the positions of their records; return the seal for
    the manifest.
    """
    name = make_fingerprint_name(make_manifest_name(status.iteration, status.session_id))
    data = format_fingerprint_file(fingerprints)
    tree.put(f"{rank_folder}/{layout.FINGERPRINT_FOLDER}", name, (data,), mark=name)
    return FingerprintSeal(len(data), xxhash.xxh3_128_hexdigest(data))


def write_manifest(tree: DumpTree, rank_folder: str, manifest: Manifest) -> None:
    """Write the manifest of an iteration, which marks the iteration as complete."""
    status = manifest.status
    name = make_manifest_name(status.iteration, status.session_id)
    tree.put(f"{rank_folder}/{layout.MANIFEST_FOLDER}", name, (manifest.to_json(),), mark=name)


def update_manifest(
    tree: DumpTree, rank_folder: str, iteration: int, session_id: str, sizes: Mapping[str, int]
) -> Manifest | None:
    """Write the manifest of an iteration with new sizes of files, by path; return it.

    None if there is no manifest, because the iteration has not ended. CorruptedError when the
    manifest cannot be read.
    """
    name = make_manifest_name(iteration, session_id)
    try:
        before = Manifest.from_json(tree.read(f"{rank_folder}/{layout.MANIFEST_FOLDER}", name))
    except FileNotFoundError:
        return None
    records = tuple(
        record._replace(bytes_stored=sizes.get(record.path, record.bytes_stored))
        for record in before.records
    )
    stored = sum(record.bytes_stored for record in records)
    manifest = replace(before, records=records, status=replace(before.status, bytes_stored=stored))
    write_manifest(tree, rank_folder, manifest)
    return manifest


def create_session_file(tree: DumpTree, session: TreeSession) -> None:
    """Write the file of a session that has begun, unless the file exists."""
    if not tree.has(SESSIONS_FOLDER, make_session_file_name(session.status)):
        _put_session(tree, session)


def replace_session_file(tree: DumpTree, session: TreeSession) -> None:
    """Replace the file of a session if its state or a balance has changed.

    FileNotFoundError when the file does not exist, because the tree may have been removed.
    """
    before = _read_session(tree, make_session_file_name(session.status))
    now = session if before is None else update_session(before, session)
    if now is not before:
        _put_session(tree, now)


def read_sessions(tree: DumpTree, rank: int) -> list[TreeSession]:
    """Return the readable session files of a rank, in any order."""
    prefix = make_session_prefix(rank)
    names = [name for name in tree.listing(SESSIONS_FOLDER) if name.startswith(prefix)]
    return [each for name in names if (each := _read_session(tree, name)) is not None]


def _read_session(tree: DumpTree, name: str) -> TreeSession | None:
    try:
        return parse_tree_session(tree.read(SESSIONS_FOLDER, name))
    except CorruptedError:
        return None


def _put_session(tree: DumpTree, session: TreeSession) -> None:
    name = make_session_file_name(session.status)
    tree.put(SESSIONS_FOLDER, name, (format_tree_session(session).encode(),), mark=name)


def _order_folder(rank: int) -> str:
    return f"{layout.make_rank_folder(rank)}/{layout.EXECUTION_ORDER_FOLDER}"


_CLOSING_BYTES = b"\n}"
# Matches the end of an entry: of one whose stack has lines, or of one without lines.
_ENTRY_END = re.compile(rb'\n    (?:\]|"[^\n]*": \[\])(?=,?(?:\n|\Z))')
_LOOK_BACK_BYTES = 1 << 16


class CallStackFile:
    """The stack file of one session's rank; not for use from several threads.

    New entries overwrite the closing brace. The file is read only for its keys: once by each
    process, and for entries that may have been added before a crash.
    """

    def __init__(self, tree: DumpTree, place: FilePlace, framework: str) -> None:
        self._tree, self._place, self._framework = tree, place, framework
        self._modules: set[str] | None = None
        """Keys of modules in the file, because modules are sent again with every call."""

    def add(self, stacks: CallStacks, *, again: bool) -> None:
        """Add calls that are not in the file; `again` says that each may have been added before.

        After an OSError the file contains none of them.
        """
        keys = [make_stack_key(self._framework, name) for name in stacks.calls]
        known = self._find_known(set(keys), again=again)
        entries: list[str] = []
        for key, place in zip(keys, stacks.stacks, strict=True):
            if key not in known:
                known.add(key)
                entries.append(format_stack_entry(key, stacks.texts[place]))
        if entries:
            data = ",\n".join(entries).encode()
            self._tree.change(
                self._place.folder, self._place.name, lambda file: self._extend(file, data)
            )
        self._modules = {key for key in known if is_module_key(key)}

    def _find_known(self, keys: set[str], *, again: bool) -> set[str]:
        """Return the keys of modules in the file and, with `again`, those of `keys` that are in the
        file.
        """
        if self._modules is not None and not again:
            return set(self._modules)
        folder, name = self._place.folder, self._place.name
        if not self._tree.has(folder, name):
            return set()
        # A crash may have left only the first line of an entry; such an entry does not count.
        self._tree.change(folder, name, _repair_end)
        found = map(read_stack_key, self._tree.each_line(folder, name))
        return {key for key in found if is_module_key(key) or (again and key in keys)}

    def _extend(self, file: int, data: bytes) -> None:
        end = _find_entries_end(file)
        whole = b"".join((b",\n" if end else b"{\n", data, _CLOSING_BYTES))
        try:
            _write_at(file, whole, end)
        except BaseException:
            with contextlib.suppress(OSError):
                _repair_end(file)
            raise


def _repair_end(file: int) -> None:
    end = _find_entries_end(file)
    _write_at(file, _CLOSING_BYTES if end else b"", end)


def _write_at(file: int, data: bytes, start: int) -> None:
    left, at = memoryview(data), start
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count
    os.ftruncate(file, at)


def _find_entries_end(file: int) -> int:
    """Return the position after the last complete entry; 0 when there is none."""
    size = os.fstat(file).st_size
    tail = os.pread(file, len(_CLOSING_BYTES) + 6, max(0, size - len(_CLOSING_BYTES) - 6))
    if tail.endswith(b"\n    ]" + _CLOSING_BYTES):
        return size - len(_CLOSING_BYTES)
    reach = _LOOK_BACK_BYTES
    while True:
        start = max(0, size - reach)
        ends = [found.end() for found in _ENTRY_END.finditer(os.pread(file, size - start, start))]
        if ends or not start:
            return start + ends[-1] if ends else 0
        reach *= 2
