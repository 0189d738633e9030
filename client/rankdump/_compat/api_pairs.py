"""Pairs of the calls in two lists of API calls, as troubleshooter's `api_dump_compare` finds them.
Pure.

`pair_api_calls` pairs calls, `align_shapes` the tensors of two paired calls. Only names and shapes
decide, so pairing works across frameworks; the numbers of calls are ignored.

Certain pairs (anchors) are found first. A key of name and shapes is certain if both sides have it
equally often. The calls of the best such key are paired in order, which splits both lists, and each
part is treated in the same way. A class is better than a function, and a function better than a
method; then the call whose inputs and outputs differ most in size is better, then the most frequent
key, then the first one. The tool leaves the last choice to the order of a Python set, which differs
between processes.

The calls between two anchors are cut at similar joints. A joint is the place before, between or
after calls, with the outputs of the call before it and the inputs of the call after it. Two joints
are similar if all their shapes are equal; among similar joints the edit distance of the names
decides.

Functions of torch count as functional if MindSpore has them, and get MindSpore's name if it
differs. The names are those that troubleshooter 1.0.17 equates, including its gaps, so that the
rows are the same; `rankdump diff` uses `rankdump._analysis.compare.call_names`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from rankdump._core.bounded_cache import remember

TensorShape: TypeAlias = tuple[int, ...]

_KIND_RANKS: Mapping[str, int] = {"nn": 0, "functional": 1, "tensor": 2}
_OTHER_KIND_RANK = 3
_TOOL_EPSILON = 1e-6
_MAX_EXACT_FLOAT = 1 << 53
_ListPart: TypeAlias = tuple[int, int, int, int]
"""Part of both lists: begin and end in a, begin and end in b."""
_NAME_COST_DIVISOR = 20
"""Divisor of the cost of a name against that of a skipped joint: names only choose among similar
joints.
"""
_CUT, _PASS, _SKIP_A, _SKIP_B = range(4)
_MAX_CACHED_SHARES = 1 << 14
_MAX_CACHED_ROWS = 1 << 8
_TORCH_FRAMEWORKS = ("pytorch", "mindtorch")
_TORCH_FUNCTION_NAMES = """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr all amax amin angle any
    arange arccos arccosh arcsin arcsinh arctan arctanh argmax argmin argsort asin asinh atan
    atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bartlett_window bernoulli bincount
    bitwise_and bitwise_or bitwise_xor blackman_window block_diag bmm broadcast_to bucketize
    cat cdist ceil cholesky cholesky_solve chunk clamp clip column_stack combinations conj
    copysign cos cosh count_nonzero cross cummax cummin cumprod cumsum deg2rad diag diag_embed
    diagflat diagonal diff digamma dist div divide dstack einsum erf erfc erfinv exp exp2 expm1
    eye flatten flip fliplr flipud float_power floor floor_divide fmax fmod frac full full_like
    gcd ge geqrf ger greater greater_equal gt hamming_window hann_window heaviside histc hstack
    hypot i0 igamma igammac imag index_select inner inverse is_complex is_floating_point
    is_nonzero is_tensor isclose isfinite isinf isnan isneginf isposinf isreal kaiser_window
    kron lcm ldexp le lerp less less_equal linspace log log10 log1p log2 logaddexp logaddexp2
    logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp
    lt lu_solve lu_unpack masked_select matmul max maximum mean median meshgrid min minimum mm
    moveaxis movedim msort mul multinomial multiply mv mvlgamma nan_to_num nansum narrow ne neg
    negative nextafter nonzero normal not_equal numel ones ones_like orgqr ormqr outer polar
    polygamma pow prod rad2deg rand rand_like randint randint_like randn randn_like randperm
    range ravel real reciprocal remainder renorm repeat_interleave reshape roll rot90 round
    row_stack rsqrt scatter searchsorted sgn sigmoid sign signbit sin sinc sinh slogdet sort
    split sqrt square squeeze stack std std_mean subtract sum svd swapaxes swapdims t tan tanh
    tensor_split tile topk trace trapz tril tril_indices triu_indices true_divide trunc unbind
    unique unique_consecutive unsqueeze vander var var_mean view_as_real vstack where xlogy
    zeros zeros_like
