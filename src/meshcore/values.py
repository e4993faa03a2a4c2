"""Checks of the arrays that a user hands in: any library's, by shape and dtype name."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from meshcore.dtypes import dtype_name, numpy_dtype
from meshcore.errors import DtypeMismatchError, ShapeMismatchError
from meshcore.layout import ParamSpec


class FlatSize:
    """Stands for a value where there is no data: on backends that keep bytes only."""

    __slots__ = ("shape",)

    def __init__(self, numel: int) -> None:
        self.shape = (numel,)


def checked_flat(
    spec: ParamSpec,
    value: Any,
    *,
    dtypes: Collection[str],
    cast: bool,
    has_data: bool = True,
) -> Any:
    """The value as a 1-D array in C order, after its shape and dtype were checked.

    Numbers and nested lists have no dtype of their own and take the tensor's.

    Raises:
        ShapeMismatchError: another shape than the tensor's.
        DtypeMismatchError: a dtype that is not in ``dtypes``, and no ``cast``.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        import numpy as np

        value = np.asarray(value, dtype=numpy_dtype(spec.dtype))
    shape = tuple(int(dim) for dim in value.shape)
    if shape != spec.shape:
        raise ShapeMismatchError(
            f"tensor {spec.name!r} has the shape {spec.shape}; the value has {shape}; reshape it"
        )
    if not cast and dtype_name(value) not in dtypes:
        raise DtypeMismatchError(
            f"tensor {spec.name!r} takes {' or '.join(dtypes)}; the value is {dtype_name(value)}; "
            "convert it, or pass cast=True"
        )
    if not has_data:
        return FlatSize(math.prod(shape))
    return value.reshape(-1)
