"""Dtype names: sizes, which have gradients, in what addends are summed, what numpy calls them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from meshcore.dtypes import ALL_DTYPES, dtype_name, is_floating, itemsize, numpy_dtype, sum_dtype
from meshcore.errors import SpecError


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_names_agree_with_numpy(dtype):
    concrete = numpy_dtype(dtype)
    assert concrete.itemsize == itemsize(dtype)
    assert dtype_name(np.zeros(1, concrete)) == dtype


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_floats_have_gradients(dtype):
    # ml_dtypes' floats are no sub-types of numpy's, but they all hold a half.
    holds_a_half = bool(float(np.array(0.5).astype(numpy_dtype(dtype))) == 0.5)
    assert is_floating(dtype) == holds_a_half


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
    ],
)
def test_addends_are_summed_in_float32_or_wider(dtype, expected):
    assert sum_dtype(dtype) == expected


def test_the_name_of_a_torch_dtype_has_no_prefix():
    class Tensor:
        dtype = "torch.bfloat16"  # what str() of a torch.dtype gives

    assert dtype_name(Tensor()) == "bfloat16"


@pytest.mark.parametrize("ask", [itemsize, is_floating, sum_dtype, numpy_dtype])
@pytest.mark.parametrize("dtype", ["float", "complex64", "", None, []])
def test_an_unknown_name_is_refused_with_the_known_ones(ask, dtype):
    shown = re.escape(repr(dtype))
    with pytest.raises(SpecError, match=f"dtype {shown} is not known; known are float64, .*bool"):
        ask(dtype)