"""
_TORCH_FUNCTIONS = frozenset(_TORCH_FUNCTION_NAMES.split())
"""Functions that are in `torch` for torch, and under the same name in `ops` for MindSpore."""
_MINDSPORE_NAMES: Mapping[str, str] = {
    "torch_dot": "functional_tensor_dot",
    "torch_eq": "functional_equal",
    "torch_gather": "functional_gather_elements",
    "torch_poisson": "functional_random_poisson",
    "torch_scatter_add": "functional_tensor_scatter_elements",
    "torch_sub": "functional_subtract",
    "torch_transpose": "functional_swapaxes",
    "nn_Bilinear": "nn_BiDense",
    "nn_CeLU": "nn_CELU",
    "nn_ConvTranspose1d": "nn_Conv1dTranspose",
    "nn_ConvTranspose2d": "nn_Conv2dTranspose",
    "nn_ConvTranspose3d": "nn_Conv3dTranspose",
    "nn_Hardshrink": "nn_HShrink",
    "nn_Hardsigmoid": "nn_Hsigmoid",
    "nn_Hardswish": "nn_Hswish",
    "nn_Linear": "nn_Dense",
    "nn_LocalResponseNorm": "nn_LRN",
    "nn_ModuleList": "nn_CellList",
    "nn_Sequential": "nn_SequentialCell",
    "nn_Softshrink": "nn_SoftShrink",
    "functional_bilinear": "functional_bidense",
    "functional_linear": "functional_dense",
    "tensor_cauchy_": "tensor_cauchy",
    "tensor_dim": "tensor_ndimension",
    "tensor_eq": "tensor_equal",
    "tensor_expand": "tensor_broadcast_to",
    "tensor_fill_diagonal_": "tensor_fill_diagonal",
    "tensor_gather": "tensor_gather_elements",
    "tensor_numpy": "tensor_asnumpy",
    "tensor_repeat": "tensor_tile",
    "tensor_scatter_": "functional_tensor_scatter_elements",
    "tensor_size": "tensor_shape",
    "tensor_sub": "tensor_subtract",
    "tensor_transpose": "tensor_swapaxes",
}


@dataclass(frozen=True, slots=True)
class FlowCall:
    """One forward call of an API."""

    api: str
    """Name of the API without kind and number, such as `Conv2d` or `max_pool2d`, or the path of a
    layer.
    """
    unified_name: str
    """Kind and name that all frameworks share, as `unify_api_name` returns them."""
    inputs: tuple[TensorShape, ...] = ()
    """Shapes of the input tensors in the order in which they were dumped."""
    outputs: tuple[TensorShape, ...] = ()

    @property
    def pairing_key(self) -> tuple[str, tuple[TensorShape, ...], tuple[TensorShape, ...]]:
        """Name and shapes; they are equal for calls that may be paired."""
        return self.unified_name, self.inputs, self.outputs


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Calls of one side that are paired with calls of the other, as positions in their lists.

    One of the two positions is empty for calls without a partner.
    """

    a: range
    b: range


