"""``JaxBackend``: collectives and storage of jax, bound to one mesh.

An array of the backend is one global ``jax.Array``; see ``grid.PARTITIONS`` for its shape.
Results of moves are always fresh arrays (``preallocates`` is False), a freed array gives its
storage back at once, and there are no shells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshcore import (
    AxisRoles,
    BackendOptions,
    BufferSpec,
    ClosedError,
    Memory,
    SpecError,
    TransferProfile,
    UnsupportedDtypeError,
)
from meshcore.backend import Array, MoveKind, move_kind
from meshcore_jax import programs
from meshcore_jax.binding import bind
from meshcore_jax.census import Census
from meshcore_jax.control import Exchange, payloads_of
from meshcore_jax.faults import translated
from meshcore_jax.norms import Norms
from meshcore_jax.values import written

_MAX_NUMEL = 2**31 - 1  # offsets are int32


def default_profile() -> TransferProfile:
    """How jax moves data, with the dtypes that it holds under the current ``jax_enable_x64``."""
    config: Any = jax.config  # its flags are not in its type
    x64 = bool(config.jax_enable_x64)
    known = TransferProfile(name="jax", preallocates=False)
    held = tuple(dtype for dtype in known.dtypes if x64 or not programs.needs_x64(dtype))
    return replace(known, dtypes=held)


class JaxBackend:
    """The jax backend; see ``meshcore.backend.Backend`` for what each verb promises.

    A rank is a position in ``jax.devices()``. Where the mesh spans several jax processes
    (``jax.distributed``), each of them makes the backend and calls the same moves in one order;
    a process without a device of the mesh has no local ranks, and its verbs raise.

    Args:
        roles: the mesh and the roles of its axes.
        options: ``device`` is a jax platform ("cpu", "gpu"; None is jax's default). ``extra`` knows
            ``sync`` (bool): complete each move before it returns. It is on by default on the CPU
            platform, where collectives that run ahead of each other can block for ever.

    Raises:
        MeshError: ids beyond the devices that there are.
        SpecError: unknown options.
        BackendError: no such platform, or several processes without ``jax.distributed``.
    """

    name = "jax"

    def __init__(self, roles: AxisRoles, options: BackendOptions) -> None:
        unknown = sorted(set(options.extra) - {"sync"})
        if unknown:
            raise SpecError(f"the jax backend has no options {unknown}; it knows ['sync']")
        self._binding = bind(roles, options.device)
        self.roles = roles
        self.mesh = roles.mesh
        self.local_ranks = self._binding.local_ranks
        self.profile = options.profile or default_profile()
        self._dtypes = frozenset(self.profile.dtypes) & frozenset(default_profile().dtypes)
        self._sync = bool(options.extra.get("sync", self._binding.platform == "cpu"))
        self._census = Census(self._binding)
        self._norms = Norms(self._binding)
        self._exchange: Exchange | None = None
        self._closed = False
        owners = self._binding.owners
        if self.local_ranks and len(owners) > 1:
            self._exchange = Exchange(roles, owners, options.timeout_seconds)

    @property
    def group_count(self) -> int:
        """Rank sets of the shard and replica axes (size > 1) that moves run over; 0 once closed.

        jax makes its communicators itself and tells nobody, so this counts what is used, not made.
        """
        if self._closed or not self.local_ranks:
            return 0
        roles = self.roles
        over_shards = roles.replicas if roles.shards > 1 else 0
        return over_shards + (roles.shards if roles.replicas > 1 else 0)

    # --- storage --------------------------------------------------------------------------

    def empty(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Zeros: jax gives no uninitialized storage."""
        return self.zeros(spec, into)

    def zeros(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Fresh zeros; a shell, which this backend never hands out itself, is given back."""
        self._check(spec)
        with translated(f"making {spec}"):
            array = programs.zeros_program(self._binding.local, spec)()
            array = self._binding.to_global(array, spec)
        if into is not None:
            into.delete()
        return self._census.add(array)

    def free(self, array: Array) -> None:
        """Delete the storage at once; freeing twice is fine."""
        array.delete()

    def drop(self, shell: Array) -> None:
        """The same as ``free``: there are no shells."""
        shell.delete()

    def wait(self, array: Array) -> None:
        """Block until the array is complete."""
        self._require_open()
        with translated("completing an operation"):
            jax.block_until_ready(array)

    # --- moves ----------------------------------------------------------------------------

    def redistribute(
        self,
        array: Array,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Array | None,
        scratch: Sequence[Array] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> Array:
        """One collective or transfer; with ``add`` in place, else always a fresh array.

        ``scratch`` is never needed: XLA plans its own temporaries.
        """
        self._check(dst)
        kind = move_kind(src, dst, self.roles)
        with translated(f"{kind.value} of {src} to {dst}"):
            if src.numel == 0:  # XLA refuses collectives without elements
                result = into if add else self.zeros(dst)
            elif kind is MoveKind.TRANSFER:
                result = jax.device_put(
                    array, self._binding.whole.sharding(dst.placement, dst.memory)
                )
            elif kind.is_sum:
                result = self._sum(kind, array, src, dst, into if add else None, scale)
            else:
                result = programs.move_program(self._binding.whole, kind, src, dst)(array)
            if self._sync:
                jax.block_until_ready(result)
        if into is not None and into is not result:
            into.delete()  # donated already, or a destination that was not needed
        return self._census.add(result)

    def _sum(
        self,
        kind: MoveKind,
        array: Array,
        src: BufferSpec,
        dst: BufferSpec,
        into: Array | None,
        scale: float,
    ) -> Array:
        factor = jnp.dtype(dst.dtype).type(scale)
        program = programs.sum_program(self._binding.whole, kind, src, dst, add=into is not None)
        return program(array, factor) if into is None else program(into, array, factor)

    # --- content --------------------------------------------------------------------------

    def write(
        self,
        array: Array,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> Array:
        """Write (or add) values in place on this process's devices; consumes ``array``.

        Values may be numpy arrays, torch tensors or jax arrays; the latter stay on their devices.
        The copy of the values on the devices is not counted anywhere and lives until it is used.
        """
        self._check(spec)
        with translated(f"writing into {spec}"):
            arguments, by_rank = written(self._binding, spec, values)
            if arguments[0].size == 0:
                return array
            program = programs.write_program(self._binding.local, spec, add=add, by_rank=by_rank)
            return self._consume(array, spec, program, np.int32(start), *arguments)

    def read(
        self, array: Array, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Array:
        """A fresh array with elements [start, stop), replicated over the mesh; never an alias."""
        self._require_open()
        with translated(f"reading {spec}"):
            program = programs.read_program(self._binding.local, spec.memory, stop - start)
            block = program(self._binding.to_local(array, spec), np.int32(start))
            return self._binding.to_global(
                block, BufferSpec(stop - start, spec.dtype, spec.placement)
            )

    def scale(self, array: Array, spec: BufferSpec, factor: float) -> Array:
        """Multiply in place, in fp32 or wider; consumes ``array``."""
        self._check(spec)
        with translated(f"scaling {spec}"):
            program = programs.scale_program(self._binding.local, spec)
            return self._consume(array, spec, program, programs.factor_for(spec, factor))

    def _consume(self, array: Array, spec: BufferSpec, program: Any, *arguments: Any) -> Array:
        local = self._binding.to_local(array, spec)
        result = self._binding.to_global(program(local, *arguments), spec)
        # jax keeps a donated array alive, silently, while another view of its storage exists.
        local.delete()
        array.delete()
        return self._census.add(result)

    # --- norms ----------------------------------------------------------------------------

    def square_sum(self, array: Array, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> Any:
        """A lazy (local ranks, 2, blocks) array: sums of squares, and the units they are in."""
        self._check(spec)
        with translated(f"summing squares of {spec}"):
            return self._norms.share(array, spec, valid)

    def total(self, parts: Sequence[Any]) -> float:
        """Sum of all shares in float64, in mesh order: the same float everywhere."""
        self._require_open()
        with translated("summing shares"):
            return self._norms.total(parts)

    # --- looking --------------------------------------------------------------------------

    def nbytes(self, array: Array) -> Mapping[int, int]:
        """Bytes of the blocks on this process's devices; {} once freed.

        An array that somebody else made, an optimizer's successor, counts in ``live_nbytes`` from
        here on.
        """
        sizes = self._census.nbytes(array)
        if sizes:
            self._census.add(array)
        return sizes

    def live_nbytes(self) -> Mapping[int, Mapping[Memory, int]]:
        """Bytes alive of arrays that were handed out, and of what ``nbytes`` was asked about.

        It does not see results of ``read``, values on their way into a buffer, XLA's temporaries,
        operations in flight on deleted arrays, numpy views, and arrays of others.
        """
        return self._census.alive()

    def to_numpy(self, array: Array) -> Mapping[int, Any]:
        """Copies of what each local rank holds, 1-D."""
        self._require_open()
        with translated("copying to numpy"):
            held = self._binding.by_rank(array)
            return {r: np.array(held[r], copy=True).reshape(-1) for r in self.local_ranks}

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Rank -> bytes of the whole mesh; between processes through jax's key-value store."""
        self._require_open()
        own = payloads_of(payload, self.local_ranks)
        return own if self._exchange is None else self._exchange(own)

    def close(self) -> None:
        """Refuse further verbs; jax's own communicators live as long as the process."""
        self._closed = True

    # --- inside ---------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this jax backend is closed; make a new one with create_backend")
        self.roles.require_member(self.local_ranks)

    def _check(self, spec: BufferSpec) -> None:
        self._require_open()
        if spec.dtype not in self._dtypes:
            hint = "set jax_enable_x64" if programs.needs_x64(spec.dtype) else "use another dtype"
            raise UnsupportedDtypeError(
                f"backend 'jax' cannot hold {spec}; it holds {sorted(self._dtypes)}; {hint}"
            )
        if spec.numel > _MAX_NUMEL:
            raise SpecError(
                f"{spec} is beyond the {_MAX_NUMEL} elements that jax can index with int32; plan "
                "smaller chunks"
            )
