"""How a tensor is *used*. Where its bytes are is residency, and lives with the chunk."""

from __future__ import annotations

import enum

from meshcore.errors import StateTransitionError


class TensorState(enum.Enum):
    """The use of one tensor. None of these says how many bytes it takes: residency does.

    FREE: registered, not loaded (or given up); its chunk may hold no buffer for it.
    HOLD: loaded and idle; its chunk may be sharded or gathered.
    COMPUTE: being computed with; its chunk cannot be released.
    HOLD_AFTER_BWD: its backward is over; its chunk may be released before the gradient is reduced.
    READY_FOR_REDUCE: its gradient is complete on this rank.
    """

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_BWD = "hold_after_bwd"
    READY_FOR_REDUCE = "ready_for_reduce"


_S = TensorState
TRANSITIONS: dict[TensorState, tuple[TensorState, ...]] = {
    _S.FREE: (_S.HOLD, _S.COMPUTE),
    _S.HOLD: (_S.FREE, _S.COMPUTE),
    _S.COMPUTE: (_S.HOLD, _S.HOLD_AFTER_BWD),
    _S.HOLD_AFTER_BWD: (_S.COMPUTE, _S.READY_FOR_REDUCE),
    _S.READY_FOR_REDUCE: (_S.HOLD,),
}
"""The whole table: state -> states that may follow."""


def next_state(name: str, current: TensorState, asked: TensorState) -> TensorState:
    """Return ``asked`` if the table allows it.

    Raises:
        StateTransitionError: naming the tensor, both states and the allowed ones.

    >>> next_state("w", TensorState.HOLD, TensorState.COMPUTE).name
    'COMPUTE'
    """
    allowed = TRANSITIONS[current]
    if asked not in allowed:
        names = ", ".join(state.name for state in allowed)
        raise StateTransitionError(
            f"tensor {name!r} is {current.name} and was asked to become {asked.name}; "
            f"from {current.name} it may become {names}; nothing was changed"
        )
    return asked