def find_anchors(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[tuple[int, int]]:
    """Return the positions of certain pairs, ascending on both sides."""
    numbers: dict[tuple[str, tuple[TensorShape, ...], tuple[TensorShape, ...]], int] = {}
    keys_a = [numbers.setdefault(call.pairing_key, len(numbers)) for call in a]
    keys_b = [numbers.setdefault(call.pairing_key, len(numbers)) for call in b]
    merits = [_compute_merit(*key) for key in numbers]
    found: list[tuple[int, int]] = []
    waiting: list[_ListPart] = [(0, len(a), 0, len(b))]
    while waiting:
        part = waiting.pop()
        pairs = _pair_best_key(
            _group_places(keys_a, *part[:2]), _group_places(keys_b, *part[2:]), merits
        )
        if pairs:
            found.extend(pairs)
            waiting.extend(_split_part(part, pairs))
    return sorted(found)


def _compute_merit(
    shared: str, inputs: tuple[TensorShape, ...], outputs: tuple[TensorShape, ...]
) -> tuple[int, float]:
    """Return the merit of a call with these shapes as an anchor; smaller is better."""
    kind = _KIND_RANKS.get(shared.partition("_")[0], _OTHER_KIND_RANK)
    small, large = sorted((_compute_total_size(inputs), _compute_total_size(outputs)))
    # Sizes of many tensors exceed the exact range of a float; the epsilon makes no difference
    # there.
    ratio = small / (large + _TOOL_EPSILON) if large < _MAX_EXACT_FLOAT else small / large
    return kind, ratio


def _compute_total_size(shapes: Sequence[TensorShape]) -> int:
    """Return the product of all extents of all tensors, as the tool computes it."""
    return math.prod(extent for shape in shapes for extent in shape)


def _group_places(keys: Sequence[int], start: int, stop: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in range(start, stop):
        found.setdefault(keys[place], []).append(place)
    return found


def _pair_best_key(
    a: Mapping[int, list[int]], b: Mapping[int, list[int]], merits: Sequence[tuple[int, float]]
) -> list[tuple[int, int]]:
    """Return the pairs of the best key that both sides have equally often, if there is one."""
    equal = [key for key, places in a.items() if len(places) == len(b.get(key, ()))]
    if not equal:
        return []
    best = min(equal, key=lambda key: (merits[key], -len(a[key])))
    return list(zip(a[best], b[best], strict=True))


def _split_part(part: _ListPart, pairs: Sequence[tuple[int, int]]) -> list[_ListPart]:
    """Return the parts before, between and after the pairs that have calls on both sides."""
    start_a, stop_a, start_b, stop_b = part
    starts = [(start_a, start_b), *((a + 1, b + 1) for a, b in pairs)]
    stops = [*pairs, (stop_a, stop_b)]
    parts = [(*begin, *end) for begin, end in zip(starts, stops, strict=True)]
    return [(a, a_end, b, b_end) for a, b, a_end, b_end in parts if a < a_end and b < b_end]


@dataclass(frozen=True, slots=True)
class _CallJoint:
    """The place between two calls, with the shapes of the tensors before and after it."""

    before: str
    """Name of the call before the joint; empty at the start."""
    behind: str
    """Name of the call after the joint; empty at the end."""
    outputs: tuple[TensorShape, ...]
    inputs: tuple[TensorShape, ...]


def find_cuts(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[tuple[int, int]]:
    """Return the positions before which both lists are cut, ascending on both sides."""
    moves = _compute_moves(_list_joints(a), _list_joints(b))
    found: list[tuple[int, int]] = []
    at_a, at_b = len(a), len(b)
    while at_a >= 0 and at_b >= 0:
        move = moves[at_a][at_b]
        if move == _CUT:
            found.append((at_a, at_b))
        at_a -= move != _SKIP_B
        at_b -= move != _SKIP_A
    return found[::-1]


def _list_joints(calls: Sequence[FlowCall]) -> list[_CallJoint]:
    ends = FlowCall("", "")
    befores, behinds = (ends, *calls), (*calls, ends)
    return [
        _CallJoint(before.api, behind.api, before.outputs, behind.inputs)
        for before, behind in zip(befores, behinds, strict=True)
    ]


def _compute_moves(a: Sequence[_CallJoint], b: Sequence[_CallJoint]) -> list[bytearray]:
    """Return the last move of the cheapest path to each pair of joints."""
    known: dict[_CallJoint, list[float]] = {}
    moves: list[bytearray] = []
    above = [float(place) for place in range(len(b) + 1)]
    for number, one in enumerate(a, 1):
        costs = known.get(one)
        if costs is None:
            costs = [_compute_joint_cost(one, other) for other in b]
            remember(known, one, costs, _MAX_CACHED_ROWS)
        cost = float(number)
        row, ways = [cost], bytearray()
        for pairing, corner, top in zip(costs, above, above[1:], strict=False):
            diagonal, skip_a, skip_b = corner + pairing, top + 1, cost + 1
            if diagonal <= skip_a and diagonal <= skip_b:
                cost = diagonal
                ways.append(_CUT if pairing < 1 else _PASS)
            elif skip_a <= skip_b:
                cost = skip_a
                ways.append(_SKIP_A)
            else:
                cost = skip_b
                ways.append(_SKIP_B)
            row.append(cost)
        moves.append(ways)
        above = row
    return moves


def _compute_joint_cost(one: _CallJoint, other: _CallJoint) -> float:
    """Return the cost of pairing two joints; 1 if they are not similar."""
    if (one.outputs, one.inputs) != (other.outputs, other.inputs):
        return 1
    behind = _compute_edit_share(one.behind, other.behind)
    return (behind + _compute_edit_share(one.before, other.before)) / 2 / _NAME_COST_DIVISOR


@lru_cache(maxsize=_MAX_CACHED_SHARES)
def _compute_edit_share(one: str, other: str) -> float:
    """Return the edit distance of two names relative to the longer one; 1 for two empty names."""
    if not one and not other:
        return 1.0
    above = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        row = [number]
        for place, against in enumerate(other):
            changed = above[place] + (letter != against)
            row.append(min(changed, above[place + 1] + 1, row[place] + 1))
        above = row
    return above[-1] / max(len(one), len(other))


def pair_api_calls(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[CallSpan]:
    """Return the spans in order; every call of both sides is in exactly one span."""
    spans: list[CallSpan] = []
    at_a, at_b = 0, 0
    for place_a, place_b in find_anchors(a, b):
        spans.extend(_pair_between_anchors(a, b, range(at_a, place_a), range(at_b, place_b)))
        at_a, at_b = place_a + 1, place_b + 1
        spans.append(CallSpan(range(place_a, at_a), range(place_b, at_b)))
    spans.extend(_pair_between_anchors(a, b, range(at_a, len(a)), range(at_b, len(b))))
    return spans


def _pair_between_anchors(
    a: Sequence[FlowCall], b: Sequence[FlowCall], inside_a: range, inside_b: range
) -> Iterator[CallSpan]:
    """Yield the spans between two anchors."""
    if not inside_a or not inside_b:
        if inside_a or inside_b:
            yield CallSpan(inside_a, inside_b)
        return
    found = find_cuts(
        a[inside_a.start : inside_a.stop],
        b[inside_b.start : inside_b.stop],
    )
    at_a, at_b = 0, 0
    for cut_a, cut_b in (*found, (len(inside_a), len(inside_b))):
        span = CallSpan(inside_a[at_a:cut_a], inside_b[at_b:cut_b])
        at_a, at_b = cut_a, cut_b
        if span.a or span.b:
            yield span


def unify_api_name(framework: str, kind: str, api: str) -> str:
    """Return the name that all frameworks share for an API.

    >>> unify_api_name("pytorch", "NN", "Linear"), unify_api_name("mindspore", "NN", "Dense")
    ('nn_Dense', 'nn_Dense')
    >>> unify_api_name("pytorch", "Torch", "matmul")
    'functional_matmul'
    """
    name = f"{kind.lower()}_{api}"
    if framework not in _TORCH_FRAMEWORKS:
        return name
    if kind == "Torch" and api in _TORCH_FUNCTIONS:
        return f"functional_{api}"
    return _MINDSPORE_NAMES.get(name, name)


def align_shapes(
    a: Sequence[TensorShape], b: Sequence[TensorShape]
) -> list[tuple[int | None, int | None]]:
    """Return paired positions in order, with None for a tensor without a partner.

    The alignment leaves out as few tensors as possible. If there are several such alignments, it is
    that of api_dump_compare, which at each place leaves out a tensor of a before one of b. Paired
    tensors have equal shapes.
    """
    costs = _compute_alignment_costs(a, b)
    found: list[tuple[int | None, int | None]] = []
    at_a, at_b = len(a), len(b)
    while at_a and at_b:
        without_a, without_b = costs[at_a - 1][at_b] + 1, costs[at_a][at_b - 1] + 1
        if without_a == costs[at_a][at_b]:
            at_a -= 1
            found.append((at_a, None))
        elif a[at_a - 1] == b[at_b - 1]:
            at_a, at_b = at_a - 1, at_b - 1
            found.append((at_a, at_b))
        else:
            assert without_b == costs[at_a][at_b]
            at_b -= 1
            found.append((None, at_b))
    found.extend((place, None) for place in reversed(range(at_a)))
    found.extend((None, place) for place in reversed(range(at_b)))
    return found[::-1]


def _compute_alignment_costs(a: Sequence[TensorShape], b: Sequence[TensorShape]) -> list[list[int]]:
    """Return the minimum number of tensors left out among the first i of a and the first j of b, by
    i and j.
    """
    costs = [list(range(len(b) + 1))]
    for count, shape in enumerate(a, 1):
        row = [count]
        for place, other in enumerate(b):
            if shape == other:
                row.append(costs[-1][place])
            else:
                row.append(min(costs[-1][place + 1], row[place]) + 1)
        costs.append(row)
    return costs
