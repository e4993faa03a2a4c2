"""Where tensors come from, and how their memory is given up."""

from __future__ import annotations

import torch

from meshcore.backend import BufferSpec, Memory
from meshcore_torch.tensors import torch_dtype

_NO_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "overflowed")


def allocate(spec: BufferSpec, shards: int, device: torch.device) -> torch.Tensor:
    """One rank's part of a buffer, with any content; host memory is pinned beside CUDA.

    Args:
        spec: what the whole buffer is.
        shards: number of shards of a whole buffer.
        device: where device memory is.

    Raises:
        MemoryError: there is none, in whatever words torch says so.
    """
    on_host = spec.memory is Memory.HOST
    try:
        # A tensor made in inference mode could never be changed in place by training.
        with torch.inference_mode(False):
            return torch.empty(
                spec.local_numel(shards),
                dtype=torch_dtype(spec.dtype),
                device=torch.device("cpu") if on_host else device,
                pin_memory=on_host and device.type == "cuda",
            )
    except RuntimeError as error:
        if any(words in str(error).lower() for words in _NO_MEMORY_WORDS):
            raise MemoryError(f"torch has no memory for {spec}: {error}") from error
        raise


def take_from(tensor: torch.Tensor) -> None:
    """Take the storage away from a tensor; views of it keep theirs."""
    with torch.no_grad():
        tensor.set_()  # type: ignore[call-overload]  # the form without arguments is not annotated
