import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump.adapters.api_calls import (
    CallNumbers,
    LayerMarks,
    argument_of,
    layer_call,
    leaves_of_input,
    leaves_of_output,
    scalar_of,
)
from rankdump.adapters.api_stacks import Stacks
from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import place_of, tensor_of


def test_calls_of_each_type_are_counted_from_nought() -> None:
    numbers = CallNumbers()
    types = ("NN_Conv2d", "NN_Conv2d", "NN_Linear", "NN_Conv2d")
    assert [numbers.next(kind) for kind in types] == [0, 1, 0, 2]


def test_no_number_is_given_twice_to_threads() -> None:
    numbers, given_out = CallNumbers(), list[int]()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        given_out.extend([numbers.next("NN_Conv2d") for _ in range(500)])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given_out) == list(range(2000))


def test_an_input_always_has_a_place_and_a_lone_output_none() -> None:
    inputs = leaves_of_input((1, [2, 3]), {"dim": 4})
    assert [(leaf.slot, leaf.place) for leaf in inputs] == [
        (0, "0"),
        (1, "1.0"),
        (2, "1.1"),
        (3, "dim"),
    ]
    assert [leaf.place for leaf in leaves_of_output(5)] == [""]
    assert [leaf.place for leaf in leaves_of_output((5, (6, 7)))] == ["0", "1.0", "1.1"]


@given(st.text(min_size=1, max_size=30))
def test_any_key_of_a_dictionary_gives_a_place_that_is_read_back(key: str) -> None:
    (leaf,) = leaves_of_output({key: 1})
    argument = argument_of(Side.OUTPUT, leaf.place, "int", recomputed=True)
    place = place_of(argument)
    assert place is not None
    assert (place.path, place.scalar, place.recomputed) == (leaf.place, "int", True)
    assert tensor_of(f"NN_Conv2d_0_forward_{place.name}") is not None


@pytest.mark.parametrize(
    ("value", "mark"), [(1, "int"), (1.0, "float"), (True, "bool"), ("a", ""), (None, "")]
)
def test_numbers_of_python_are_marked(value: object, mark: str) -> None:
    assert scalar_of(value) == mark


def test_a_layer_is_marked_once_or_each_time() -> None:
    once, always = LayerMarks(once=True), LayerMarks(once=False)
    assert [once.due("fc1"), once.due("fc1"), once.due("fc2")] == [True, False, True]
    assert [always.due("fc1"), always.due("fc1")] == [True, True]
    assert layer_call("blocks.0.conv").name == "LAYER_blocks_0_conv_forward"


def _inner(stacks: Stacks, *, users_only: bool = True) -> tuple[str, ...]:
    return stacks.now(users_only=users_only)


def test_a_stack_is_spelt_innermost_first_with_its_source() -> None:
    stack = _inner(Stacks("/framework"))
    assert stack[0].startswith(f"File {__file__}, line ")
    assert stack[0].endswith(", in _inner, \n return stacks.now(users_only=users_only)")
    assert stack[1].endswith('\n stack = _inner(Stacks("/framework"))')


def test_frames_of_the_framework_are_the_users_only_if_asked_for() -> None:
    stacks = Stacks(__file__.rpartition("/")[0])
    assert not any(__file__ in line for line in _inner(stacks))
    assert any(__file__ in line for line in _inner(stacks, users_only=False))


def test_code_without_source_has_a_line_without_it() -> None:
    names: dict[str, object] = {"stacks": Stacks("/framework")}
    exec(compile("found = stacks.now(users_only=True)", "<no file>", "exec"), names)
    found = names["found"]
    assert isinstance(found, tuple)
    assert found[0] == "File <no file>, line 1, in <module>, \n "


def test_the_same_way_gives_the_same_stack() -> None:
    stacks = Stacks("/framework")
    first, second = (_inner(stacks) for _ in range(2))
    assert first is second
