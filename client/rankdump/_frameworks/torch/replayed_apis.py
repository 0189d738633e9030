"""Calls of torch's API that can be replayed: how each is computed in float64, and how far a result
in another precision may deviate from it.

Nothing is looked up by a name from a dump: a call is replayed only if this table has it. A bound is
one for any order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
sections 3.1 and 4.2), so a correct kernel is within it whatever blocks it uses:

    moved       the elements of the inputs, unchanged: no error
    elementwise each result from few operations: k units of the result, or of the magnitude named
    summed      n products: gamma(n) = n u / (1 - n u), times the result of the absolute values
    composed    softmax, norms, losses, attention: the bounds of their parts, to first order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# torch's stubs leave many functions partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false


_UNDERFLOW = 2.0**-125
_HALF_UNIT, _LARGEST_HALF = 2.0**-11, 65504.0


class RoundingUnits(NamedTuple):
    """Unit roundoffs of a computation."""

    inner: float
    """Unit roundoff of sums and functions."""
    result: float
    """Unit roundoff of the element type of the result, in which a kernel may also store an
    intermediate value.
    """
    operand: float = 0.0
    """Unit roundoff of the operands of products, if they are rounded before, as for TF32."""
    partial: float = 0.0
    """Unit roundoff of partial sums, if they are stored in the type of the result."""

    def sum_error(self, count: int) -> float:
        """Return the error bound of a sum of `count` products, relative to the sum of the absolute
        values.
        """
        return _gamma(count, self.inner) + 2 * self.operand + self.partial


def _gamma(count: int, unit: float) -> float:
    share = count * unit
    return share / (1 - share) if share < 1 else math.inf


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """Arguments of a replayed call, with tensors in float64."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def with_magnitudes(self) -> ReplayedCall:
        """Return the call with all tensors and numbers replaced by their absolute values."""
        return ReplayedCall(
            [_magnitude(value) for value in self.args],
            {
                name: _magnitude(value) if isinstance(value, Tensor) else value
                for name, value in self.kwargs.items()
            },
        )


def _magnitude(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.abs() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return [_magnitude(part) for part in value]
    return value


class ReplayedResult(NamedTuple):
    """One result of a replayed call."""

    value: Tensor
    error: Tensor
    """Bound of the absolute error of each element, before it is rounded to the type of
    the result.
    """


ReplayRule = Callable[[ReplayedCall, RoundingUnits], list[ReplayedResult]]


def _list_results(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)]


