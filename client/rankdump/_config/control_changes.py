"""Converts actions that control a running job to changes of its plan. Texts have the same grammar
as in a `data_dump.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast, get_args

from rankdump._config.operator_patterns import parse_operator_patterns
from rankdump._core.job_control import NO_ITERATIONS, ControlAction, PlanChange
from rankdump._core.plan import IterationSelection, OperatorSelection, SavedDataMode
from rankdump._core.selection import find_idle_segments, parse_iterations
from rankdump.errors import ConfigError

MAX_VALUES = 1000
MAX_VALUE_CHARACTERS = 1 << 16
_SOURCE = "control"
_ALLOWED_ITERATIONS = '"all", or numbers and ranges without blanks as "0|5-8|100-120"'
_ALLOWED_OPERATORS = '"all", or operator types, full scope names and name-regex(...)'
_SAVED_DATA: tuple[str, ...] = get_args(SavedDataMode)


def check_values(
    action: ControlAction,
    values: Sequence[str],
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Raise ConfigError for values that an action does not allow; `warn` is used as in
    `make_plan_change`.
    """
    # The values come from scripts, whose types nothing has checked.
    odd = [each for each in cast("Sequence[object]", values) if not isinstance(each, str)]
    if odd:
        raise ConfigError(_SOURCE, action.value, odd[0], "texts")
    if action is not ControlAction.FREEZE:
        make_plan_change(action, values, warn)
    elif len(values) > 1 or max(map(len, values), default=0) > MAX_VALUE_CHARACTERS:
        raise ConfigError(_SOURCE, action.value, " ".join(values)[:1000], "one text that says why")


def make_plan_change(
    action: ControlAction,
    values: Sequence[str],
    warn: Callable[[str], None] = lambda text: None,
) -> PlanChange:
    """Return the change of the plan for any action except a freeze.

    ConfigError for values that are not allowed. `warn` is called with texts about surprising
    effects.
    """
    count, characters = len(values), max(map(len, values), default=0)
    if count > MAX_VALUES or characters > MAX_VALUE_CHARACTERS:
        most = f"at most {MAX_VALUES} values of {MAX_VALUE_CHARACTERS} characters"
        raise ConfigError(_SOURCE, action.value, f"{count} values", most)
    if action is ControlAction.OPERATORS:
        return PlanChange(operators=_parse_operators(values, warn))
    if action in (ControlAction.START, ControlAction.STOP):
        if values:
            raise ConfigError(_SOURCE, action.value, values[0], "no value")
        started = action is ControlAction.START
        return PlanChange(iterations=IterationSelection() if started else NO_ITERATIONS)
    if len(values) != 1:
        is_text = action is ControlAction.ITERATIONS
        allowed = f"one value: {_ALLOWED_ITERATIONS if is_text else ', '.join(_SAVED_DATA)}"
        raise ConfigError(_SOURCE, action.value, " ".join(values), allowed)
    if action is ControlAction.ITERATIONS:
        return PlanChange(iterations=_parse_iterations(values[0]))
    if values[0] not in _SAVED_DATA:
        raise ConfigError(_SOURCE, action.value, values[0], ", ".join(_SAVED_DATA))
    return PlanChange(saved=cast("SavedDataMode", values[0]))


def _parse_iterations(text: str) -> IterationSelection:
    found, idle = parse_iterations(text), find_idle_segments(text)
    if found is None or idle:
        why = "".join(f"; {segment!r} {reason}" for segment, reason in idle.items() if found)
        raise ConfigError(_SOURCE, "iterations", text, _ALLOWED_ITERATIONS + why)
    return found


def _parse_operators(values: Sequence[str], warn: Callable[[str], None]) -> OperatorSelection:
    entries = [each for each in dict.fromkeys(values) if each]
    if not entries:
        raise ConfigError(_SOURCE, "operators", " ".join(values), _ALLOWED_OPERATORS)
    if entries == ["all"]:
        return OperatorSelection()
    try:
        return parse_operator_patterns(entries, lambda entry, why: warn(f"{entry} {why}"))
    except ValueError as error:
        allowed = f"a valid regular expression in name-regex(...), not {error}"
        raise ConfigError(_SOURCE, "operators", " ".join(values), allowed) from None
