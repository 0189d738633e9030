"""One name for an API in all frameworks. Pure.

Functions of torch itself count as functional where MindSpore has them, and what MindSpore calls
otherwise is called as there (names that troubleshooter 1.0.17 equates; api-dump.md A.6). They are
kept as that tool has them, gaps and all, or its rows would be others; `rankdump diff` goes by
`diff.pairing.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping

_SPEAK_TORCH = ("pytorch", "mindtorch")

_TORCH_WORDS = """
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
_TORCH_FUNCTIONS = frozenset(_TORCH_WORDS.split())
"""Functions that are `torch.` in torch, and `ops.` under the same name in MindSpore."""

_RENAMED: Mapping[str, str] = {
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


def shared_name(framework: str, kind: str, api: str) -> str:
    """Return what a framework's API is called everywhere.

    >>> shared_name("pytorch", "NN", "Linear"), shared_name("mindspore", "NN", "Dense")
    ('nn_Dense', 'nn_Dense')
    >>> shared_name("pytorch", "Torch", "matmul")
    'functional_matmul'
    """
    name = f"{kind.lower()}_{api}"
    if framework not in _SPEAK_TORCH:
        return name
    if kind == "Torch" and api in _TORCH_FUNCTIONS:
        return f"functional_{api}"
    return _RENAMED.get(name, name)
