"""Cases about bytes: they hold for ``null`` as for a backend with data."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from meshcore.backend import Backend, TransferProfile
from meshcore.spec import BufferSpec, Memory, Placement, reduce_path
from meshcore.testing.contract.model import (
    Case,
    assorted_specs,
    dtypes_of,
    expect_counts,
    expect_nbytes,
    give_up,
    move,
    numel_of,
    partial,
    replicated,
    require,
    sharded,
)


def opened_bytes_follow_the_spec(backend: Backend) -> None:
    """``empty`` and ``zeros`` take what the byte rule says, and not a byte more."""
    n = numel_of(backend)
    for spec in (*assorted_specs(backend, n), sharded(0), sharded(64 * n), replicated(64 * n)):
        for array in (backend.empty(spec), backend.zeros(spec)):
            expect_nbytes(backend, array, spec)
            give_up(backend, array)


def moved_bytes_follow_the_spec(backend: Backend) -> None:
    """Every move ends with the destination's bytes; source and scratch have theirs."""
    n = numel_of(backend)
    near, whole = sharded(n), replicated(n)
    far = replace(near, memory=Memory.HOST)
    chains = [[near, whole, near], [near, far, near]]
    chains += [[near, replicated(n, dtype)] for dtype in dtypes_of(backend, floating=True)[1:2]]
    chains += [
        [BufferSpec(n, "float32", placement) for placement in reduce_path(backend.roles, home)]
        for home in (Placement.SHARDED, Placement.REPLICATED)
    ]
    for chain in chains:
        array = backend.zeros(chain[0])
        for src, dst in pairwise(chain):
            out = move(backend, array, src, dst)
            give_up(backend, array)
            array = out
        give_up(backend, array)


def adding_takes_no_bytes(backend: Backend) -> None:
    """A sum into a live buffer leaves its bytes as they were."""
    n = numel_of(backend)
    source, total = backend.zeros(partial(n)), backend.zeros(replicated(n))
    for _ in range(2):
        total = move(backend, source, partial(n), replicated(n), into=total, scale=0.5, add=True)
    give_up(backend, source, total)


def content_takes_no_bytes(backend: Backend) -> None:
    """Writing, adding and scaling keep the bytes."""
    spec = replicated(numel_of(backend))
    array = backend.zeros(spec)
    array = backend.write(array, spec, 1, np.ones(3, np.float32))
    expect_nbytes(backend, array, spec)
    array = backend.write(array, spec, 0, np.ones(3, np.float32), add=True)
    expect_nbytes(backend, array, spec)
    array = backend.scale(array, spec, 2.0)
    expect_nbytes(backend, array, spec)
    give_up(backend, array)


def freed_bytes_are_gone_or_reserved(backend: Backend) -> None:
    """A freed buffer has no bytes; where the profile keeps shells, the shell has them all."""
    nothing = dict.fromkeys(backend.local_ranks, 0)
    for memory in Memory:
        spec = replace(sharded(numel_of(backend)), memory=memory)
        array = backend.zeros(spec)
        shell = backend.free(array)
        keeps = memory in backend.profile.shells
        require(
            (shell is not None) == keeps,
            f"the profile {'keeps' if keeps else 'leaves no'} shells in {memory.value} memory, and "
            f"free gave {shell!r}",
        )
        if shell is None:
            expect_counts(backend.nbytes(array), nothing, "a freed buffer")
            continue
        expect_nbytes(backend, shell, spec)
        again = backend.empty(spec, shell)
        expect_nbytes(backend, again, spec)
        shell = backend.free(again)
        require(shell is not None, f"the second free in {memory.value} memory left no shell")
        backend.drop(shell)
        expect_counts(backend.nbytes(shell), nothing, "a dropped shell")


def profile_is_pure_data(backend: Backend) -> None:
    """The profile goes through JSON, so that another process can account by it."""
    again = TransferProfile.from_json(backend.profile.to_json())
    require(again == backend.profile, f"{backend.profile} came back from JSON as {again}")


CASES = (
    Case(opened_bytes_follow_the_spec, needs_data=False),
    Case(moved_bytes_follow_the_spec, needs_data=False),
    Case(adding_takes_no_bytes, needs_data=False),
    Case(content_takes_no_bytes, needs_data=False),
    Case(freed_bytes_are_gone_or_reserved, needs_data=False),
    Case(profile_is_pure_data, needs_data=False),
)
