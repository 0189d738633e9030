"""Layouts that a plan can ask for, by name: MindSpore's synchronous and asynchronous trees, CANN's,
and those of `api_dump`. Pure.

    rank_{rank}/{net}/{graph}/{iteration}                                 MindSpore's
    [{step}/]{YYYYmmddHHMMSS}/{device}/{model}/{model id}/{iteration}/    CANN's, models
    [{step}/]{YYYYmmddHHMMSS}/{device}/                                   CANN's, single operators

A new tree is one class of the form of `Layout` and one row in LAYOUTS. In CANN's trees the
device's number stands for the rank, and a constant stands in the folder of the iteration in
which it was first seen (CANN, acl.json; MindSpore 2.3, Dump guide).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from rankdump._core.record import TensorKey
from rankdump._layout import tree_paths
from rankdump._layout import tree_paths as tree
from rankdump._layout.api_tree import ApiFileNames, ApiLayout
from rankdump._layout.file_name import UNKNOWN_ID
from rankdump._layout.tree_paths import FilePlace, TreeContext, make_folder_name

_START_TIME_DIGITS = 14


@dataclass(frozen=True, slots=True)
class CannLayout:
    """One of CANN's trees."""

    name: str
    models: bool = False
    """There are folders of models and iterations below the device's."""
    steps: bool = False
    """A folder of the iteration stands in front."""

    @property
    def api_files(self) -> None:
        """It is no api dump."""
        return None

    @property
    def shares_timestamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        return True

    @property
    def has_time_folder(self) -> bool:
        """Whether a folder is named by when the session began."""
        return True

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        return UNKNOWN_ID

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        return tree_paths.get_host_format(shape)

    def rank_folder(self, rank: int) -> str:
        """Return the folder of what is written of a rank beside its tensors."""
        return tree_paths.make_rank_folder(rank)

    def make_folder(
        self,
        stand: TreeContext,
        *,
        rank: int,
        net_name: str,
        graph: int,
        iteration: int,
        constant: bool,
    ) -> str:
        """Return the folder of a graph's tensors of one iteration."""
        folder = f"{_format_start_time(stand.started)}/{stand.device}"
        if self.models:
            folder = f"{folder}/{make_folder_name(net_name)}/{graph}/{iteration}"
        return f"{iteration}/{folder}" if self.steps else folder

    def place_tensor(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file, with what the codec appends."""
        return self._place(key, stand, tree_paths.make_tensor_file_name(key, suffix))

    def place_operator(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a file that holds the operator of a tensor."""
        return self._place(key, stand, tree_paths.make_operator_file_name(key) + suffix)

    def place_member(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        return self._place(key, stand, tree_paths.make_member_file_name(key) + suffix)

    def make_readable_key(self, key: TensorKey, stand: TreeContext) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        read = tree_paths.make_cann_readable_key(key)._replace(rank=stand.device, constant=False)
        if self.models:
            return read._replace(net_name=make_folder_name(key.net_name))
        return read._replace(net_name="", graph=0, iteration=key.iteration if self.steps else 0)

    def _place(self, key: TensorKey, stand: TreeContext, name: str) -> FilePlace:
        folder = self.make_folder(
            stand,
            rank=key.rank,
            net_name=key.net_name,
            graph=key.graph,
            iteration=key.iteration,
            constant=key.constant,
        )
        return tree_paths.shorten_cann_name(folder, name, stand.root)


def _format_start_time(started: str) -> str:
    """Return the time of a session as a folder has it, whatever somebody claims it to be."""
    return re.sub(r"[^0-9]", "", started)[:_START_TIME_DIGITS].rjust(_START_TIME_DIGITS, "0")


@dataclass(frozen=True, slots=True)
class SynchronousLayout:
    """`rank_{rank}/{net}/{graph}/{iteration}`."""

    name: str = "mindspore-sync"
    asynchronous: bool = False
    """Files are named as CANN names them."""

    @property
    def api_files(self) -> None:
        """It is no api dump."""
        return None

    @property
    def shares_timestamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        return self.asynchronous

    @property
    def has_time_folder(self) -> bool:
        """Whether a folder is named by when the session began."""
        return False

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        return UNKNOWN_ID if self.asynchronous else 0

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        return tree_paths.get_host_format(shape) if self.asynchronous else "DefaultFormat"

    def rank_folder(self, rank: int) -> str:
        """Return the folder of what is written of a rank beside its tensors."""
        return tree.make_rank_folder(rank)

    def make_folder(
        self,
        stand: TreeContext,
        *,
        rank: int,
        net_name: str,
        graph: int,
        iteration: int,
        constant: bool,
    ) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""
        return tree.make_iteration_folder(rank, net_name, graph, iteration, constant=constant)

    def place_tensor(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file, with what the codec appends."""
        if self.asynchronous:
            name = tree_paths.make_tensor_file_name(key, suffix)
            return tree_paths.shorten_cann_name(tree.make_tensor_folder(key), name, stand.root)
        return tree.make_mindspore_place(key, suffix, stand.profile)

    def make_readable_key(self, key: TensorKey, stand: TreeContext) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        if not self.asynchronous:
            return tree.make_mindspore_readable_key(key, stand.profile)
        read = tree_paths.make_cann_readable_key(key)._replace(
            net_name=make_folder_name(key.net_name)
        )
        return read._replace(iteration=0 if key.constant else key.iteration)

    def place_operator(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a file that holds the operator of a tensor."""
        name = tree_paths.make_operator_file_name(key) + suffix
        return tree_paths.shorten_cann_name(tree.make_tensor_folder(key), name, stand.root)

    def place_member(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        name = tree_paths.make_member_file_name(key) + suffix
        return tree_paths.shorten_cann_name(tree.make_tensor_folder(key), name, stand.root)


class Layout(Protocol):
    """One tree. `reading.key_of` is the inverse of all its places."""

    @property
    def name(self) -> str:
        """What a plan calls it."""
        ...

    @property
    def api_files(self) -> ApiFileNames | None:
        """What the files of an api dump are called; None for any other tree.

        Tensors are named by their place in the call there, statistics have all their digits, and
        stand in one file of the rank.
        """
        ...

    @property
    def shares_timestamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        ...

    @property
    def has_time_folder(self) -> bool:
        """Whether a folder is named by when the session began."""
        ...

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        ...

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        ...

    def rank_folder(self, rank: int) -> str:
        """Return the folder of what is written of a rank beside its tensors."""
        ...

    def make_folder(
        self,
        stand: TreeContext,
        *,
        rank: int,
        net_name: str,
        graph: int,
        iteration: int,
        constant: bool,
    ) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""
        ...

    def place_tensor(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a tensor's npy file, with what the codec appends (`.zst` or none)."""
        ...

    def make_readable_key(self, key: TensorKey, stand: TreeContext) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        ...

    def place_operator(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a file that holds the operator of a tensor, ending in `suffix`.

        Side, slot and format of the key do not matter.
        """
        ...

    def place_member(self, key: TensorKey, stand: TreeContext, suffix: str) -> FilePlace:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        ...


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        SynchronousLayout(),
        CannLayout("cann", models=True),
        CannLayout("cann-step", models=True, steps=True),
        CannLayout("cann-op"),
        CannLayout("cann-op-step", steps=True),
        SynchronousLayout("mindspore-async", asynchronous=True),
        ApiLayout("api-torch", ApiFileNames("torch")),
        ApiLayout("api-mindspore", ApiFileNames("mindspore")),
        ApiLayout("api-torch-1.0.18", ApiFileNames("torch", extended=True)),
        ApiLayout("api-mindspore-1.0.18", ApiFileNames("mindspore", extended=True)),
    )
}
DEFAULT_LAYOUT = LAYOUTS["mindspore-sync"]
