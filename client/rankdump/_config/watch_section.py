"""Key `watch` of `rankdump.blackbox`: the rules for what a rank measures. Pure."""

from __future__ import annotations

import difflib
from typing import cast

from rankdump._config.config_section import ConfigSection
from rankdump._core.watch_rule import (
    MAX_GLOB_CHARACTERS,
    MAX_RULE_PATTERNS,
    MAX_RULE_STEPS,
    MAX_RULES,
    MIN_UNCHANGED_STEPS,
    WATCH_ACTIONS,
    WATCH_CONDITIONS,
    WatchAction,
    WatchCondition,
    WatchRule,
)

WATCH_KEY = "watch"
_KEYS = ("when", "operators", "value", "steps", "do", "iterations")
_OPERATORS_ALLOWED = (
    f"a list of 1 to {MAX_RULE_PATTERNS} globs over names or types of operators, each of 1 to "
    f"{MAX_GLOB_CHARACTERS} characters"
)
_MAX_VALUE = 1e308


def parse_watch_rules(section: ConfigSection) -> tuple[WatchRule, ...]:
    """Return the rules; ConfigError names the first one that is wrong, and its key."""
    if WATCH_KEY not in section.values:
        return ()
    allowed = f"a list of up to {MAX_RULES} objects"
    bodies = section.read_array(WATCH_KEY, allowed)
    if len(bodies) > MAX_RULES:
        raise section.make_error(WATCH_KEY, allowed)
    return tuple(_parse_rule(section, place, body) for place, body in enumerate(bodies))


def _parse_rule(section: ConfigSection, place: int, body: object) -> WatchRule:
    key = f"{WATCH_KEY}[{place}]"
    holder = ConfigSection(section.file, section.name, {key: body}, section.notes)
    if not isinstance(body, dict):
        raise holder.make_error(key, f"an object with {', '.join(_KEYS)}")
    values = cast("dict[str, object]", body)
    rule = ConfigSection(section.file, f"{section.name}.{key}", values, section.notes)
    for name in values:
        if name not in _KEYS:
            nearest = difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.0)[0]
            raise rule.make_error(name, f"{', '.join(_KEYS)}; nearest: {nearest}")
    when = cast("WatchCondition", rule.read_choice("when", WATCH_CONDITIONS))
    do = cast("WatchAction", rule.read_choice("do", WATCH_ACTIONS, default="note"))
    if do != "dump" and "iterations" in values:
        raise rule.make_error("iterations", "no number: the action dump alone has one")
    return WatchRule(
        when=when,
        operators=_parse_operators(rule),
        value=_parse_value(rule, when),
        steps=_parse_steps(rule, "steps", MIN_UNCHANGED_STEPS if when == "unchanged" else 1),
        do=do,
        iterations=_parse_steps(rule, "iterations", 1),
    )


def _parse_operators(rule: ConfigSection) -> tuple[str, ...]:
    if "operators" not in rule.values:
        return ()
    globs = rule.read_array("operators", _OPERATORS_ALLOWED)
    texts = tuple(glob for glob in globs if isinstance(glob, str))
    if len(texts) != len(globs) or not 1 <= len(texts) <= MAX_RULE_PATTERNS:
        raise rule.make_error("operators", _OPERATORS_ALLOWED)
    if not all(1 <= len(text) <= MAX_GLOB_CHARACTERS for text in texts):
        raise rule.make_error("operators", _OPERATORS_ALLOWED)
    return texts


def _parse_value(rule: ConfigSection, when: WatchCondition) -> float:
    allowed = f"the largest magnitude that is allowed, from 0 to {_MAX_VALUE:g}"
    if when != "too_large":
        if "value" in rule.values:
            raise rule.make_error("value", "no value: the condition too_large alone has one")
        return 0.0
    if "value" not in rule.values:
        raise rule.make_error("value", allowed)
    return rule.read_number("value", low=0, high=_MAX_VALUE, allowed=allowed, default=0.0)


def _parse_steps(rule: ConfigSection, key: str, least: int) -> int:
    allowed = f"a whole number of {key} from {least} to {MAX_RULE_STEPS}"
    value = rule.values.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int):
        raise rule.make_error(key, allowed)
    if not least <= value <= MAX_RULE_STEPS:
        raise rule.make_error(key, allowed)
    return value
