"""`DumpConfig` of TF Adapter, accepted as the configuration of a session.

    session = rankdump.Session(rankdump.tf.DumpConfig(enable_dump=True, dump_path="/data/dump"))

TensorFlow need not be installed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rankdump._config.config_file import make_dump_config_plan
from rankdump._core.plan import DumpPlan

__all__ = ["DumpConfig"]


@dataclass(frozen=True, slots=True)
class DumpConfig:
    """Settings of a dump. As in TF Adapter, values are checked only when a session is created.

    >>> DumpConfig().plan().enabled
    False
    """

    enable_dump: bool = False
    """Whether the tensors of operators are dumped."""
    dump_path: str | None = None
    """Path of an existing folder; required if dumping is enabled."""
    dump_step: str | None = None
    """Iterations to dump, such as `0|5|10|50-100`; None for all."""
    dump_mode: str = "output"
    """Side of operators to dump: `input`, `output` or `all`."""
    enable_dump_debug: bool = False
    """Whether only operators in which an overflow occurred are dumped."""
    dump_debug_mode: str = "all"
    """Kind of overflow: `aicore_overflow`, `atomic_overflow` or `all`; rankdump does not
    distinguish them.
    """
    dump_data: str = "tensor"
    """Data to keep: `tensor` for elements, `stats` for statistics."""
    dump_layer: str | None = None
    """Names of operators to dump, separated by spaces; None for all."""

    def plan(self) -> DumpPlan:
        """Return the dump plan; ConfigError for a value that is not allowed."""
        fields = dataclasses.fields(self)
        return make_dump_config_plan({field.name: getattr(self, field.name) for field in fields})
