"""The control plane between jax processes: small payloads through the distributed client."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src import distributed  # the store has no public name yet; orbax and others use it too

from meshcore import AxisRoles, BackendError, SpecError
from meshcore_jax.faults import translated

_LENGTH = struct.Struct("<Q")


def payloads_of(payload: bytes | Mapping[int, bytes], ranks: Sequence[int]) -> dict[int, bytes]:
    """Rank -> bytes for the local ranks.

    Raises:
        SpecError: a mapping that misses a local rank or names another one.
    """
    if not isinstance(payload, Mapping):
        return {rank: bytes(payload) for rank in ranks}
    if set(payload) != set(ranks):
        raise SpecError(
            f"exchange got payloads of ranks {sorted(payload)}; this process speaks for "
            f"{sorted(ranks)}; give one for each of these"
        )
    return {rank: bytes(payload[rank]) for rank in ranks}


class Exchange:
    """All-gathers bytes between the processes of one mesh, in step, by numbered keys.

    Args:
        roles: names the mesh, so that backends of different meshes keep apart.
        owners: process index -> its ranks, in mesh order, of all processes that hold a rank.
        timeout_seconds: how long to wait for another process.
    """

    def __init__(
        self, roles: AxisRoles, owners: Mapping[int, tuple[int, ...]], timeout_seconds: float
    ) -> None:
        self._owners = dict(owners)
        self._ranks_of_mesh = roles.mesh.ids
        self._process = int(distributed.global_state.process_id)
        self._client: Any = distributed.global_state.client
        self._timeout_milliseconds = max(1, int(timeout_seconds * 1000))
        if self._client is None:
            raise BackendError(
                "the mesh spans several jax processes, but jax.distributed is not initialized; "
                "call meshcore_jax.launch.initialize_distributed first"
            )
        text = repr((roles.mesh.ids, roles.mesh.shape, roles.shard_axis, roles.replica_axis))
        mesh = f"meshcore/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        # Backends of one mesh are made in one order everywhere, so each process counts its own.
        instance = self._client.key_value_increment(f"{mesh}/made/{self._process}", 1)
        self._prefix = f"{mesh}/{instance}"
        self._step = 0

    def __call__(self, own: Mapping[int, bytes]) -> dict[int, bytes]:
        """Rank -> bytes of the whole mesh.

        Raises:
            PeerError: a process did not arrive in time.
        """
        step, self._step = self._step, self._step + 1
        with translated(f"exchange {step} (telling the other processes)"):
            self._client.key_value_set_bytes(
                self._key(step, self._process), _packed([own[r] for r in self._ranks()])
            )
        out: dict[int, bytes] = {}
        for process, ranks in self._owners.items():
            with translated(f"exchange {step} (waiting for jax process {process}, ranks {ranks})"):
                data = self._client.blocking_key_value_get_bytes(
                    self._key(step, process), self._timeout_milliseconds
                )
            out.update(zip(ranks, _unpacked(data), strict=True))
        self._forget(step - 1)
        return {rank: out[rank] for rank in self._ranks_of_mesh}

    def _ranks(self) -> tuple[int, ...]:
        return self._owners[self._process]

    def _key(self, step: int, process: int) -> str:
        return f"{self._prefix}/{step}/{process}"

    def _forget(self, step: int) -> None:
        """Every process has read step s - 1 by the time that all have written step s."""
        if step >= 0:
            self._client.key_value_delete(self._key(step, self._process))


def _packed(payloads: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)


def _unpacked(data: bytes) -> list[bytes]:
    out, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        out.append(data[at : at + length])
        at += length
    return out
