"""The torch backend: SPMD, one process a rank, over plain 1-D tensors.

An array is the tensor that holds this rank's part. Ids of the mesh are global ranks. Tensors are
changed in place: the successor of a consumed array is the same tensor, except that ``free`` empties
the tensor that it is given, so that using it again fails loudly.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshcore import BackendError, ClosedError, SpecError
from meshcore.backend import Array, AxisRoles, BufferSpec, Memory, TransferProfile, move_kind
from meshcore_torch import storage, tensors
from meshcore_torch.control import exchange_payloads
from meshcore_torch.flights import Flight, SideStream, StreamFlight
from meshcore_torch.groups import Group, GroupSet
from meshcore_torch.moves import PURPOSES, Move


class TorchBackend:
    """One rank of a mesh of torch processes. Made by ``meshcore.create_backend("torch", mesh)``.

    Attributes:
        local_ranks: this process's global rank, or () outside the mesh.
        device: where ``Memory.DEVICE`` is; ``Memory.HOST`` is pinned beside CUDA, and plain memory
            on the CPU.
        profile: the forms that moves take.

    A failed collective leaves its groups unusable: close the backend. Errors of NCCL itself do not
    come back through ``wait``; its watchdog ends the process.
    """

    name = "torch"

    def __init__(
        self,
        roles: AxisRoles,
        rank: int,
        *,
        device: torch.device,
        groups: GroupSet,
        profile: TransferProfile,
    ) -> None:
        self.roles = roles
        self.mesh = roles.mesh
        self.local_ranks: tuple[int, ...] = (rank,) if roles.mesh.contains(rank) else ()
        self.device = device
        self.profile = profile
        self._rank = rank
        self._groups = groups
        self._index = roles.shard_index(rank) if self.local_ranks else 0
        self._flights: dict[int, Flight | StreamFlight] = {}
        self._side = SideStream(device) if device.type == "cuda" else None
        self._closed = False
        self._has_failed = False

    @property
    def group_count(self) -> int:
        """Communicators that this process takes part in, made by this backend and still there."""
        return len(self._groups)

    # --- storage --------------------------------------------------------------------------

    def empty(self, spec: BufferSpec, into: torch.Tensor | None = None) -> torch.Tensor:
        """Storage with any content; a shell is returned as it is.

        Raises:
            MemoryError: there is none.
        """
        self._require_usable()
        if into is not None:
            return self._local(into, spec)
        return storage.allocate(spec, self.roles.shards, self.device)

    def zeros(self, spec: BufferSpec, into: torch.Tensor | None = None) -> torch.Tensor:
        """Storage filled with zeros, padding too."""
        with torch.no_grad():
            return self.empty(spec, into).zero_()

    def free(self, array: torch.Tensor) -> torch.Tensor | None:
        """Give the storage up, or return a shell over it where the profile keeps shells.

        ``array`` has no elements afterwards. Views from ``read`` keep the storage alive, or see
        what it is used for next.
        """
        self._require_member()
        self._settle_quietly(array)
        memory = Memory.DEVICE if array.device.type == self.device.type else Memory.HOST
        # A late message of a failed collective may still arrive in its buffers.
        keeps = memory in self.profile.shells and not (self._has_failed or self._closed)
        shell = array.detach() if keeps else None
        storage.take_from(array)
        return shell

    def drop(self, shell: torch.Tensor) -> None:
        """Give a shell's storage up."""
        self._require_member()
        storage.take_from(shell)

    def nbytes(self, array: torch.Tensor) -> dict[int, int]:
        """Bytes of the tensor's storage; 0 once freed."""
        self._require_member()
        return {self._rank: array.untyped_storage().nbytes()}

    # --- moves ----------------------------------------------------------------------------

    def redistribute(
        self,
        array: torch.Tensor,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: torch.Tensor | None,
        scratch: Sequence[torch.Tensor] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> torch.Tensor:
        """Start a move; sums over shards add in mesh order, in the destination's dtype."""
        source = self._local(array, src)
        target = self.empty(dst) if into is None else self._local(into, dst)
        if src.numel == 0:
            return target
        kind, group, form = move_kind(src, dst, self.roles), None, ""
        if self.roles.group_size(kind) > 1:
            group = self._groups.get(PURPOSES[kind])
            form = self.profile.form(src, dst, self.roles).name
        move = Move(
            kind,
            src,
            dst,
            form=form,
            shards=self.roles.shards,
            index=self._index,
            source=source,
            target=target,
            scratch=scratch,
            scale=scale,
            add=add,
        )
        try:
            with torch.no_grad():
                flight = self._launch(move, group)
        except BackendError:
            self._has_failed = True
            raise
        if flight is not None:
            self._flights[id(target)] = flight
        return target

    def _launch(self, move: Move, group: Group | None) -> Flight | StreamFlight | None:
        if self._side is None or not (move.source.is_cuda or move.target.is_cuda):
            works, finish = move.start(group)
            return Flight(move, group, works, finish) if works else None
        with self._side.issue():
            works, finish = move.start(group)
            Flight(move, group, works, finish).complete()
        host = not (move.source.is_cuda and move.target.is_cuda)
        return self._side.launched(move.target, host=host)

    def wait(self, array: torch.Tensor) -> None:
        """Complete the move into this tensor, if one is in flight.

        Raises:
            PeerError: a peer is gone or late; the tensor's content is undefined.
        """
        self._require_member()
        flight = self._flights.pop(id(array), None)
        if flight is None:
            return
        try:
            with torch.no_grad():
                flight.complete()
        except BaseException:
            self._has_failed = True
            raise

    def _settle_quietly(self, array: torch.Tensor) -> None:
        """Let what is in flight land before its buffer goes; how it ended matters to nobody."""
        try:
            self.wait(array)
        except BackendError:
            return

    # --- content --------------------------------------------------------------------------

    def write(
        self,
        array: torch.Tensor,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """Write or add numpy arrays or tensors of any device; changes the tensor in place."""
        target = self._local(array, spec)
        if isinstance(values, Mapping):
            if not set(values) <= set(self.local_ranks):
                raise SpecError(
                    f"values by rank name {sorted(values)}; this process holds rank {self._rank}"
                )
            if self._rank not in values:
                return target
            values = values[self._rank]
        with torch.no_grad():
            for offset, piece in tensors.value_pieces(values):
                low = start + offset
                part = target[low : low + piece.shape[0]]
                if add:
                    tensors.add_in_place(part, piece)
                else:
                    part.copy_(piece)
        return target

    def read(
        self, array: torch.Tensor, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> torch.Tensor:
        """A view of the elements, or a clone."""
        part = self._local(array, spec)[start:stop]
        if not copy:
            return part
        with torch.inference_mode(False):
            return part.clone()

    def scale(self, array: torch.Tensor, spec: BufferSpec, factor: float) -> torch.Tensor:
        """Multiply in place, computing in float32 or wider."""
        target = self._local(array, spec)
        with torch.no_grad():
            tensors.scale_in_place(target, factor)
        return target

    def to_numpy(self, array: torch.Tensor) -> dict[int, Any]:
        """A copy of what this rank holds."""
        self.wait(array)
        return {self._rank: tensors.to_numpy(array)}

    # --- scalars and control --------------------------------------------------------------

    def square_sum(
        self, array: torch.Tensor, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """This rank's share as a 0-dim float64 tensor on the array's device."""
        local = self._local(array, spec)
        ranges: list[tuple[int, int]] = []
        if self.roles.replica_index(self._rank) == 0:
            shard = spec.numel // self.roles.shards
            low = self._index * shard
            offset = low if spec.placement.is_split else 0
            clipped = ((max(a, low), min(b, low + shard)) for a, b in valid)
            ranges = [(a - offset, b - offset) for a, b in clipped if a < b]
        with torch.no_grad():
            return tensors.square_sum(local, ranges)

    def total(self, parts: Sequence[torch.Tensor]) -> float:
        """Sum of all ranks' shares, added in mesh order on every rank."""
        share = sum(float(part) for part in parts)
        answers = self.exchange(struct.pack("<d", share))
        return float(sum(struct.unpack("<d", answers[rank])[0] for rank in self.mesh.ids))

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> dict[int, bytes]:
        """All-gather over the whole mesh: one collective up to 248 bytes, a second one beyond.

        Raises:
            PeerError: a peer is gone or late.
        """
        self._require_usable()
        own = self._own_payload(payload)
        if self.mesh.size == 1:
            return {self._rank: own}
        return exchange_payloads(self._groups.get("control"), own)

    def _own_payload(self, payload: bytes | Mapping[int, bytes]) -> bytes:
        if not isinstance(payload, Mapping):
            return bytes(payload)
        if set(payload) != set(self.local_ranks):
            raise SpecError(
                f"a payload by rank names exactly the local ranks {list(self.local_ranks)}; it "
                f"names {sorted(payload)}"
            )
        return bytes(payload[self._rank])

    def close(self) -> None:
        """Land what is in flight and destroy the groups that this backend made; idempotent."""
        if self._closed:
            return
        for flight in list(self._flights.values()):
            self._settle_quietly(flight.target)
        self._closed = True
        self._groups.close()

    # --- guards ---------------------------------------------------------------------------

    def _require_member(self) -> None:
        if not self.local_ranks:
            self.roles.require_member(self.local_ranks)

    def _require_usable(self) -> None:
        self._require_member()
        if self._closed:
            raise ClosedError("this torch backend is closed; make a new one")

    def _local(self, array: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
        """The array, complete, after a check that it is what the spec says."""
        self._require_usable()
        if id(array) in self._flights:
            self.wait(array)
        want = spec.local_numel(self.roles.shards)
        if array.numel() == want:
            return array
        if array.numel() == 0:
            raise ClosedError(
                "an array was used after a verb consumed or freed it; rebind to what each verb "
                "returned"
            )
        raise SpecError(
            f"a tensor of {array.numel()} elements was passed as {spec} ({want} a rank)"
        )
