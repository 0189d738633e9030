"""Names of torch's API calls: which of torch's overridable callables count as calls, and their
kinds.

A callable counts as a call if it computes or changes the shape. Callables that only query (`size`),
describe (`requires_grad_`), bring values in or out (`tensor`, `item`) or copy values unchanged
(`clone`) do not. Names are troubleshooter's if it lists the callable (release 1.0.17). Otherwise a
rule applies: a function of `torch.nn.functional` is `Functional`, a method of a tensor is `Tensor`,
any other function is `Torch`; a function in both namespaces is `Functional`. An operator that torch
implements in Python, as in `1 / x`, is not a call; the calls that it makes are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

# torch's stubs leave the functions of autograd partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


_NAMESPACE = "torch.nn.functional"
_BUILT_IN_NAMESPACE = "torch._C._nn"
_MODULE_PREFIX = "torch.nn.modules."
_CONTAINERS = ("torch.nn.modules.container", "torch.nn.modules.module")
_FUNCTION_MODULES_TEXT = """
AdaptiveLogSoftmaxWithLoss AlphaDropout BCELoss CosineSimilarity CrossMapLRN2d Embedding
EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d FractionalMaxPool3d GLU LogSoftmax
MultiLabelMarginLoss PairwiseDistance PixelUnshuffle RNNBase RNNCellBase Softplus
"""
"""Modules that troubleshooter does not list: instead of them, the functions that they call are
recorded.
"""
_FUNCTION_MODULES = frozenset(_FUNCTION_MODULES_TEXT.split())

_QUERY_NAMES_TEXT = """
__array__ __array_wrap__ __bool__ __complex__ __contains__ __cuda_array_interface__ __deepcopy__
__delete__ __dir__ __dlpack__ __dlpack_device__ __float__ __format__ __get__ __getitem__ __hash__
__index__ __int__ __iter__ __len__ __long__ __nonzero__ __reduce__ __reduce_ex__ __repr__
__reversed__ __set__ __setstate__ align_names as_tensor asarray backward can_cast contiguous cpu
cuda data_ptr dense_dim detach detach_ device dim dim_order element_size empty empty_like
empty_permuted empty_strided frombuffer from_file from_numpy has_names ipu item itemsize
manual_seed module_load nbytes ndimension nelement npu numel numpy ones ones_like pin_memory
promote_types record_stream refine_names reinforce_names rename rename_ resolve_conj resolve_neg
result_type scalar_tensor share_memory_ size sparse_dim storage storage_offset storage_type stride
tensor tolist to_dlpack untyped_storage vmap xpu zero_ zeros zeros_like
"""
_QUERY_NAMES = frozenset(_QUERY_NAMES_TEXT.split())
_TENSOR_QUERY_NAMES = frozenset(("clone", "apply_", "map_", "grad", "as_subclass"))
_AUTOGRAD_ENTRIES: tuple[object, ...] = (
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)
_QUERY_PREFIXES = ("is_", "_", "new_", "register_", "requires_", "retain", "get_", "set_", "sym_")
_COMPOSITE_OPERATORS: tuple[object, ...] = tuple(
    getattr(Tensor, f"__{name}__", None)
    for name in ["floordiv", "rdiv", "rfloordiv", "rlshift", "rmatmul", "rmod", "rpow", "rrshift"]
)
"""Operators that torch implements in Python with other calls."""


class TorchApi(NamedTuple):
    """API of a callable that counts as a call."""

    kind: str
    name: str
    op_type: str
    """Kind and name joined, such as `Tensor_permute`."""
    is_composite: bool = False
    """Whether the callable does not count itself, but the calls inside it do."""


@lru_cache(maxsize=1 << 12)
def make_torch_api(kind: str, name: str) -> TorchApi:
    """Return the API of a kind and name."""
    return TorchApi(kind, name, f"{kind}_{name}")


_BACKWARD_API = TorchApi("", "backward", "", is_composite=True)
"""API of the function that runs autograd, in which calls may be repeated."""


class TorchApiCatalogue(dict[Hashable, "TorchApi | None"]):
    """APIs by callable, cached; None for a callable that is not an API call."""

    def __init__(self) -> None:
        super().__init__()
        self._functional = _list_functional_names()

    def __missing__(self, function: Callable[..., Any]) -> TorchApi | None:
        """Return the API of a callable that is not cached yet."""
        found = self[function] = self._find_api(function)
        return found

    def _find_api(self, function: Callable[..., Any]) -> TorchApi | None:
        if function in _AUTOGRAD_ENTRIES:
            return _BACKWARD_API
        if function in _COMPOSITE_OPERATORS:
            return make_torch_api("Tensor", function.__name__)._replace(is_composite=True)
        name = self._functional.get(function)
        if name is not None:
            return make_torch_api("Functional", name)
        name = getattr(function, "__name__", "")
        if _is_query(name):
            return None
        if _is_method(function):
            return None if name in _TENSOR_QUERY_NAMES else make_torch_api("Tensor", name)
        module = str(getattr(function, "__module__", None) or "")
        if module.startswith(("torch.nn.init", "torch.autograd", "torch.overrides")):
            return None
        if module.startswith(("torch_npu", "torch._ops.npu")):
            return make_torch_api("NPU", name)
        if module in (_BUILT_IN_NAMESPACE, _NAMESPACE):
            return make_torch_api("Functional", name)
        # All overloads of an operator have one API.
        return (
            make_torch_api("Torch", name.partition(".")[0]) if module.startswith("torch") else None
        )


def find_module_api(module: Module) -> TorchApi | None:
    """Return the API of a module that counts as a call itself, as torch's own classes do; else
    None.
    """
    for kind in type(module).__mro__:
        if kind.__module__.startswith(_CONTAINERS) or kind.__name__ in _FUNCTION_MODULES:
            return None
        if kind.__module__.startswith(_MODULE_PREFIX):
            return make_torch_api("NN", kind.__name__)
    return None


def _list_functional_names() -> dict[Any, str]:
    """Return the functions of `torch.nn.functional` with their names there."""
    found: dict[Any, str] = {}
    for name, function in vars(functional).items():
        public = not name.startswith("_") and not isinstance(function, type)
        if public and getattr(function, "__module__", None) in (
            "torch",
            _BUILT_IN_NAMESPACE,
            _NAMESPACE,
        ):
            # Of several names the first one counts: later ones are aliases for old scripts.
            found.setdefault(function, name)
    return found


def _is_method(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__objclass__", None)
    if isinstance(owner, type) and issubclass(Tensor, owner):
        return True
    return getattr(function, "__module__", None) == "torch._tensor"


def _is_query(name: str) -> bool:
    if name.startswith("__"):
        return name in _QUERY_NAMES
    return not name or name in _QUERY_NAMES or name.startswith(_QUERY_PREFIXES)
