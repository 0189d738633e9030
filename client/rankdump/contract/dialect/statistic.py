"""Which figures a plan asks for, and where they are computed. Pure.

Facts: mindspore-dump.md 1.10 and the rules of `stat_calc_mode` in 1.8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from rankdump.contract.dialect.common import Common
from rankdump.contract.dialect.debug_mode import trigger_of
from rankdump.contract.dialect.e2e import EndToEnd
from rankdump.contract.dialect.keys import E2E
from rankdump.contract.dialect.section import Section
from rankdump.contract.layout.profile import Profile
from rankdump.contract.plan import Content
from rankdump.contract.statistics import DEFAULT_ITEMS, DEVICE_ITEMS, ITEMS

_KEY = "statistic_category"
_ALLOWED = "an array of " + ", ".join(f'"{item}"' for item in ITEMS)


def parse_content(section: Section, common: Common, e2e: EndToEnd, profile: Profile) -> Content:
    """Return what is kept of a tensor; `section` is the one that `common` came from."""
    reason = _host_only(common, e2e, profile)
    if e2e.on_device and reason:
        section.notes.add(f"{E2E}.stat_calc_mode", "device", f'becomes "host": {reason}')
    on_device = e2e.on_device and not reason
    content = Content(
        saved=common.saved,
        on_device=on_device,
        precision=e2e.precision,
        sample_elements=e2e.sample_elements,
        kernel_arguments=e2e.kernel_arguments,
    )
    if not content.tabulated:
        return content
    items = _items(section)
    if profile.fixed_table and _KEY in section.values:
        section.note(_KEY, f"is not used: the tables of profile {profile.name} are fixed")
    return replace(content, statistics=_of_device(section, items) if on_device else items)


def _host_only(common: Common, e2e: EndToEnd, profile: Profile) -> str:
    """Return why a device computes no figures; empty when it may."""
    if common.saved != "statistic":
        return f'saved_data is "{common.saved}", so the elements come to the host'
    if not e2e.enabled:
        return "synchronous dump is not enabled"
    if trigger_of(common.debug_mode) == "overflow":
        return "op_debug_mode looks at the elements first"
    if profile.fixed_table:
        return f"the tables of profile {profile.name} have columns that a device cannot compute"
    return ""


def _items(section: Section) -> tuple[str, ...]:
    if _KEY not in section.values:
        return DEFAULT_ITEMS
    items = section.items(_KEY, _ALLOWED)
    if not items:
        section.note(_KEY, "names no figure, so the tables have none")
    if not all(isinstance(item, str) and item in ITEMS for item in items):
        raise section.refusal(_KEY, _ALLOWED)
    named = tuple(cast("list[str]", items))
    for item in dict.fromkeys(named):
        if named.count(item) > 1:
            section.note(_KEY, f"stands there {named.count(item)} times, in as many columns", item)
    return named


def _of_device(section: Section, items: tuple[str, ...]) -> tuple[str, ...]:
    left_out = [item for item in dict.fromkeys(items) if item not in DEVICE_ITEMS]
    if left_out:
        listed = ", ".join(left_out)
        section.note(_KEY, f"loses {listed}: a device computes only {', '.join(DEVICE_ITEMS)}")
    return tuple(item for item in items if item in DEVICE_ITEMS)
