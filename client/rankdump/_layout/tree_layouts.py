"""Layouts that a plan can select by name: MindSpore's synchronous and asynchronous trees, CANN's
trees, and those of `api_dump`. Pure.

    rank_{rank}/{net}/{graph}/{iteration}                                 MindSpore's
    [{step}/]{YYYYmmddHHMMSS}/{device}/{model}/{model id}/{iteration}/    CANN's, models
    [{step}/]{YYYYmmddHHMMSS}/{device}/                                   CANN's, single operators

A new layout is one subclass of `Layout` and one row in LAYOUTS. In CANN's trees the number of the
device stands for the rank, and a constant is in the folder of the iteration in which it was first
seen (CANN, acl.json; MindSpore 2.3, Dump guide).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from rankdump._core.plan import DumpPlan
from rankdump._core.record import TensorKey, sanitize_name
from rankdump._layout import api_tree, tree_paths
from rankdump._layout.api_tree import ApiFileNames
from rankdump._layout.file_name import UNKNOWN_ID
from rankdump._layout.tree_paths import FilePlace, TreeContext, make_folder_name

_START_TIME_DIGITS = 14
_FOLDER_OWNER = re.compile(r"rank ([0-9]{1,10}) of ")
_TORCH_FILES = ApiFileNames("torch")


class GraphPlace(NamedTuple):
    """A graph of a rank in one iteration, or the constants of the graph."""

    rank: int
    net_name: str
    graph: int
    iteration: int
    constant: bool = False

    @staticmethod
    def of(key: TensorKey) -> GraphPlace:
        """Return the place that a tensor belongs to."""
        return GraphPlace(*key[:4], key.constant)


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """Layout: the form of one kind of tree. `dump_folders.parse_tensor_path` is the inverse of all
    its paths.
    """

    name: str
    """Name of the layout in a plan."""
    has_cann_names: bool = False
    """Whether files have CANN's names."""
    has_time_folder: bool = False
    """Whether a folder is named after the start of the session."""
    api_files: ApiFileNames | None = None
    """Names of the files of an API dump; None for any other tree.

    In an API dump, tensors are named by their place in the call, and statistics are not rounded and
    are in one file for each rank.
    """

    @property
    def shares_timestamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first one."""
        return self.has_cann_names

    @property
    def unknown_id(self) -> int:
        """Number that stands for an unknown task or stream of an operator."""
        return UNKNOWN_ID if self.has_cann_names else 0

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in host memory."""
        return tree_paths.get_host_format(shape) if self.has_cann_names else "DefaultFormat"

    def rank_folder(self, rank: int) -> str:
        """Return the folder of those files of a rank that are not tensors."""
        return tree_paths.make_rank_folder(rank)

    @abstractmethod
    def make_folder(self, context: TreeContext, place: GraphPlace) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""

    @abstractmethod
    def make_readable_key(self, key: TensorKey, context: TreeContext) -> TensorKey:
        """Return the key in the form in which it is read back from a path."""

    def place_tensor(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file; `suffix` is the codec's, `.zst` or empty."""
        return self._place(key, context, tree_paths.make_tensor_file_name(key), suffix)

    def place_operator(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of the file that holds a tensor's whole operator; the name ends in
        `suffix`.

        Side, slot and format of the key are ignored.
        """
        return self._place(key, context, tree_paths.make_operator_file_name(key), suffix)

    def place_member(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        return self._place(key, context, tree_paths.make_member_file_name(key), suffix)

    def _place(self, key: TensorKey, context: TreeContext, stem: str, suffix: str) -> FilePlace:
        folder = self.make_folder(context, GraphPlace.of(key))
        return tree_paths.shorten_cann_name(folder, stem + suffix, context.root)


@dataclass(frozen=True, slots=True)
class CannLayout(Layout):
    """One of CANN's trees."""

    has_cann_names: bool = True
    has_time_folder: bool = True
    models: bool = False
    """Whether there are folders of models and iterations below that of the device."""
    steps: bool = False
    """Whether the outermost folder is that of the iteration."""

    def make_folder(self, context: TreeContext, place: GraphPlace) -> str:
        """Return the folder of a graph's tensors of one iteration."""
        folder = f"{_format_start_time(context.started)}/{context.device}"
        if self.models:
            name = make_folder_name(place.net_name)
            folder = f"{folder}/{name}/{place.graph}/{place.iteration}"
        return f"{place.iteration}/{folder}" if self.steps else folder

    def make_readable_key(self, key: TensorKey, context: TreeContext) -> TensorKey:
        """Return the key in the form in which it is read back from a path."""
        read = tree_paths.make_cann_readable_key(key)._replace(rank=context.device, constant=False)
        if self.models:
            return read._replace(net_name=make_folder_name(key.net_name))
        return read._replace(net_name="", graph=0, iteration=key.iteration if self.steps else 0)


def _format_start_time(started: str) -> str:
    """Return the start time of a session as the digits of a folder name, for any text."""
    return re.sub(r"[^0-9]", "", started)[:_START_TIME_DIGITS].rjust(_START_TIME_DIGITS, "0")


def format_folder_owner(rank: int, job_id: str) -> str:
    """Return the text that an agent writes for a folder of CANN's trees, named by time and device,
    that it uses.
    """
    return f"rank {rank} of {job_id!r}"


def parse_folder_owner(text: str) -> int | None:
    """Return the rank in the text that an agent wrote for a folder; None for any other text."""
    found = _FOLDER_OWNER.match(text)
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class MindSporeLayout(Layout):
    """`rank_{rank}/{net}/{graph}/{iteration}`, with CANN's names in asynchronous dumps."""

    def make_folder(self, context: TreeContext, place: GraphPlace) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""
        return tree_paths.make_iteration_folder(*place[:4], constant=place.constant)

    def place_tensor(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file; `suffix` is the codec's."""
        if self.has_cann_names:
            return self._place(key, context, tree_paths.make_tensor_file_name(key), suffix)
        return tree_paths.make_mindspore_place(key, suffix, context.profile)

    def make_readable_key(self, key: TensorKey, context: TreeContext) -> TensorKey:
        """Return the key in the form in which it is read back from a path."""
        if not self.has_cann_names:
            return tree_paths.make_mindspore_readable_key(key, context.profile)
        return tree_paths.make_cann_readable_key(key)._replace(
            net_name=make_folder_name(key.net_name), iteration=0 if key.constant else key.iteration
        )


@dataclass(frozen=True, slots=True)
class ApiLayout(Layout):
    """The tree of one framework's API dump, in the form of one release."""

    api_files: ApiFileNames = _TORCH_FILES

    def rank_folder(self, rank: int) -> str:
        """Return the folder of a rank."""
        return api_tree.make_api_rank_folder(rank)

    def make_folder(self, context: TreeContext, place: GraphPlace) -> str:
        """Return the folder of a rank's tensors, of all graphs and iterations."""
        return f"{api_tree.make_api_rank_folder(place.rank)}/{self.api_files.folder}"

    def make_readable_key(self, key: TensorKey, context: TreeContext) -> TensorKey:
        """Return the key in the form in which it is read back from a path."""
        return api_tree.make_api_readable_key(key)

    def place_tensor(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file; `suffix` is the codec's."""
        return self._place(key, context, api_tree.make_api_tensor_name(key), f".npy{suffix}")

    def place_operator(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a file that holds the operator of a tensor."""
        return self._place(key, context, sanitize_name(key.op_name) or "_", suffix)

    def place_member(self, key: TensorKey, context: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        return self._place(key, context, api_tree.make_api_tensor_name(key), suffix)

    def _place(self, key: TensorKey, context: TreeContext, stem: str, suffix: str) -> FilePlace:
        folder = self.make_folder(context, GraphPlace.of(key))
        return tree_paths.shorten_mindspore_name(folder, stem, suffix)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        MindSporeLayout("mindspore-sync"),
        CannLayout("cann", models=True),
        CannLayout("cann-step", models=True, steps=True),
        CannLayout("cann-op"),
        CannLayout("cann-op-step", steps=True),
        MindSporeLayout("mindspore-async", has_cann_names=True),
        ApiLayout("api-torch"),
        ApiLayout("api-mindspore", api_files=ApiFileNames("mindspore")),
        ApiLayout("api-torch-1.0.18", api_files=ApiFileNames("torch", extended=True)),
        ApiLayout("api-mindspore-1.0.18", api_files=ApiFileNames("mindspore", extended=True)),
    )
}
DEFAULT_LAYOUT = LAYOUTS["mindspore-sync"]


def find_contradiction(plan: DumpPlan) -> str:
    """Return which settings of a plan with a known layout contradict each other; empty
    if none do.
    """
    output, content = plan.output, plan.content
    layout, by_operator = LAYOUTS[output.layout], content.tables == "operator"
    if not layout.shares_timestamps and (output.file_format == "bin" or by_operator):
        files = "bin files" if output.file_format == "bin" else "tables of operators"
        return f"layout {output.layout!r} has no {files}"
    if output.file_format == "bin" and content.saved == "full":
        return "file_format 'bin' with saved_data 'full': only npy files can have statistics"
    if by_operator and content.saved == "full":
        return "tables in the place of operators' files cannot be combined with saved_data 'full'"
    if layout.api_files is not None and content.saved == "tensor":
        return f"layout {output.layout!r} does not support saved_data 'tensor': it has statistics"
    return ""
