"""What `api_dump_init` and `api_dump_start` were asked for, checked, and the plan it means. Pure.

What is wrong with a parameter is a ValueError or a TypeError, as it is in troubleshooter
(api-dump.md A.5): a mistake of the script at the line that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from rankdump.codec import CODECS
from rankdump.contract.plan import Content, DumpPlan, Output

MODES = ("all", "list", "range", "api_list")
DUMP_TYPES = ("all", "statistics", "npy", "stack")
CATEGORIES = ("max", "min", "avg", "l2norm", "md5")
DIALECT = "api_dump"
_FIGURES = {"1.0.17": ("max", "min", "avg"), "1.0.18": ("max", "min", "l2norm")}
"""What each release computes unless it is told."""
RELEASES = tuple(_FIGURES)
_NUMBERED = re.compile(r".+_[0-9]+")
_FILE_MODE, _FOLDER_MODE = 0o400, 0o700


@dataclass(frozen=True, slots=True)
class Setting:
    """What `api_dump_init` was asked for."""

    output_path: str
    """Absolute."""
    retain_backward: bool = False
    compare_statedict: bool = False
    codec: str = "none"
    release: str = RELEASES[0]


@dataclass(frozen=True, slots=True)
class Request:
    """What `api_dump_start` was asked for."""

    mode: str = "all"
    scope: tuple[str, ...] = ()
    dump_type: str = "all"
    filter_data: bool = True
    filter_stack: bool = True
    statistic_category: tuple[str, ...] = ()
    """Figures; empty for those of the release."""

    @property
    def keeps_elements(self) -> bool:
        """Whether every tensor has a file."""
        return self.dump_type in ("all", "npy")


def checked_setting(setting: Setting) -> Setting:
    """Return a setting in which everything is allowed."""
    _is_bool("retain_backward", setting.retain_backward)
    _is_bool("compare_statedict", setting.compare_statedict)
    _is_one_of("codec", setting.codec, tuple(CODECS))
    _is_one_of("release", setting.release, RELEASES)
    return setting


def request_of(
    mode: object,
    scope: object,
    dump_type: object,
    *,
    filter_data: object,
    filter_stack: object,
    statistic_category: object,
) -> Request:
    """Return a request in which everything is allowed."""
    return Request(
        _is_one_of("mode", mode, MODES),
        _scope(str(mode), scope),
        _is_one_of("dump_type", dump_type, DUMP_TYPES),
        _is_bool("filter_data", filter_data),
        _is_bool("filter_stack", filter_stack),
        _categories(statistic_category),
    )


def plan_of(setting: Setting, request: Request, framework: str) -> DumpPlan:
    """Return what a session is to do; ValueError for figures that the release does not write."""
    if request.statistic_category and setting.release == RELEASES[0]:
        raise ValueError(
            f"api_dump_start: statistic_category needs api_dump_init(release={RELEASES[1]!r}): "
            f"the info file of {setting.release} has max, min and mean"
        )
    figured = request.dump_type in ("all", "statistics")
    figures = request.statistic_category or _FIGURES[setting.release]
    layout = f"api-{framework}"
    return DumpPlan(
        Output(
            setting.output_path,
            layout=layout if setting.release == RELEASES[0] else f"{layout}-{setting.release}",
            codec=setting.codec,
            file_mode=_FILE_MODE,
            folder_mode=_FOLDER_MODE,
        ),
        content=Content(
            saved="full" if request.keeps_elements else "statistic",
            statistics=figures if figured else (),
        ),
        dialect=DIALECT,
    )


def _scope(mode: str, scope: object) -> tuple[str, ...]:
    if mode == "all":
        if scope:
            raise ValueError(f"api_dump_start: scope {scope!r} is not allowed with mode 'all'")
        return ()
    if not isinstance(scope, (list, tuple)):
        raise TypeError(f"api_dump_start: scope {scope!r} is not allowed; a list of names is")
    names = tuple(cast("Sequence[object]", scope))
    texts = tuple(name for name in names if isinstance(name, str) and name)
    if len(texts) != len(names):
        raise TypeError(f"api_dump_start: scope {scope!r} is not allowed; a list of names is")
    if mode == "range" and len(texts) != 2:
        raise ValueError(f"api_dump_start: scope {scope!r} is not allowed; [start, end] is")
    if not texts:
        raise ValueError(f"api_dump_start: scope [] is not allowed with mode {mode!r}")
    wrong = [] if mode == "api_list" else [name for name in texts if not _NUMBERED.fullmatch(name)]
    if wrong:
        raise ValueError(
            f"api_dump_start: scope: {wrong[0]!r} is not allowed with mode {mode!r}; "
            f"names as Type_Name_ID are, such as NN_Conv2d_0"
        )
    return texts


def _categories(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(
            f"api_dump_start: statistic_category {given!r} is not allowed; a list of "
            f"{', '.join(CATEGORIES)} is"
        )
    asked = cast("Sequence[object]", given)
    return tuple(dict.fromkeys(_is_one_of("statistic_category", one, CATEGORIES) for one in asked))


def _is_one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {value!r} is not allowed; allowed: {', '.join(allowed)}")
    return value


def _is_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is not allowed; True and False are")
    return value
