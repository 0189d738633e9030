"""MindSpore's `data_dump.json` as version 2.3 reads it, synchronous dump of tensors. Pure.

Facts: mindspore-dump.md 1.1-1.10. What this version of rankdump does not do is refused, with a
line that says what works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rankdump.contract.dialect.iterations import parse_iterations
from rankdump.contract.dialect.kernels import parse_kernels
from rankdump.contract.dialect.rankdump_section import parse_section
from rankdump.contract.dialect.root import parse_root
from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import ConfigError
from rankdump.contract.plan import NET_NAME, DumpPlan, Iterations, Operators, Selection

_MODES = "0 (every operator) or 1 (those in kernels); 2 is not done by this version"
_NET_NAMES = "letters, digits, _ and -, at least one"
_ITERATIONS = '"all", or numbers and ranges without blanks as "0|5-8|100-120"'
_SIDES = "0 (inputs and outputs), 1 (inputs) or 2 (outputs)"
_KERNELS = "an array of operator types, full scope names and name-regex(...)"
_DEVICES = "an array of device ids"
_NOT_YET = "is not done by this version"

_MANDATORY = {
    "dump_mode": _MODES,
    "net_name": _NET_NAMES,
    "iteration": _ITERATIONS,
    "input_output": _SIDES,
    "kernels": _KERNELS,
    "support_device": _DEVICES,
}
"""In the order in which MindSpore asks for them, before it looks at any value."""


def parse(body: Mapping[str, object], *, file: str, environ: Mapping[str, str]) -> DumpPlan:
    """Return the plan; the first fault in MindSpore's own order is the one reported."""
    if "e2e_dump_settings" in body:
        _check_e2e(Section.of(body, "e2e_dump_settings", file=file))
    common = Section.of(body, "common_dump_settings", file=file)
    common.require(_MANDATORY)
    dump_mode = common.uint("dump_mode", (0, 1), _MODES)
    root = parse_root(common, environ)
    net_name = _net_name(common)
    iterations = _iterations(common)
    sides = common.uint("input_output", (0, 1, 2), _SIDES)
    operators = _operators(common, dump_mode)
    devices = _devices(common)
    common.choice(
        "saved_data", ("tensor",), default="tensor", note=f'; "statistic" and "full" {_NOT_YET}'
    )
    common.uint("op_debug_mode", (0,), f"0; overflow detection {_NOT_YET}", default=0)
    output, delivery = parse_section(body, file=file, root=root, net_name=net_name)
    return DumpPlan(
        output=output,
        selection=Selection(
            iterations=iterations,
            devices=devices,
            operators=operators,
            inputs=sides != 2,
            outputs=sides != 1,
        ),
        delivery=delivery,
        dialect="mindspore",
    )


def _check_e2e(section: Section) -> None:
    """Refuse what synchronous dump of tensors is not.

    Without the section MindSpore is synchronous on CPU and GPU, and so is rankdump. `trans_flag`
    and `stat_calc_mode` change nothing here: tensors of eager frameworks have no device format.
    """
    section.require({"enable": "true or false", "trans_flag": "true or false"})
    if not section.flag("enable"):
        raise section.refusal("enable", f"true; asynchronous dump {_NOT_YET}")
    section.flag("trans_flag")
    if section.flag("save_kernel_args", False):
        raise section.refusal("save_kernel_args", f"false; saving arguments {_NOT_YET}")
    section.uint("sample_mode", (0,), f"0; sampling {_NOT_YET}", default=0)
    section.choice("stat_calc_mode", ("host", "device"), default="host")


def _net_name(common: Section) -> str:
    net_name = common.text("net_name", _NET_NAMES)
    if not NET_NAME.fullmatch(net_name):
        raise common.refusal("net_name", _NET_NAMES)
    return net_name


def _iterations(common: Section) -> Iterations:
    iterations = parse_iterations(common.text("iteration", _ITERATIONS))
    if iterations is None:
        raise common.refusal("iteration", _ITERATIONS)
    return iterations


def _operators(common: Section, dump_mode: int) -> Operators:
    items = common.items("kernels", _KERNELS)
    if dump_mode == 0:
        return Operators()
    try:
        return parse_kernels(items)
    except ValueError as error:
        allowed = f"a valid regular expression in name-regex(...), not {error}"
        raise common.refusal("kernels", allowed) from None


def _devices(common: Section) -> tuple[int, ...]:
    """Return the device ids once each."""
    devices: dict[int, None] = {}
    for index, item in enumerate(common.items("support_device", _DEVICES)):
        device = _device(item)
        if device is None:
            key = f"{common.name}.support_device[{index}]"
            raise ConfigError(common.file, key, item, "a device id")
        devices[device] = None
    return tuple(devices)


def _device(item: object) -> int | None:
    """Return what MindSpore makes of a number: it cuts fractions and lets negatives wrap."""
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return None
    if isinstance(item, float) and not math.isfinite(item):
        return None
    return int(item) & 0xFFFF_FFFF
