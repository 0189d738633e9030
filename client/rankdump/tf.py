"""`DumpConfig` as TF Adapter has it, as the plan of a session.

    session = rankdump.Session(rankdump.tf.DumpConfig(enable_dump=True, dump_path="/data/dump"))

Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rankdump._config.config_file import make_dump_config_plan
from rankdump._core.plan import DumpPlan


@dataclass(frozen=True, slots=True)
class DumpConfig:
    """What to dump. As in TF Adapter, nothing is checked before it is used.

    >>> DumpConfig().plan().enabled
    False
    """

    enable_dump: bool = False
    """Dump the tensors of operators."""
    dump_path: str | None = None
    """A folder that exists; needed when anything is enabled."""
    dump_step: str | None = None
    """Iterations, as `0|5|10|50-100`; None for all."""
    dump_mode: str = "output"
    """`input`, `output` or `all`."""
    enable_dump_debug: bool = False
    """Dump operators with an overflow, instead."""
    dump_debug_mode: str = "all"
    """`aicore_overflow`, `atomic_overflow` or `all`: one and the same here."""
    dump_data: str = "tensor"
    """`tensor`, or `stats` for figures about them."""
    dump_layer: str | None = None
    """Names of operators with blanks between them; None for all."""

    def plan(self) -> DumpPlan:
        """Return the plan it means; ConfigError says what is wrong with it."""
        fields = dataclasses.fields(self)
        return make_dump_config_plan({field.name: getattr(self, field.name) for field in fields})
