"""The trees a plan can ask for, by name, and what each of them has to answer. Pure.

A new tree is one module with a class of this form, and one row in `LAYOUTS`.
"""

from __future__ import annotations

from typing import Protocol

from rankdump.contract.key import TensorKey
from rankdump.contract.layout.api_tree import ApiFiles, ApiLayout
from rankdump.contract.layout.cann import CannLayout
from rankdump.contract.layout.place import Place, Stand
from rankdump.contract.layout.synchronous import SynchronousLayout


class Layout(Protocol):
    """One tree. `reading.key_of` is the inverse of all its places."""

    @property
    def name(self) -> str:
        """What a plan calls it."""
        ...

    @property
    def api(self) -> ApiFiles | None:
        """What the files of an api dump are called; None for any other tree.

        Tensors are named by their place in the call there, figures have all their digits, and
        stand in one file of the rank.
        """
        ...

    @property
    def shares_stamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        ...

    @property
    def timed(self) -> bool:
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

    def folder_of(
        self, stand: Stand, *, rank: int, net_name: str, graph: int, iteration: int, constant: bool
    ) -> str:
        """Return the folder of a graph's tensors of one iteration, or of its constants."""
        ...

    def place_of(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a tensor's npy file, with what the codec appends (`.zst` or none)."""
        ...

    def readable(self, key: TensorKey, stand: Stand) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        ...

    def operator_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a file that holds the operator of a tensor, ending in `suffix`.

        Side, slot and format of the key do not matter.
        """
        ...

    def member_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
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
        ApiLayout("api-torch", ApiFiles("torch")),
        ApiLayout("api-mindspore", ApiFiles("mindspore")),
        ApiLayout("api-torch-1.0.18", ApiFiles("torch", extended=True)),
        ApiLayout("api-mindspore-1.0.18", ApiFiles("mindspore", extended=True)),
    )
}
DEFAULT_LAYOUT = LAYOUTS["mindspore-sync"]
