"""Calls of two programs paired by names and shapes, and tensors of two calls by shapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankdump._compat.api_pairs import (
    CallSpan,
    FlowCall,
    align_shapes,
    pair_api_calls,
    unify_api_name,
)

SHAPES = st.sampled_from([(2, 3), (2, 8), (4,), ()])
CALLS = st.builds(
    lambda name, inputs, outputs: FlowCall(name, f"nn_{name}", tuple(inputs), tuple(outputs)),
    st.sampled_from(["Conv2d", "relu", "add"]),
    st.lists(SHAPES, max_size=2),
    st.lists(SHAPES, max_size=2),
)
PROGRAMS = st.lists(CALLS, max_size=12)


def call(name: str, *outputs: int, kind: str = "functional") -> FlowCall:
    """A call of one input of shape (2,) whose outputs have one extent each."""
    return FlowCall(name, f"{kind}_{name}", ((2,),), tuple((extent,) for extent in outputs))


def shown(spans: list[CallSpan]) -> list[tuple[list[int], list[int]]]:
    return [(list(span.a), list(span.b)) for span in spans]


@given(PROGRAMS, PROGRAMS)
def test_pair_api_calls_has_every_call_in_one_span_in_order(a, b):
    spans = pair_api_calls(a, b)
    assert [at for span in spans for at in span.a] == list(range(len(a)))
    assert [at for span in spans for at in span.b] == list(range(len(b)))
    assert all(span.a or span.b for span in spans)


@given(PROGRAMS)
def test_pair_api_calls_pairs_a_program_with_itself_call_by_call(program):
    assert all(span.a == span.b for span in pair_api_calls(program, program))
    certain = [call("first", 7), *program]
    assert pair_api_calls(certain, certain)[0] == CallSpan(range(1), range(1))


@given(PROGRAMS, st.data())
def test_pair_api_calls_leaves_a_new_call_alone(program, data):
    place = data.draw(st.integers(0, len(program)))
    a = [FlowCall(f"layer{number}", f"nn_layer{number}") for number in range(len(program))]
    spans = pair_api_calls(a, [*a[:place], call("new", 5), *a[place:]])
    alone = [span for span in spans if not span.a]
    assert [list(span.b) for span in alone] == [[place]]
    assert all(len(span.a) == len(span.b) == 1 for span in spans if span.a)


def test_pair_api_calls_ignores_numbers_and_positions():
    a = [call("conv", 3, kind="nn"), call("relu", 4), call("add", 5)]
    b = [call("relu", 4), call("sigmoid", 6), call("add", 5)]
    assert shown(pair_api_calls(a, b)) == [([0], []), ([1], [0]), ([], [1]), ([2], [2])]


def test_anchors_prefer_classes_to_functions_to_methods():
    """The later pairs cross the earlier: only one of two can stand."""
    nn, function = call("Linear", 3, kind="nn"), call("linear", 3)
    assert shown(pair_api_calls([nn, function], [function, nn])) == [
        ([], [0]),
        ([0], [1]),
        ([1], []),
    ]


def test_spans_between_anchors_begin_and_end_with_equal_shapes():
    """One call of a net against the two that another framework needs for it."""
    first, last = call("Conv2d", 2, kind="nn"), call("Softmax", 2, kind="nn")
    silu = FlowCall("silu", "functional_silu", ((2,),), ((2,),))
    sigmoid = FlowCall("sigmoid", "functional_sigmoid", ((2,),), ((9,),))
    mul = FlowCall("mul", "tensor_mul", ((9,), (2,)), ((2,),))
    found = shown(pair_api_calls([first, silu, last], [first, sigmoid, mul, last]))
    assert found == [([0], [0]), ([1], [1, 2]), ([2], [3])]


def test_pair_api_calls_with_one_side_empty():
    assert shown(pair_api_calls([], [call("relu", 2)])) == [([], [0])]
    assert pair_api_calls([], []) == []


def test_anchors_accept_sizes_beyond_a_float():
    many = FlowCall("cat", "functional_cat", ((1 << 20, 1 << 20),) * 20, ((1 << 40,) * 12,))
    assert shown(pair_api_calls([many], [many])) == [([0], [0])]


@given(st.lists(SHAPES, max_size=6), st.lists(SHAPES, max_size=6))
def test_align_shapes_pairs_equal_shapes_in_order(a, b):
    pairs = align_shapes(a, b)
    assert [at for at, _ in pairs if at is not None] == list(range(len(a)))
    assert [at for _, at in pairs if at is not None] == list(range(len(b)))
    assert all(a[one] == b[other] for one, other in pairs if None not in (one, other))


def test_align_shapes_leaves_out_an_extra_tensor():
    assert align_shapes([(2,), (3,)], [(2,), (9,), (3,)]) == [(0, 0), (None, 1), (1, 2)]
    assert align_shapes([(2,), (2,)], [(2,)]) == [(0, 0), (1, None)]
    assert align_shapes([], [(2,)]) == [(None, 0)]


def test_unify_api_name_across_frameworks():
    assert unify_api_name("pytorch", "Torch", "sub") == "functional_subtract"
    assert unify_api_name("pytorch", "NN", "Linear") == unify_api_name("mindspore", "NN", "Dense")
    assert unify_api_name("mindtorch", "Torch", "abs") == "functional_abs"
    assert unify_api_name("pytorch", "Torch", "of_the_user") == "torch_of_the_user"
    assert unify_api_name("mindspore", "Torch", "abs") == "torch_abs"
