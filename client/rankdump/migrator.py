"""Dumps and compares the calls of an API, in the words of troubleshooter's `migrator`.

    from rankdump import migrator

    migrator.api_dump_init(net, output_path="dump", retain_backward=True)
    migrator.api_dump_start()
    train(net)
    migrator.api_dump_stop()

Calls are counted from `api_dump_init` on; every rank of a job writes a folder of its own. What a
script does wrong is raised where it does it, everything else is logged, and training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankdump._compat.api_comparison import api_dump_compare
from rankdump._compat.api_dump import ApiDumpController
from rankdump._compat.dump_request import ApiDumpSetting, check_setting, make_dump_request

__all__ = ["api_dump_compare", "api_dump_init", "api_dump_start", "api_dump_stop", "step"]

_process = ApiDumpController()


def api_dump_init(
    net: Any,
    output_path: str | Path = "./ts_api_dump",
    *,
    retain_backward: bool = False,
    compare_statedict: bool = False,
    codec: str = "none",
    release: str = "1.0.17",
) -> None:
    """Count the calls of a model's program from now on, and let its dropouts drop nothing.

    `retain_backward` also dumps gradients of what calls returned, `compare_statedict` writes the
    model's state now. `codec` packs the files, `release` says whose info file is written: `1.0.17`
    or `1.0.18`. TypeError or ValueError for what is not allowed.
    """
    root = str(Path(output_path).absolute())
    setting = ApiDumpSetting(root, retain_backward, compare_statedict, codec, release)
    _process.init(net, check_setting(setting))


def api_dump_start(
    mode: str = "all",
    scope: Sequence[str] | None = None,
    dump_type: str = "all",
    filter_data: bool = True,
    filter_stack: bool = True,
    *,
    statistic_category: Sequence[str] | None = None,
) -> None:
    """Dump from now on.

    `mode` is `all`, `list` (names as `NN_Conv2d_0` in `scope`), `range` (the first and the last) or
    `api_list` (parts of names); `dump_type` is `all`, `statistics`, `npy` or `stack`. `filter_data`
    leaves out what is no tensor of floating point with a shape, `filter_stack` what is not the
    user's in a stack. `statistic_category` chooses figures of release 1.0.18: `max`, `min`, `avg`,
    `l2norm`, `md5`.

    ValueError or TypeError for what is not allowed, RuntimeError before `api_dump_init`.
    """
    request = make_dump_request(
        mode,
        scope,
        dump_type,
        filter_data=filter_data,
        filter_stack=filter_stack,
        statistic_category=statistic_category,
    )
    _process.start(request)


def api_dump_stop() -> None:
    """Dump nothing until the next start; what was dumped is in its folder when this returns.

    RuntimeError before `api_dump_init`.
    """
    _process.stop()


def step(number: int | None = None) -> None:
    """Begin a step, by default the next one: from now on the script says where steps begin."""
    _process.step(number)
