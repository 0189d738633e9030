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
    """What to dump. As in TF Adapter, values are checked only when a session is created.

    >>> DumpConfig().plan().enabled
    False
    """

    enable_dump: bool = False
    """Dump the tensors of operators."""
    dump_path: str | None = None
    """An existing folder; required when a dump is enabled."""
    dump_step: str | None = None
    """Iterations, such as `0|5|10|50-100`; None for all."""
    dump_mode: str = "output"
    """`input`, `output` or `all`."""
    enable_dump_debug: bool = False
    """Dump only the operators in which an overflow occurred."""
    dump_debug_mode: str = "all"
    """`aicore_overflow`, `atomic_overflow` or `all`; rankdump makes no difference between them."""
    dump_data: str = "tensor"
    """`tensor` for elements, or `stats` for statistics."""
    dump_layer: str | None = None
    """Names of operators, separated by spaces; None for all."""

    def plan(self) -> DumpPlan:
        """Return the dump plan; ConfigError for a value that is not allowed."""
        fields = dataclasses.fields(self)
        return make_dump_config_plan({field.name: getattr(self, field.name) for field in fields})
