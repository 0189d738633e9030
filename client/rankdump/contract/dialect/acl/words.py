"""The words of an `acl.json`: keys that take one of a few, and what they say together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.dialect.acl.types import CONFLICT, NO_WORD, WRONG_TYPE, coded, text, texts
from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import ConfigError

WATCHER = "watcher"
_ON_OFF = ("on", "off")
_WORDS = {
    "dump_mode": ("input", "output", "all"),
    "dump_data": ("tensor", "stats"),
    "dump_op_switch": _ON_OFF,
    "dump_level": ("op", "kernel", "all"),
    "dump_debug": _ON_OFF,
    "dump_scene": (
        "lite_exception",
        "aic_err_brief_dump",
        "aic_err_norm_dump",
        "aic_err_detail_dump",
        WATCHER,
    ),
}
_KERNEL_DATA = ("all", "printf", "tensor", "assert", "timestamp")
STATS = {
    "Max": "max",
    "Min": "min",
    "Avg": "avg",
    "Nan": "nan count",
    "Negative Inf": "negative inf count",
    "Positive Inf": "positive inf count",
    "L2norm": "l2norm",
}
"""Figures by CANN's word for them, in the order of their columns."""


@dataclass(frozen=True, slots=True)
class Words:
    """What the keys with a few words say."""

    mode: str
    data: str
    level: str
    scene: str
    """Empty for none."""
    operators: bool
    """`dump_op_switch` is on."""
    debug: bool

    @property
    def watches(self) -> bool:
        """Whether outputs are read again after other operators."""
        return self.scene == WATCHER

    @property
    def exception(self) -> bool:
        """Whether the operator that raised is asked for."""
        return bool(self.scene) and not self.watches


def parse_words(dump: Section) -> Words:
    """Return them; the first word that is not known is refused."""
    found = {key: _word(dump, key, text(dump, key), among) for key, among in _WORDS.items()}
    for kind in (
        text(dump, "dump_kernel_data").split(",") if "dump_kernel_data" in dump.values else ()
    ):
        _word(dump, "dump_kernel_data", kind, _KERNEL_DATA, given=True)
    for index, name in enumerate(texts(dump, "dump_stats")):
        if name not in STATS:
            place = f"{dump.name}.dump_stats[{index}]"
            raise ConfigError(dump.file, place, name, f"{_listed(tuple(STATS))} ({NO_WORD})")
    return Words(
        mode=found["dump_mode"] or "output",
        data=found["dump_data"] or "tensor",
        level=found["dump_level"] or "all",
        scene=found["dump_scene"],
        operators=found["dump_op_switch"] == "on",
        debug=found["dump_debug"] == "on",
    )


def _word(
    dump: Section, key: str, value: str, among: tuple[str, ...], *, given: bool = False
) -> str:
    if not (given or key in dump.values):
        return ""
    if value not in among:
        raise coded(dump, key, _listed(among), NO_WORD if value else WRONG_TYPE)
    return value


def _listed(words: tuple[str, ...]) -> str:
    *first, last = (f'"{word}"' for word in words)
    return f"{', '.join(first)} or {last}"


def check_scene(dump: Section, words: Words) -> None:
    """Refuse what cannot stand beside a scene."""
    if not words.scene:
        return
    for key in ("dump_debug", "dump_op_switch"):
        if dump.values.get(key) == "on":
            raise coded(dump, key, f'"off" where dump_scene is "{words.scene}"', CONFLICT)
    if words.watches and words.mode != "output":
        raise coded(dump, "dump_mode", f'"output" where dump_scene is "{WATCHER}"', CONFLICT)
