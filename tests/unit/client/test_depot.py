"""Who gets the room of a slab that is full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from suites.depot_rig import SIZE, Rig

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.exchange import IterationEnd
from rankdump.ship.loading import Loader
from rankdump.values import Placing


def test_records_do_not_starve_what_the_sender_has(tmp_path: Path):
    """While a slab stays full, each bit of room goes to what waited for it, not to newcomers.

    Declarations once piled up in the memory of a rank whose agent was slower than it.
    """
    rig = Rig(tmp_path)
    loader = Loader(rig.depot, lambda _: None)
    tensor = ArraySource(np.zeros(SIZE, "u1"))
    while rig.place(tensor) is Placing.DONE:
        pass
    rig.depot.submit(IterationEnd(0, 1))
    while loader.load(rig.ring):
        rig.depot.submit(IterationEnd(0, 1))
    first, *_ = list(rig.reader.entries())
    rig.reader.release(first.end)
    assert rig.place(tensor) is Placing.FULL
    assert loader.load(rig.ring)
    assert not rig.depot.items.unsent
    rig.reader.release(2 * first.end)
    assert rig.place(tensor) is Placing.DONE
