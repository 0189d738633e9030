"""Requests of `api_dump_init` and `api_dump_start`: checked parameters, their plan, and the calls
that `mode` and `scope` select. Pure; scopes may be used from any thread.

A wrong parameter raises a ValueError or a TypeError, as in troubleshooter 1.0.17. A scope is
evaluated once for each forward call, in the order of the calls; a backward call is selected
together with its forward call. Names are those of `ApiCall.stem`, such as `NN_Conv2d_0`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rankdump._codec.file_codec import CODECS
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings
from rankdump._layout.api_tree import ApiCall

DUMP_MODES = ("all", "list", "range", "api_list")
DUMP_TYPES = ("all", "statistics", "npy", "stack")
STATISTIC_CATEGORIES = ("max", "min", "avg", "l2norm", "md5")
API_DUMP_DIALECT = "api_dump"
_STATISTICS_BY_RELEASE = {"1.0.17": ("max", "min", "avg"), "1.0.18": ("max", "min", "l2norm")}
"""Statistics that each release computes by default."""
TOOL_RELEASES = tuple(_STATISTICS_BY_RELEASE)
_NUMBERED_NAME = re.compile(r".+_[0-9]+")
_FILE_MODE, _FOLDER_MODE = 0o400, 0o700


@dataclass(frozen=True, slots=True)
class ApiDumpSetting:
    """Checked parameters of `api_dump_init`."""

    output_path: str
    """Absolute path of the output folder."""
    retain_backward: bool = False
    compare_statedict: bool = False
    codec: str = "none"
    release: str = TOOL_RELEASES[0]


@dataclass(frozen=True, slots=True)
class ApiDumpRequest:
    """Checked parameters of `api_dump_start`."""

    mode: str = "all"
    scope: tuple[str, ...] = ()
    dump_type: str = "all"
    filter_data: bool = True
    filter_stack: bool = True
    overflow_check: bool = False
    """Asked for, and not done: all calls are dumped."""
    statistic_category: tuple[str, ...] = ()
    """Statistics to compute; empty for the default ones of the release."""

    @property
    def keeps_elements(self) -> bool:
        """Whether tensors are written to files."""
        return self.dump_type in ("all", "npy")


def check_path(name: str, value: object) -> Path:
    """Return the path that a parameter gives; TypeError when it is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: {value!r} is not allowed; allowed: a path")
    return Path(cast("str | os.PathLike[str]", value))


def check_setting(setting: ApiDumpSetting) -> ApiDumpSetting:
    """Return the setting if it is valid; ValueError or TypeError for a value that is
    not allowed.
    """
    _check_bool("retain_backward", setting.retain_backward)
    _check_bool("compare_statedict", setting.compare_statedict)
    _check_choice("codec", setting.codec, tuple(CODECS))
    _check_choice("release", setting.release, TOOL_RELEASES)
    return setting


def make_dump_request(
    mode: object,
    scope: object,
    dump_type: object,
    *,
    filter_data: object,
    filter_stack: object,
    overflow_check: object = False,
    statistic_category: object,
) -> ApiDumpRequest:
    """Return a checked request; ValueError or TypeError for a value that is not allowed."""
    return ApiDumpRequest(
        _check_choice("mode", mode, DUMP_MODES),
        _check_scope(str(mode), scope),
        _check_choice("dump_type", dump_type, DUMP_TYPES),
        _check_bool("filter_data", filter_data),
        _check_bool("filter_stack", filter_stack),
        _check_bool("overflow_check", overflow_check),
        _check_categories(statistic_category),
    )


def make_dump_plan(setting: ApiDumpSetting, request: ApiDumpRequest, framework: str) -> DumpPlan:
    """Return the plan of a session; ValueError for statistics that the release does not write."""
    if request.statistic_category and setting.release == TOOL_RELEASES[0]:
        raise ValueError(
            "api_dump_start: statistic_category needs "
            f"api_dump_init(release={TOOL_RELEASES[1]!r}): "
            f"the info file of {setting.release} has max, min and mean"
        )
    has_statistics = request.dump_type in ("all", "statistics")
    statistics = request.statistic_category or _STATISTICS_BY_RELEASE[setting.release]
    layout = f"api-{framework}"
    return DumpPlan(
        OutputSettings(
            setting.output_path,
            layout=layout if setting.release == TOOL_RELEASES[0] else f"{layout}-{setting.release}",
            codec=setting.codec,
            file_mode=_FILE_MODE,
            folder_mode=_FOLDER_MODE,
        ),
        content=ContentSettings(
            saved="full" if request.keeps_elements else "statistic",
            statistics=statistics if has_statistics else (),
        ),
        dialect=API_DUMP_DIALECT,
    )


