"""The table of tensor states, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from meshcore.errors import StateTransitionError
from meshcore.state import TRANSITIONS, TensorState, next_state

S = TensorState
LEGAL = {
    (S.FREE, S.HOLD),
    (S.FREE, S.COMPUTE),
    (S.HOLD, S.FREE),
    (S.HOLD, S.COMPUTE),
    (S.COMPUTE, S.HOLD),
    (S.COMPUTE, S.HOLD_AFTER_BWD),
    (S.HOLD_AFTER_BWD, S.COMPUTE),
    (S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE),
    (S.READY_FOR_REDUCE, S.HOLD),
}


@pytest.mark.parametrize(("current", "asked"), list(itertools.product(S, S)))
def test_every_pair(current, asked):
    if (current, asked) in LEGAL:
        assert next_state("w", current, asked) is asked
    else:
        with pytest.raises(StateTransitionError):
            next_state("w", current, asked)


def test_there_are_nine_transitions_and_every_state_has_a_way_on():
    table = {(current, asked) for current, row in TRANSITIONS.items() for asked in row}
    assert table == LEGAL
    assert sum(map(len, TRANSITIONS.values())) == len(LEGAL) == 9
    assert set(TRANSITIONS) == set(S)


def test_an_illegal_move_names_tensor_states_and_what_is_allowed():
    with pytest.raises(StateTransitionError) as caught:
        next_state("block0.up", S.HOLD, S.READY_FOR_REDUCE)
    message = str(caught.value)
    assert "'block0.up' is HOLD and was asked to become READY_FOR_REDUCE" in message
    assert "from HOLD it may become FREE, COMPUTE" in message
    assert isinstance(caught.value, RuntimeError)
