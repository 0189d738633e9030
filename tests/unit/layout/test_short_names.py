"""Short names: unique last components, the same on every call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._layout.profile import OperatorAliases, make_gradient_alias

SCOPES = st.sampled_from(["Default/a/", "Default/b/", "Gradients/Default/a/", ""])
NAMES = st.builds(
    lambda scope, kind, number: f"{scope}{kind}-op{number}",
    SCOPES,
    st.sampled_from(["Conv2d", "ReLU", "x-op"]),
    st.integers(0, 3),
)


@given(names=st.lists(NAMES, max_size=40))
def test_alias_has_a_unique_last_component(names):
    """Each operator has its own component, a name always has the same alias, and scopes
    are kept.
    """
    aliases = OperatorAliases()
    found = {name: aliases.get_alias(name) for name in names}
    components = [alias.rpartition("/")[2] for alias in found.values()]
    assert len(set(components)) == len(components)
    for name, alias in found.items():
        assert aliases.get_alias(name) == aliases.find_alias(name) == alias
        if not name.startswith("Gradients/") or name.count("/") > 1:
            assert alias.rpartition("/")[0] == name.rpartition("/")[0]


@given(numbers=st.permutations(range(8)))
def test_alias_of_a_unique_name_is_the_name(numbers):
    aliases = OperatorAliases()
    for number in numbers:
        assert aliases.get_alias(f"Default/Add-op{number}") == f"Default/Add-op{number}"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["Default/conv1/Conv2d-op0", "Default/conv2/Conv2d-op0", "Default/conv1/Conv2d-op1"],
            ["Default/conv1/Conv2d-op0", "Default/conv2/Conv2d-op1", "Default/conv1/Conv2d-op2"],
        ),
        (
            ["Default/c/Conv2d-op0", "Gradients/Default/c/Conv2d-op0"],
            ["Default/c/Conv2d-op0", "Gradients/Default/c/Conv2d-op1"],
        ),
        (
            ["conv1.weight", "Gradients/conv1.weight"],
            ["conv1.weight", "grad.conv1.weight"],
        ),
        (["a/x", "b/x", "c/x"], ["a/x", "b/x-op1", "c/x-op2"]),
        (["", ""], ["", ""]),
    ],
)
def test_alias_takes_the_next_free_number(names, expected):
    aliases = OperatorAliases()
    assert [aliases.get_alias(name) for name in names] == expected


def test_alias_of_a_gradient_names_its_parameter():
    assert make_gradient_alias("conv1.weight") == OperatorAliases().get_alias(
        "Gradients/conv1.weight"
    )


def test_aliases_are_bounded_in_memory(monkeypatch):
    """Beyond the limit names are not shortened, and known ones keep their alias."""
    monkeypatch.setattr("rankdump._layout.profile._MAX_NAMES", 3)
    aliases = OperatorAliases()
    found = [aliases.get_alias(f"{scope}/x-op0") for scope in "abcd"]
    assert found == ["a/x-op0", "b/x-op1", "c/x-op0", "d/x-op0"]
    assert aliases.is_full
    assert aliases.get_alias("b/x-op0") == "b/x-op1"
