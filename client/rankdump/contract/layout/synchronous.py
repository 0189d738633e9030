"""The tree with rank folders, as a layout: MindSpore's synchronous one, and its older
asynchronous one, which stands in the same folders (mindspore-dump.md 2.13). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.key import TensorKey
from rankdump.contract.layout import cann_name
from rankdump.contract.layout import mindspore_sync as tree
from rankdump.contract.layout.file_name import UNKNOWN_ID
from rankdump.contract.layout.place import Place, Stand, folder_name


@dataclass(frozen=True, slots=True)
class SynchronousLayout:
    """`rank_{rank}/{net}/{graph}/{iteration}`."""

    name: str = "mindspore-sync"
    asynchronous: bool = False
    """Files are named as CANN names them."""

    @property
    def api(self) -> None:
        """It is no api dump."""
        return None

    @property
    def shares_stamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        return self.asynchronous

    @property
    def timed(self) -> bool:
        """Whether a folder is named by when the session began."""
        return False

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        return UNKNOWN_ID if self.asynchronous else 0

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        return cann_name.host_format(shape) if self.asynchronous else "DefaultFormat"

    def rank_folder(self, rank: int) -> str:
        """Return the folder of what is written of a rank beside its tensors."""
        return tree.rank_folder(rank)

    def folder_of(
        self, stand: Stand, *, rank: int, net_name: str, graph: int, iteration: int, constant: bool
    ) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""
        return tree.folder_of(rank, net_name, graph, iteration, constant=constant)

    def place_of(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a tensor's npy file, with what the codec appends."""
        if self.asynchronous:
            name = cann_name.tensor_name(key, suffix)
            return cann_name.shortened(tree.tensor_folder(key), name, stand.root)
        return tree.place_of(key, suffix, stand.profile)

    def readable(self, key: TensorKey, stand: Stand) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        if not self.asynchronous:
            return tree.readable(key, stand.profile)
        read = cann_name.readable(key)._replace(net_name=folder_name(key.net_name))
        return read._replace(iteration=0 if key.constant else key.iteration)

    def operator_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a file that holds the operator of a tensor."""
        name = cann_name.operator_name(key) + suffix
        return cann_name.shortened(tree.tensor_folder(key), name, stand.root)

    def member_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        name = cann_name.member_name(key) + suffix
        return cann_name.shortened(tree.tensor_folder(key), name, stand.root)
