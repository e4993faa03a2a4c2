"""Dtype names: the only form in which dtypes cross the seam between core and backends."""

from __future__ import annotations

from typing import Any

from meshcore.errors import SpecError

_ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}

ALL_DTYPES: tuple[str, ...] = tuple(_ITEMSIZE)
"""Every dtype name that a plan may hold."""


def itemsize(dtype: str) -> int:
    """Bytes of one element.

    >>> itemsize("bfloat16")
    2
    """
    try:
        return _ITEMSIZE[dtype]
    except (KeyError, TypeError):  # TypeError: not even hashable
        raise SpecError(
            f"dtype {dtype!r} is not known; known are {', '.join(_ITEMSIZE)}; use one of these"
        ) from None


def is_floating(dtype: str) -> bool:
    """Whether a tensor of this dtype can have a gradient.

    >>> is_floating("bfloat16"), is_floating("int32")
    (True, False)
    """
    itemsize(dtype)
    return "float" in dtype


def sum_dtype(dtype: str) -> str:
    """The dtype in which addends of this dtype are summed: float32, or wider if they are.

    >>> sum_dtype("bfloat16"), sum_dtype("float64")
    ('float32', 'float64')
    """
    return dtype if itemsize(dtype) >= 4 else "float32"


def dtype_name(value: Any) -> str:
    """The name of an array's dtype, whatever library it comes from.

    >>> import numpy as np
    >>> dtype_name(np.zeros(2, np.float32))
    'float32'
    """
    name = str(value.dtype)
    return name.removeprefix("torch.")


def numpy_dtype(dtype: str) -> Any:
    """The ``numpy.dtype`` of a name; the low-precision floats come from ``ml_dtypes``.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    import numpy as np

    itemsize(dtype)
    if dtype == "bfloat16" or dtype.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)
