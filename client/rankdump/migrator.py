"""Dumps and compares API calls with the interface of troubleshooter's `migrator`.

    from rankdump import migrator

    migrator.api_dump_init(net, output_path="dump", retain_backward=True)
    migrator.api_dump_start()
    train(net)
    migrator.api_dump_stop()

Calls are counted from `api_dump_init` on; every rank of a job writes a folder of its own. Wrong
arguments raise an error; every other failure is logged, and training continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankdump._compat.api_comparison import api_dump_compare
from rankdump._compat.api_dump import ApiDumpController
from rankdump._compat.dump_request import (
    ApiDumpSetting,
    check_path,
    check_setting,
    make_dump_request,
)

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
    """Count the API calls of a model's program from now on, and turn off dropout.

    `retain_backward` also dumps the gradients of results; `compare_statedict` writes the model's
    state immediately. `codec` compresses the files. `release` selects the format of the info file:
    that of troubleshooter `1.0.17` or `1.0.18`. TypeError or ValueError for wrong arguments.
    """
    root = str(check_path("output_path", output_path).absolute())
    setting = ApiDumpSetting(root, retain_backward, compare_statedict, codec, release)
    _process.init(net, check_setting(setting))


def api_dump_start(
    mode: str = "all",
    scope: Sequence[str] | None = None,
    dump_type: str = "all",
    filter_data: bool = True,
    filter_stack: bool = True,
    overflow_check: bool = False,
    statistic_category: Sequence[str] | None = None,
) -> None:
    """Dump from now on.

    `mode` is `all`, `list` (`scope` has names such as `NN_Conv2d_0`), `range` (the first and the
    last name) or `api_list` (parts of names). `dump_type` is `all`, `statistics`, `npy` or `stack`.
    `filter_data` omits everything but floating-point tensors with at least one dimension,
    `filter_stack` omits stack frames of libraries. `overflow_check` changes nothing but a line in
    the log: calls without an overflow are dumped, too. `statistic_category` selects the statistics
    of release 1.0.18: `max`, `min`, `avg`, `l2norm`, `md5`.

    ValueError or TypeError for wrong arguments, RuntimeError before `api_dump_init`.
    """
    request = make_dump_request(
        mode,
        scope,
        dump_type,
        filter_data=filter_data,
        filter_stack=filter_stack,
        overflow_check=overflow_check,
        statistic_category=statistic_category,
    )
    _process.start(request)


def api_dump_stop() -> None:
    """Stop dumping; when this returns, all data that was dumped is in its folder.

    RuntimeError before `api_dump_init`.
    """
    _process.stop()


def step(number: int | None = None) -> None:
    """Begin a step, by default the next one; from now on steps are no longer detected."""
    _process.step(number)
