"""`support_device`: the local device ids that dump. Pure.

Facts: mindspore-dump.md 1.6. Each element is read as 32 bits without a sign.
"""

from __future__ import annotations

import math

from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import ConfigError

ALLOWED = "an array of device ids"
_KEY = "support_device"


def parse_devices(common: Section) -> tuple[int, ...]:
    """Return the device ids once each; ConfigError names the element at fault by its index."""
    items = common.items(_KEY, ALLOWED)
    if not items:
        common.note(_KEY, "names no device, so no rank dumps")
    devices: dict[int, None] = {}
    for index, item in enumerate(items):
        device = _device(item)
        if device is None:
            raise ConfigError(common.file, f"{common.name}.{_KEY}[{index}]", item, "a device id")
        if isinstance(item, float) or device != item:
            common.note(_KEY, f"is no device id and is read as {device}", item)
        if device in devices:
            common.note(_KEY, "stands there twice and counts once", device)
        devices[device] = None
    return tuple(devices)


def _device(item: object) -> int | None:
    """Return what MindSpore makes of a number: it cuts fractions and lets negatives wrap."""
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return None
    if isinstance(item, float) and not math.isfinite(item):
        return None
    return int(item) & 0xFFFF_FFFF
