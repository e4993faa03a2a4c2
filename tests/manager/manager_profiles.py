"""Profiles with which the numpy and null backends account like others."""

from meshcore.backend import MoveForm, Staging, TransferProfile
from meshcore.spec import Memory, MoveKind

TORCH_LIKE = TransferProfile(
    name="torch-like",
    forms={
        MoveKind.GATHER: (MoveForm("broadcasts"),),
        MoveKind.REDUCE_SCATTER: (
            MoveForm("all_to_all", 0, (Staging("full", "src"),)),
            MoveForm("peers", 64, (Staging("peers", "src"),)),
        ),
        MoveKind.ALL_REDUCE: (MoveForm("all_reduce", 0, (Staging("full", "dst", only_add=True),)),),
        MoveKind.REPLICA_SUM: (
            MoveForm("all_reduce", 0, (Staging("shard", "dst", only_add=True),)),
        ),
    },
    shells=frozenset(Memory),
)
"""Destinations first, scratch from peers, shells in both memories."""

JAX_LIKE = TransferProfile(name="jax-like", preallocates=False)
"""Moves make their own destinations and nothing is kept."""

STAGED = TransferProfile(
    name="staged",
    forms={
        MoveKind.GATHER: (MoveForm("small"), MoveForm("large", 20, (Staging("peers", "dst"),))),
        MoveKind.REDUCE_SCATTER: TORCH_LIKE.forms[MoveKind.REDUCE_SCATTER],
        MoveKind.ALL_REDUCE: (MoveForm("whole", 0, (Staging("full", "src"),)),),
        MoveKind.REPLICA_SUM: TORCH_LIKE.forms[MoveKind.REPLICA_SUM],
    },
    shells=frozenset({Memory.DEVICE}),
)
"""Scratch for every collective, and shells on the device only."""
