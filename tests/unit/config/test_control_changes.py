"""Tests of actions that control a job, as changes of its plan."""

from __future__ import annotations

import pytest

import rankdump.control
from rankdump._config.control_changes import make_plan_change
from rankdump._core.job_control import NO_ITERATIONS, ControlAction, PlanChange
from rankdump._core.plan import IterationSelection, OperatorSelection
from rankdump.errors import ConfigError


@pytest.mark.parametrize(
    ("action", "values", "change"),
    [
        (ControlAction.START, (), PlanChange(iterations=IterationSelection())),
        (ControlAction.STOP, (), PlanChange(iterations=NO_ITERATIONS)),
        (ControlAction.ITERATIONS, ("all",), PlanChange(iterations=IterationSelection())),
        (
            ControlAction.ITERATIONS,
            ("0|5-8",),
            PlanChange(iterations=IterationSelection("0|5-8", ((0, 0), (5, 8)))),
        ),
        (ControlAction.OPERATORS, ("all",), PlanChange(operators=OperatorSelection())),
        (
            ControlAction.OPERATORS,
            ("conv", "Default/a/Add-op0", "name-regex(.*attn.*)", "conv"),
            PlanChange(
                operators=OperatorSelection(
                    everything=False,
                    types=("conv",),
                    names=("Default/a/Add-op0",),
                    patterns=(".*attn.*",),
                )
            ),
        ),
        (ControlAction.SAVED_DATA, ("statistic",), PlanChange(saved="statistic")),
    ],
)
def test_actions_have_the_grammar_of_a_configuration(action, values, change):
    assert make_plan_change(action, values) == change


@pytest.mark.parametrize(
    ("action", "values", "part"),
    [
        (ControlAction.START, ("now",), "control: start: 'now' is not allowed; allowed: no value"),
        (
            ControlAction.ITERATIONS,
            (),
            "iterations: '' is not allowed; allowed: one value: \"all\"",
        ),
        (
            ControlAction.SAVED_DATA,
            ("full", "tensor"),
            "'full tensor' is not allowed; allowed: one",
        ),
        (ControlAction.ITERATIONS, ("5--",), "iterations: '5--' is not allowed"),
        (ControlAction.ITERATIONS, ("9-5",), "'9-5' runs backwards"),
        (ControlAction.OPERATORS, (), "operators: '' is not allowed"),
        (ControlAction.OPERATORS, ("name-regex(()",), "a valid regular expression"),
        (ControlAction.SAVED_DATA, ("both",), "'both' is not allowed; allowed: tensor, statistic"),
        (ControlAction.OPERATORS, ("a",) * 1001, "at most 1000 values"),
    ],
)
def test_values_that_are_not_allowed_are_one_line(action, values, part):
    with pytest.raises(ConfigError) as found:
        make_plan_change(action, values)
    assert part in str(found.value)
    assert "\n" not in str(found.value)


def test_entry_with_a_surprising_effect_is_told():
    told: list[str] = []
    make_plan_change(ControlAction.OPERATORS, ("name-regex(a",), told.append)
    assert len(told) == 1
    assert "name-regex(...)" in told[0]


def test_operators_of_a_script_may_be_one_list(monkeypatch):
    """As `kernels` of a configuration is."""
    ordered: list[object] = []

    def note_order(job_id, action, values=(), **options):
        ordered.append((job_id, action, tuple(values)))

    monkeypatch.setattr(rankdump.control, "carry_out", note_order)
    rankdump.control.set_operators("job", ["conv", "relu"])
    rankdump.control.set_operators("job", "conv", "relu")
    assert ordered == [("job", ControlAction.OPERATORS, ("conv", "relu"))] * 2


@pytest.mark.parametrize(
    "order",
    [
        lambda: rankdump.control.set_operators("job", 5),  # type: ignore[arg-type]
        lambda: rankdump.control.set_operators("job", ["conv", None]),  # type: ignore[list-item]
        lambda: rankdump.control.set_operators("job", [["conv"]]),  # type: ignore[list-item]
        lambda: rankdump.control.set_iterations("job", 3),  # type: ignore[arg-type]
        lambda: rankdump.control.set_saved_data("job", None),  # type: ignore[arg-type]
        lambda: rankdump.control.freeze("job", 7),  # type: ignore[arg-type]
    ],
)
def test_value_that_is_no_text_is_a_config_error(order):
    """Before a coordinator is asked."""
    with pytest.raises(ConfigError, match="allowed: texts"):
        order()
