"""Numbers, argument places, layer marks and call stacks of API calls."""

import inspect
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.record import TensorSide
from rankdump._frameworks.api_calls import (
    MAX_STACK_LINES,
    ApiCallCounter,
    CallStackCache,
    find_scalar_type,
    format_api_argument,
    format_layer_name,
    list_input_leaves,
    list_output_leaves,
    make_layer_mark,
)
from rankdump._layout.api_tree import parse_place, parse_tensor_name


def test_call_counter_counts_each_type_from_zero() -> None:
    numbers = ApiCallCounter()
    types = ("NN_Conv2d", "NN_Conv2d", "NN_Linear", "NN_Conv2d")
    assert [numbers.next_number(kind) for kind in types] == [0, 1, 0, 2]


def test_call_counter_gives_threads_distinct_numbers() -> None:
    numbers, given_out = ApiCallCounter(), list[int]()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        given_out.extend([numbers.next_number("NN_Conv2d") for _ in range(500)])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given_out) == list(range(2000))


def test_leaves_of_inputs_have_places_and_a_single_output_has_none() -> None:
    inputs = list_input_leaves((1, [2, 3]), {})
    assert [(leaf.slot, leaf.path, leaf.word) for leaf in inputs] == [
        (0, "0", ""),
        (1, "1.0", ""),
        (2, "1.1", ""),
    ]
    assert [leaf.path for leaf in list_output_leaves(5)] == [""]
    assert [leaf.path for leaf in list_output_leaves((5, (6, 7)))] == ["0", "1.0", "1.1"]


def test_leaves_with_keywords_have_numbers_and_words() -> None:
    """Keywords come after positions, in the order given; parts of mappings are numbered too."""
    inputs = list_input_leaves((1,), {"dim": 4, "extra": {"bias": 5, "0": 6}})
    assert [(leaf.slot, leaf.path, leaf.word) for leaf in inputs] == [
        (0, "0", ""),
        (1, "1", "dim"),
        (2, "2.0", "extra.bias"),
        (3, "2.1", "extra.0"),
    ]
    outputs = list_output_leaves({"loss": 1, "states": [2, (3, 4)]})
    assert [(leaf.path, leaf.word) for leaf in outputs] == [
        ("0", "loss"),
        ("1.0", "states.0"),
        ("1.1", "states.1.0"),
        ("1.2", "states.1.1"),
    ]
    outputs = list_output_leaves((1, [[2], 3]))
    assert [(leaf.path, leaf.word) for leaf in outputs] == [
        ("0", ""),
        ("1.0", "1.0.0"),
        ("1.1", ""),
    ]


def test_leaves_of_a_cyclic_container_end() -> None:
    endless: list[object] = [1]
    endless.append(endless)
    for leaves in (list_output_leaves(endless), list_input_leaves((endless,), {})):
        assert leaves[0].value == 1
        assert len({leaf.path for leaf in leaves}) == len(leaves)


@given(st.text(min_size=1, max_size=30))
def test_argument_with_any_dictionary_key_is_parsed_back(key: str) -> None:
    (leaf,) = list_output_leaves({key: 1})
    argument = format_api_argument(TensorSide.OUTPUT, leaf.path, leaf.word, "int", recomputed=True)
    place = parse_place(argument)
    assert place is not None
    assert (place.path, place.scalar, place.recomputed) == ("0", "int", True)
    assert len(place.word) == (len(key) if key != "0" else 0)
    assert parse_tensor_name(f"NN_Conv2d_0_forward_{place.name}") is not None


@pytest.mark.parametrize(
    ("value", "mark"), [(1, "int"), (1.0, "float"), (True, "bool"), ("a", ""), (None, "")]
)
def test_scalar_type_marks_python_numbers(value: object, mark: str) -> None:
    assert find_scalar_type(value) == mark


def test_layer_mark_joins_its_path_with_underscores() -> None:
    assert make_layer_mark("blocks.0.conv").name == "LAYER_blocks_0_conv_forward"
    assert format_layer_name("blocks.0.conv") == "LAYER_blocks.0.conv_forward"


def _inner(stacks: CallStackCache) -> tuple[str, ...]:
    return stacks.read_stack(inspect.currentframe())


def _stacks(*foreign: str, users_only: bool = True) -> CallStackCache:
    return CallStackCache(*foreign, users_only=users_only)


def test_stack_has_innermost_frame_first_with_source_lines() -> None:
    stack = _inner(_stacks())
    assert stack[0].startswith(f"File {__file__}, line ")
    assert stack[0].endswith(", in _inner, \n return stacks.read_stack(inspect.currentframe())")
    assert stack[1].endswith("\n stack = _inner(_stacks())")


def test_stack_has_framework_frames_only_without_filter() -> None:
    folder = __file__.rpartition("/")[0]
    assert not any(__file__ in line for line in _inner(_stacks(folder)))
    assert any(__file__ in line for line in _inner(_stacks(folder, users_only=False)))


def test_stack_of_code_without_source_has_no_source_line() -> None:
    names: dict[str, object] = {"stacks": _stacks(), "inspect": inspect}
    exec(compile("found = stacks.read_stack(inspect.currentframe())", "<no file>", "exec"), names)
    found = names["found"]
    assert isinstance(found, tuple)
    assert found[0] == "File <no file>, line 1, in <module>, \n"


def test_stack_keeps_only_its_innermost_lines() -> None:
    stacks = _stacks()

    def descend(left: int) -> tuple[str, ...]:
        return descend(left - 1) if left else _inner(stacks)

    stack = descend(500)
    assert len(stack) == MAX_STACK_LINES
    assert "in _inner" in stack[0]
    assert all("in descend" in line for line in stack[1:])
    assert len(descend(3)) < MAX_STACK_LINES


def test_stack_cache_returns_the_same_stack_for_the_same_frames() -> None:
    stacks = _stacks()
    first, second = (_inner(stacks) for _ in range(2))
    assert first is second