def _moved(function: Callable[..., Any]) -> ReplayRule:
    def replay(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
        values = _list_results(function(*call.args, **call.kwargs))
        return [ReplayedResult(each, torch.zeros_like(each)) for each in values]

    return replay


def _cast(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    """Replay a conversion to any type: the only error is the rounding to that type."""
    value: Tensor = call.args[0]
    return [ReplayedResult(value, torch.zeros_like(value))]


def _elementwise(
    function: Callable[..., Any], count: float, *, of_input: bool = False
) -> ReplayRule:
    """Return a rule with an error of `count` units of the result, or of the first input."""

    def replay(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
        value = function(*call.args, **call.kwargs)
        first = torch.as_tensor(call.args[0], dtype=torch.float64).abs()
        magnitude = first if of_input else value.abs()
        # If an exponential inside the function overflows, the result is 0, which is wrong by at
        # most this much.
        return [ReplayedResult(value, magnitude * (count * units.inner) + first * _UNDERFLOW)]

    return replay


def _added(sign: int) -> ReplayRule:
    def replay(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
        first, second = (torch.as_tensor(each, dtype=torch.float64) for each in call.args[:2])
        alpha = call.get(2, "alpha", 1)
        value = first + sign * alpha * second
        if alpha == 1:
            return [ReplayedResult(value, value.abs() * (2 * units.inner))]
        # The factor and the product may each be rounded to the type of the result.
        product = (alpha * second).abs()
        error = product * (2 * units.result) + (first.abs() + product) * (2 * units.inner)
        return [ReplayedResult(value, error)]

    return replay


def _summed(function: Callable[..., Any], count: Callable[[ReplayedCall], int]) -> ReplayRule:
    def replay(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
        value = function(*call.args, **call.kwargs)
        larger = call.with_magnitudes()
        magnitude = function(*larger.args, **larger.kwargs)
        return [ReplayedResult(value, magnitude * units.sum_error(count(call) + 2))]

    return replay


def _count_reduced(call: ReplayedCall) -> int:
    """Return the maximum number of elements that one result of `sum` or `mean` is made of."""
    tensor: Tensor = call.args[0]
    dims = call.get(1, "dim")
    if dims is None:
        return tensor.numel()
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return math.prod(tensor.shape[dim] for dim in listed) if listed else tensor.numel()


def _softmax(is_log: bool) -> ReplayRule:
    def replay(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
        tensor: Tensor = call.args[0]
        dim = call.get(1, "dim")
        below = tensor.amax(dim, keepdim=True) - tensor
        weights = torch.softmax(tensor, dim)
        mean_below = (weights * torch.nan_to_num(below, posinf=0.0)).sum(dim, keepdim=True)
        relative = units.inner * (tensor.shape[dim] + 16 + below + mean_below)
        if is_log:
            value = torch.log_softmax(tensor, dim)
            # The maximum and the logarithm of the sum may be stored in between in the type of the
            # result.
            normal = tensor.amax(dim, keepdim=True).abs() + torch.logsumexp(tensor, dim, True).abs()
            error = relative + 2 * units.result * (normal + value.abs())
            return [ReplayedResult(value, error)]
        error = (relative + 2 * units.result) * weights
        return [ReplayedResult(weights, torch.nan_to_num(error, nan=0.0))]

    return replay


def _normalise(tensor: Tensor, dims: list[int], eps: float, units: RoundingUnits) -> ReplayedResult:
    """Return a tensor minus its mean, divided by its deviation; the bound holds for any way to
    compute the variance.
    """
    count = math.prod(tensor.shape[dim] for dim in dims)
    mean = tensor.mean(dims, keepdim=True)
    variance = tensor.var(dims, keepdim=True, unbiased=False)
    deviation = (variance + eps).sqrt()
    value = (tensor - mean) / deviation
    spread = _gamma(count + 4, units.inner)
    condition = 1 + tensor.square().mean(dims, keepdim=True) / (variance + eps)
    error = (
        spread * tensor.abs().mean(dims, keepdim=True) / deviation
        + value.abs() * (spread * condition + 8 * units.inner)
        + units.inner * tensor.abs() / deviation
    )
    return ReplayedResult(value, error)


def _scale(
    normal: ReplayedResult, weight: Tensor | None, bias: Tensor | None, units: RoundingUnits
) -> list[ReplayedResult]:
    value, error = normal
    if weight is not None:
        value, error = value * weight, error * weight.abs()
    if bias is not None:
        value, error = value + bias, error + 2 * units.inner * bias.abs()
    return [ReplayedResult(value, error + 2 * units.inner * value.abs())]


def _layer_norm(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    tensor: Tensor = call.args[0]
    dims = list(range(-len(call.get(1, "normalized_shape")), 0))
    normal = _normalise(tensor, dims, call.get(4, "eps", 1e-5), units)
    return _scale(normal, call.get(2, "weight"), call.get(3, "bias"), units)


def _rms_norm(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    shape = call.get(1, "normalized_shape")
    eps = call.get(3, "eps")
    if eps is None:
        raise ValueError("eps is not given, and its default depends on the type of the input")
    value = functional.rms_norm(call.args[0], list(shape), None, eps)
    count = math.prod(shape) + 4
    error = value.abs() * (_gamma(count, units.inner) + 8 * units.inner)
    return _scale(ReplayedResult(value, error), call.get(2, "weight"), None, units)


def _batch_norm(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    tensor: Tensor = call.args[0]
    mean, variance = call.get(1, "running_mean"), call.get(2, "running_var")
    eps = call.get(7, "eps", 1e-5)
    shape = [1, -1, *([1] * (tensor.dim() - 2))]

    def spread(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.reshape(shape)

    if call.get(5, "training", False):
        dims = [dim for dim in range(tensor.dim()) if dim != 1]
        normal = _normalise(tensor, dims, eps, units)
        centre = tensor.mean(dims, keepdim=True)
        deviation = (tensor.var(dims, keepdim=True, unbiased=False) + eps).sqrt()
    else:
        deviation = (variance.reshape(shape) + eps).sqrt()
        centre = mean.reshape(shape)
        error = 8 * units.inner * (tensor.abs() + centre.abs()) / deviation
        normal = ReplayedResult((tensor - centre) / deviation, error)
    weight, bias = spread(call.get(3, "weight")), spread(call.get(4, "bias"))
    # The factor and the summand of each channel may be stored in the type of the result.
    factor = (1 if weight is None else weight.abs()) / deviation
    stored = (tensor.abs() + centre.abs()) * factor + (0 if bias is None else bias.abs())
    return [
        each._replace(error=each.error + 2 * units.result * stored)
        for each in _scale(normal, weight, bias, units)
    ]


def _squared_loss(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    value = functional.mse_loss(*call.args, **call.kwargs)
    # All terms are positive, so the sum of absolute values equals the result; the squares may be
    # stored in the type of the result.
    squares = (call.args[0] - call.args[1]).square()
    if units.result == _HALF_UNIT and bool((squares >= _LARGEST_HALF).any()):
        return [ReplayedResult(value, torch.full_like(value, math.inf))]
    relative = _gamma(call.args[0].numel() + 6, units.inner) + 2 * units.result
    return [ReplayedResult(value, value * relative)]


def _cross_entropy(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    value = functional.cross_entropy(*call.args, **call.kwargs)
    scores: Tensor = call.args[0]
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    single = units.inner * (classes + 16 + 4 * float(scores.abs().max()))
    rows = scores.numel() // max(classes, 1)
    reduction = call.kwargs.get("reduction", "mean")
    error = single * (rows if reduction == "sum" else 1) + value.abs() * _gamma(rows, units.inner)
    return [ReplayedResult(value, torch.zeros_like(value) + error)]


def _attention(call: ReplayedCall, units: RoundingUnits) -> list[ReplayedResult]:
    if call.get(4, "dropout_p", 0.0):
        raise ValueError("dropout_p is not 0, and dropout is random")
    query, key, given = call.args[:3]
    attend = functional.scaled_dot_product_attention
    value = attend(*call.args, **call.kwargs)
    scale = call.kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
    keys = key.abs().transpose(-2, -1)
    if call.kwargs.get("enable_gqa"):
        keys = keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3)
    scores = (query.abs() @ keys) * abs(scale)
    shift = scores.amax(-1, keepdim=True) * units.sum_error(query.shape[-1] + 4)
    rest = list(call.args[3:])
    magnitude = attend(query, key, given.abs(), *rest, **call.kwargs)
    relative = 2 * shift + units.sum_error(key.shape[-2] + 16) + units.result
    return [ReplayedResult(value, magnitude * relative)]


def _last(call: ReplayedCall) -> int:
    return int(call.args[0].shape[-1])


def _inner_of(place: int) -> Callable[[ReplayedCall], int]:
    return lambda call: int(call.args[place].shape[-1]) + 1


def _kernel(call: ReplayedCall) -> int:
    weight: Tensor = call.get(1, "weight")
    return weight[0].numel() + 1


def _swapped(rule: ReplayRule) -> ReplayRule:
    return lambda call, units: rule(ReplayedCall([call.args[1], call.args[0]]), units)


_MOVES_TEXT = """
reshape permute transpose t squeeze unsqueeze cat concat stack split chunk index_select gather
narrow select unbind clamp clip max min maximum minimum where neg abs flip roll tril triu
masked_fill swapaxes movedim flatten repeat_interleave take_along_dim
"""
_METHODS_TEXT = "view expand expand_as repeat"
_WINDOWS_TEXT = "embedding max_pool1d max_pool2d pad relu"
_CASTS_TEXT = "float half bfloat16 double to type type_as contiguous clone detach"
_QUOTIENTS_TEXT = "div divide true_divide sqrt rsqrt reciprocal square"
_CURVES_TEXT = """
exp exp2 expm1 log log2 log10 log1p tanh sigmoid erf erfc sin cos tan atan
"""
_ACTIVATIONS_TEXT = "leaky_relu silu elu selu softplus logsigmoid hardswish hardsigmoid"
_CANCELLING_TEXT = "gelu mish"
"""Activations in which a difference cancels, so that the error is relative to the input."""
_PRODUCTS_TEXT = "matmul mm bmm mv dot"
_CONVOLUTIONS_TEXT = "conv1d conv2d conv3d"
TEXT_CHOICES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gelu": ("approximate", ("tanh",)),
    "mse_loss": ("reduction", ("sum", "none")),
    "cross_entropy": ("reduction", ("sum", "none")),
    "div": ("rounding_mode", ("trunc", "floor")),
    "pad": ("mode", ("reflect", "replicate", "circular")),
}
"""For each call: its argument that is a text, and the allowed values other than the default."""
CAST_APIS = frozenset(_CASTS_TEXT.split())
"""Calls that are replayed from their first argument alone."""


def _make_rules() -> dict[str, ReplayRule]:
    """Return the replay rule of each API by its name."""
    rules: dict[str, ReplayRule] = dict.fromkeys(CAST_APIS, _cast)
    rules |= {name: _moved(getattr(torch, name)) for name in _MOVES_TEXT.split()}
    rules |= {name: _moved(getattr(Tensor, name)) for name in _METHODS_TEXT.split()}
    rules |= {name: _moved(getattr(functional, name)) for name in _WINDOWS_TEXT.split()}
    rules |= dict.fromkeys(("mul", "multiply", "rmul"), _elementwise(torch.mul, 2))
    rules |= {name: _elementwise(getattr(torch, name), 4) for name in _QUOTIENTS_TEXT.split()}
    rules |= {name: _elementwise(getattr(torch, name), 16) for name in _CURVES_TEXT.split()}
    for names, of_input in ((_ACTIVATIONS_TEXT, False), (_CANCELLING_TEXT, True)):
        for name in names.split():
            rules[name] = _elementwise(getattr(functional, name), 16, of_input=of_input)
    rules |= {name: _summed(getattr(torch, name), _last) for name in _PRODUCTS_TEXT.split()}
    for name in _CONVOLUTIONS_TEXT.split():
        rules[name] = _summed(getattr(functional, name), _kernel)
    rules |= {name: _summed(getattr(torch, name), _count_reduced) for name in ("sum", "mean")}
    rules |= {name: _summed(getattr(torch, name), _inner_of(1)) for name in ("addmm", "baddbmm")}
    return rules | {
        "add": _added(1),
        "radd": _added(1),
        "sub": _added(-1),
        "subtract": _added(-1),
        "rsub": _swapped(_added(-1)),
        "truediv": _elementwise(torch.div, 4),
        "rtruediv": _swapped(_elementwise(torch.div, 4)),
        "pow": _elementwise(torch.pow, 32),
        "linear": _summed(functional.linear, _inner_of(0)),
        "softmax": _softmax(is_log=False),
        "log_softmax": _softmax(is_log=True),
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "batch_norm": _batch_norm,
        "mse_loss": _squared_loss,
        "cross_entropy": _cross_entropy,
        "scaled_dot_product_attention": _attention,
    }


_RULES = _make_rules()
REPLAYED_APIS = tuple(sorted(_RULES))
"""Names of the functions and methods that can be replayed, in any of torch's namespaces."""
_IN_PLACE_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}


def find_replay_rule(api: str) -> ReplayRule | None:
    """Return the rule of an API such as `linear`, `__mul__` or `add_`; None if it has none."""
    name = api.removeprefix("__").removesuffix("__") if api.startswith("__") else api
    name = _IN_PLACE_OPERATORS.get(name, name).removesuffix("_")
    return _RULES.get(name)


def compute_replay(
    rule: ReplayRule, args: Sequence[Any], kwargs: Mapping[str, Any], units: RoundingUnits
) -> list[ReplayedResult]:
    """Return the results of a call, computed on the CPU from arrays, numbers and texts.

    Raises the errors of torch for arguments that do not fit.
    """
    call = ReplayedCall(
        [_make_tensor(value) for value in args],
        {name: _make_tensor(value) for name, value in kwargs.items()},
    )
    with torch.no_grad(), torch.device("cpu"):
        return rule(call, units)


def _make_tensor(value: Any) -> Any:
    """Return an array as a tensor, floating-point numbers in float64 and integers in int64."""
    if isinstance(value, list):
        return [_make_tensor(part) for part in cast("list[Any]", value)]
    if not isinstance(value, np.ndarray):
        return value
    array = cast("np.ndarray[Any, Any]", value)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(array.dtype.kind)
    # The array is copied, because torch warns about arrays that must not be written to.
    return torch.from_numpy(np.array(array, wide or array.dtype))