def _check_scope(mode: str, scope: object) -> tuple[str, ...]:
    if mode == "all":
        if scope:
            raise ValueError(
                f"api_dump_start: scope {scope!r} is not allowed with mode 'all'; allowed: None"
            )
        return ()
    names = cast("Sequence[object]", scope) if isinstance(scope, (list, tuple)) else (None,)
    texts = tuple(name for name in names if isinstance(name, str) and name)
    if len(texts) != len(names):
        raise TypeError(f"api_dump_start: scope {scope!r} is not allowed; allowed: a list of names")
    if mode == "range" and len(texts) != 2:
        raise ValueError(f"api_dump_start: scope {scope!r} is not allowed; allowed: [start, end]")
    if not texts:
        raise ValueError(
            f"api_dump_start: scope [] is not allowed with mode {mode!r}; allowed: a list of names"
        )
    wrong = [name for name in texts if not _NUMBERED_NAME.fullmatch(name)]
    if wrong and mode != "api_list":
        raise ValueError(
            f"api_dump_start: scope: {wrong[0]!r} is not allowed with mode {mode!r}; "
            f"allowed: names of the form Type_Name_ID, such as NN_Conv2d_0"
        )
    return texts


def _check_categories(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(
            f"api_dump_start: statistic_category {given!r} is not allowed; allowed: a list of "
            f"{', '.join(STATISTIC_CATEGORIES)}"
        )
    asked = cast("Sequence[object]", given)
    return tuple(
        dict.fromkeys(
            _check_choice("statistic_category", one, STATISTIC_CATEGORIES) for one in asked
        )
    )


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {value!r} is not allowed; allowed: {', '.join(allowed)}")
    return value


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is not allowed; allowed: True, False")
    return value


class ApiCallScope:
    """Selection of the calls of one `api_dump_start`; this base class, mode `all`, selects every
    call.
    """

    def is_selected(self, call: ApiCall) -> bool:
        """Return whether a forward call that begins now is dumped."""
        return True

    def list_missing(self) -> tuple[str, ...]:
        """Return a sentence for each requested call that has not been made so far."""
        return ()


class ListedCallScope(ApiCallScope):
    """Mode `list`: selects calls by their exact names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._waiting = dict.fromkeys(names)

    def is_selected(self, call: ApiCall) -> bool:
        """Return whether the name of a call is in the list."""
        stem = call.stem
        if stem not in self._names:
            return False
        self._waiting.pop(stem, None)
        return True

    def list_missing(self) -> tuple[str, ...]:
        """Return a sentence for each name that no call had."""
        return tuple(f"no call was named {name}" for name in self._waiting)


class CallRangeScope(ApiCallScope):
    """Mode `range`: selects all calls from the first to the last one, both included, once."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last = first, last
        self._begun = self._over = self._early = False

    def is_selected(self, call: ApiCall) -> bool:
        """Return whether a call is in the range."""
        if self._over:
            return False
        stem = call.stem
        if not self._begun:
            self._begun = stem == self._first
            self._early = self._early or (stem == self._last and not self._begun)
        if self._begun:
            self._over = stem == self._last
        return self._begun

    def list_missing(self) -> tuple[str, ...]:
        """Return a sentence for each end of the range that was not called, or called in the wrong
        order.
        """
        found: list[str] = []
        if not self._begun:
            found.append(f"the first call of the range, {self._first}, was not made")
        if self._early:
            found.append(
                f"the last call of the range, {self._last}, was made before the first, "
                f"{self._first}"
            )
        elif not self._over:
            found.append(f"the last call of the range, {self._last}, was not made")
        return tuple(found)


class NamePartScope(ApiCallScope):
    """Mode `api_list`: selects calls whose names contain one of the texts, ignoring case."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text.lower() for text in texts)
        self._waiting = {text.lower(): text for text in texts}

    def is_selected(self, call: ApiCall) -> bool:
        """Return whether the name of a call contains any of the texts."""
        name = call.stem.lower()
        matched = [text for text in self._texts if text in name]
        for text in matched:
            self._waiting.pop(text, None)
        return bool(matched)

    def list_missing(self) -> tuple[str, ...]:
        """Return a sentence for each text that no name contained."""
        return tuple(f"no name of a call contains {text!r}" for text in self._waiting.values())


def make_call_scope(mode: str, scope: Sequence[str]) -> ApiCallScope:
    """Return the selection for a checked mode and scope."""
    if mode == "list":
        return ListedCallScope(scope)
    if mode == "range":
        return CallRangeScope(*scope)
    return NamePartScope(scope) if mode == "api_list" else ApiCallScope()
