"""How the torch backend moves data, as data. Imports no torch.

[Note: forms] On gloo, one broadcast per shard is not slower than the built-in all-gather at any
size, 2 to 3 times faster at 64 MiB, and makes no full-sized temporary inside, on 2, 3 and 4 ranks;
so it is the only form for host memory. The built-in reduce-scatter is an all-reduce inside and sums
in the dtype of the addends; sending every rank its shards and summing there, in mesh order and in
float32, is 2 to 3 times faster and exact for 16-bit addends. One all-to-all does that with the
least latency but receives our own shard too; messages between peers need one shard less of scratch
and are as fast or faster from about 1 MiB on. The same form serves NCCL, where a built-in
reduce-scatter would need a full-sized float32 copy of 16-bit addends.
"""

from __future__ import annotations

from meshcore import SpecError
from meshcore.backend import Memory, MoveForm, MoveKind, Staging, TransferProfile

BROADCASTS = MoveForm("broadcasts")
"""Gather: every rank broadcasts its shard into its place in all buffers; any order of ranks."""

ALL_GATHER = MoveForm("all_gather")
"""Gather: the collective of that name, in place; for CUDA alone, host memory is broadcast."""

PEERS = MoveForm("peers", staging=(Staging("peers", "src"),))
"""Sum over shards: shards travel from peer to peer and are summed where they belong."""

ALL_TO_ALL = MoveForm("all_to_all", staging=(Staging("full", "src"),))
"""Sum over shards: as ``PEERS``, in one collective."""

ALL_REDUCE_FULL = MoveForm("all_reduce", staging=(Staging("full", "dst", only_add=True),))
"""Sum of whole buffers, in place of the destination, or beside it where that is live."""

ALL_REDUCE_SHARD = MoveForm("all_reduce", staging=(Staging("shard", "dst", only_add=True),))
"""Sum of shards over replicas, in place of the destination, or beside it where that is live."""

KNOWN_FORMS = {
    MoveKind.GATHER: (BROADCASTS, ALL_GATHER),
    MoveKind.REDUCE_SCATTER: (PEERS, ALL_TO_ALL),
    MoveKind.ALL_REDUCE: (ALL_REDUCE_FULL,),
    MoveKind.REPLICA_SUM: (ALL_REDUCE_SHARD,),
}
"""What the backend can do, by kind of move; the other kinds are local."""

GLOO_PROFILE = TransferProfile(
    name="torch-gloo",
    forms={
        MoveKind.GATHER: (BROADCASTS,),
        MoveKind.REDUCE_SCATTER: (
            ALL_TO_ALL,
            MoveForm(PEERS.name, 1 << 20, PEERS.staging),
        ),
        MoveKind.ALL_REDUCE: (ALL_REDUCE_FULL,),
        MoveKind.REPLICA_SUM: (ALL_REDUCE_SHARD,),
    },
    # Fresh host memory costs a page fault per 4 KiB, many times the copy itself.
    shells=frozenset(Memory),
)
"""CPU tensors over gloo. See [Note: forms]."""

NCCL_PROFILE = TransferProfile(
    name="torch-nccl",
    forms={
        MoveKind.GATHER: (ALL_GATHER,),
        MoveKind.REDUCE_SCATTER: (PEERS,),
        MoveKind.ALL_REDUCE: (ALL_REDUCE_FULL,),
        MoveKind.REPLICA_SUM: (ALL_REDUCE_SHARD,),
    },
)
"""CUDA tensors over NCCL; no shells, for the caching allocator keeps what is freed."""


def check_profile(profile: TransferProfile, *, on_cpu: bool) -> TransferProfile:
    """The profile, if this backend can follow it.

    Raises:
        SpecError: a form that it does not have here, or one with other scratch than it needs; or
            shells in one memory only where host and device are the same.
    """
    if on_cpu and profile.shells not in (frozenset(), frozenset(Memory)):
        raise SpecError(
            f"profile {profile.name!r} keeps shells in one memory only; on the CPU host and device "
            "memory are the same: keep shells in both or in none"
        )
    if not profile.has_data:
        raise SpecError(
            f"profile {profile.name!r} keeps no data; the torch backend does, so give that profile "
            "to the null backend"
        )
    for kind, forms in KNOWN_FORMS.items():
        known = [form for form in forms if not (on_cpu and form is ALL_GATHER)]
        fitting = {(form.name, form.staging) for form in known}
        for form in profile.forms.get(kind, ()):
            if (form.name, form.staging) not in fitting:
                raise SpecError(
                    f"profile {profile.name!r} takes {kind.value} by {form.name!r} with "
                    f"{len(form.staging)} scratch buffers; the torch backend has "
                    f"{[name for name, _ in sorted(fitting)]}; take GLOO_PROFILE, NCCL_PROFILE or "
                    "one that was measured"
                )
        if kind not in profile.forms:
            raise SpecError(
                f"profile {profile.name!r} has no form for {kind.value}; the torch backend takes "
                f"{[form.name for form in known]}"
            )
    return profile
