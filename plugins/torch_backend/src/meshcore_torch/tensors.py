"""Local work on 1-D tensors: dtypes, numpy values, block-wise sums. No communication.

[Note: blocks] torch has no kernel for ``float32 += bfloat16`` on CPU that does not first make a
full float32 copy. Whatever needs a temporary here works in blocks, so that memory which the ledger
does not know stays below a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from meshcore.backend import ALL_DTYPES, numpy_dtype

_CPU_BLOCK_NUMEL = 1 << 16  # two float32 operands stay in the second-level cache
_CUDA_BLOCK_NUMEL = 1 << 22  # enough to fill the device with one kernel

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ALL_DTYPES}
_DIRECT_MATH = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Addition of unsigned ints modulo 2**n is that of signed ones, which torch has kernels for.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def torch_dtype(name: str) -> torch.dtype:
    """The ``torch.dtype`` of a name."""
    return _TORCH_DTYPES[name]


def block_numel(tensor: torch.Tensor) -> int:
    """Elements of one block. See [Note: blocks]."""
    return _CUDA_BLOCK_NUMEL if tensor.is_cuda else _CPU_BLOCK_NUMEL


def to_numpy(tensor: torch.Tensor) -> Any:
    """A copy as 1-D ``numpy.ndarray``, low-precision floats through ``ml_dtypes``."""
    name = str(tensor.dtype).removeprefix("torch.")
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    host.copy_(tensor.detach())
    return host.view(torch.uint8).numpy().view(numpy_dtype(name))


def value_pieces(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """A 1-D value as (offset, tensor) pieces, without copying more than a block at a time.

    Args:
        value: a tensor, a numpy array, or what ``numpy.asarray`` takes.
    """
    if isinstance(value, torch.Tensor):
        yield 0, value.detach()
        return
    array = np.asarray(value)
    if array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative:
        yield 0, _shared(array)
        return
    # torch shares only memory that it may write to, in C order.
    for low in range(0, array.shape[0], _CPU_BLOCK_NUMEL):
        part = array[low : low + _CPU_BLOCK_NUMEL]
        yield low, _shared(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the memory of a contiguous, writable array of any known dtype."""
    return torch.from_numpy(array.view(np.uint8)).view(torch_dtype(array.dtype.name))


def add_in_place(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target += value`` in the target's dtype; temporaries are one block at most."""
    signed = _SIGNED.get(target.dtype)
    if target.dtype == value.dtype and target.dtype not in _FLOAT8 and signed is None:
        target.add_(value)
        return
    step = block_numel(target)
    for low in range(0, target.shape[0], step):
        part = target[low : low + step]
        addend = value[low : low + step].to(device=target.device, dtype=target.dtype)
        if signed is not None:
            part.view(signed).add_(addend.view(signed))
        elif target.dtype in _FLOAT8:
            part.copy_(part.to(torch.float32).add_(addend.to(torch.float32)))
        else:
            part.add_(addend)


def scale_in_place(target: torch.Tensor, factor: float) -> None:
    """``target *= factor``, computed in float32 or wider; temporaries are one block at most."""
    if target.dtype in _DIRECT_MATH:
        target.mul_(factor)
        return
    wide = torch.float32 if target.dtype in _FLOAT8 else torch.float64
    step = block_numel(target)
    for low in range(0, target.shape[0], step):
        part = target[low : low + step]
        part.copy_(part.to(wide).mul_(factor))


def sum_parts(
    parts: Sequence[torch.Tensor], into: torch.Tensor, *, scale: float, add: bool
) -> None:
    """``into = scale * sum(parts)``, or ``into += ...`` with ``add``; in the order of the parts.

    Every part is cast to the dtype of ``into`` before it is added, so that the sum has that
    precision. Parts and ``into`` have one length.
    """
    step = block_numel(into)
    numel = into.shape[0]
    block = min(step, numel)
    sums = torch.empty(block, dtype=into.dtype, device=into.device) if add else into
    casts = torch.empty(
        block if parts[0].dtype != into.dtype else 0, dtype=into.dtype, device=into.device
    )
    for low in range(0, numel, step):
        high = min(low + step, numel)
        out = sums[: high - low] if add else into[low:high]
        out.copy_(parts[0][low:high])
        for part in parts[1:]:
            addend = part[low:high]
            if addend.dtype != into.dtype:
                addend = casts[: high - low].copy_(addend)
            out.add_(addend)
        if scale != 1.0:
            out.mul_(scale)
        if add:
            into[low:high].add_(out)


def square_sum(tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sum of squares over ranges of a tensor as a 0-dim float64 tensor on its device.

    Elements outside the ranges are never read. Ranges are packed into blocks of float64, so that
    many small ones cost one copy each and the squares do not overflow.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    numel = sum(stop - start for start, stop in ranges)
    size = min(block_numel(tensor), numel)
    block = torch.empty(size, dtype=torch.float64, device=tensor.device)
    filled = 0
    for start, stop in ranges:
        while start < stop:
            count = min(stop - start, size - filled)
            block[filled : filled + count].copy_(tensor[start : start + count])
            filled += count
            start += count
            if filled == size:
                total += torch.dot(block, block)
                filled = 0
    if filled:
        total += torch.dot(block[:filled], block[:filled])
    return total
