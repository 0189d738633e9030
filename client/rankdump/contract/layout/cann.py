"""CANN's trees, with the device's number for a rank. Pure.

    [{step}/]{YYYYmmddHHMMSS}/{device}/{model}/{model id}/{iteration}/    models
    [{step}/]{YYYYmmddHHMMSS}/{device}/                                   single operators, aclnn

Source: ascend-formats.md 4.5, 5 and 7. A constant stands in the folder of the iteration in which
it was first seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankdump.contract.key import TensorKey
from rankdump.contract.layout import cann_name, mindspore_sync
from rankdump.contract.layout.file_name import UNKNOWN_ID
from rankdump.contract.layout.place import Place, Stand, folder_name

_MOMENT_DIGITS = 14


@dataclass(frozen=True, slots=True)
class CannLayout:
    """One of CANN's trees."""

    name: str
    models: bool = False
    """There are folders of models and iterations below the device's."""
    steps: bool = False
    """A folder of the iteration stands in front."""

    @property
    def api(self) -> None:
        """It is no api dump."""
        return None

    @property
    def shares_stamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        return True

    @property
    def timed(self) -> bool:
        """Whether a folder is named by when the session began."""
        return True

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        return UNKNOWN_ID

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        return cann_name.host_format(shape)

    def rank_folder(self, rank: int) -> str:
        """Return the folder of what is written of a rank beside its tensors."""
        return mindspore_sync.rank_folder(rank)

    def folder_of(
        self, stand: Stand, *, rank: int, net_name: str, graph: int, iteration: int, constant: bool
    ) -> str:
        """Return the folder of a graph's tensors of one iteration."""
        folder = f"{_moment(stand.started)}/{stand.device}"
        if self.models:
            folder = f"{folder}/{folder_name(net_name)}/{graph}/{iteration}"
        return f"{iteration}/{folder}" if self.steps else folder

    def place_of(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a tensor's npy file, with what the codec appends."""
        return self._place(key, stand, cann_name.tensor_name(key, suffix))

    def operator_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a file that holds the operator of a tensor."""
        return self._place(key, stand, cann_name.operator_name(key) + suffix)

    def member_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        return self._place(key, stand, cann_name.member_name(key) + suffix)

    def readable(self, key: TensorKey, stand: Stand) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        read = cann_name.readable(key)._replace(rank=stand.device, constant=False)
        if self.models:
            return read._replace(net_name=folder_name(key.net_name))
        return read._replace(net_name="", graph=0, iteration=key.iteration if self.steps else 0)

    def _place(self, key: TensorKey, stand: Stand, name: str) -> Place:
        folder = self.folder_of(
            stand,
            rank=key.rank,
            net_name=key.net_name,
            graph=key.graph,
            iteration=key.iteration,
            constant=key.constant,
        )
        return cann_name.shortened(folder, name, stand.root)


def _moment(started: str) -> str:
    """Return the time of a session as a folder has it, whatever somebody claims it to be."""
    return re.sub(r"[^0-9]", "", started)[:_MOMENT_DIGITS].rjust(_MOMENT_DIGITS, "0")
