"""Wrapper backends: what the poison reaches, and how a fault leaves things."""

import inspect
import itertools
import pickle

import numpy as np
import pytest

from meshcore.backend import Backend, TransferProfile
from meshcore.errors import BackendError, ClosedError, SpecError
from meshcore.mesh import DeviceMesh
from meshcore.null import NullBackend
from meshcore.reference import NumpyBackend
from meshcore.spec import AxisRoles, BufferSpec, Memory, Placement
from meshcore.testing import FaultyBackend, ForwardingBackend, InjectedFaultError, PoisonBackend
from meshcore.testing.faults import VERBS

ROLES = AxisRoles(DeviceMesh([2, 0, 1]))
WHOLE = BufferSpec(6, "float32", Placement.REPLICATED)
SPLIT = BufferSpec(6, "float32", Placement.SHARDED)
SHELLS = TransferProfile(name="shells", shells=frozenset(Memory))


def seam_verbs():
    return {
        name
        for name, value in vars(Backend).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


@pytest.mark.parametrize("wrapper", [ForwardingBackend, PoisonBackend, FaultyBackend])
def test_wrappers_have_every_verb_with_its_signature(wrapper):
    for verb in seam_verbs():
        ours = inspect.signature(getattr(wrapper, verb)).parameters
        assert list(ours) == list(inspect.signature(getattr(Backend, verb)).parameters), verb


def test_every_verb_but_close_can_fail():
    assert set(VERBS) == seam_verbs() - {"close"}


# --- poison -----------------------------------------------------------------------------------


def test_empty_storage_is_poisoned_and_zeros_are_not():
    backend = PoisonBackend(NumpyBackend(ROLES))
    for spec in (WHOLE, SPLIT):
        assert all(np.isnan(a).all() for a in backend.to_numpy(backend.empty(spec)).values())
        assert all((a == 0).all() for a in backend.to_numpy(backend.zeros(spec)).values())


def test_a_view_of_a_freed_buffer_is_poisoned():
    backend = PoisonBackend(NumpyBackend(ROLES, SHELLS))
    array = backend.write(backend.zeros(WHOLE), WHOLE, 0, np.ones(6, np.float32))
    view = backend.read(array, WHOLE, 0, 6)
    backend.free(array)
    assert np.isnan(view).all()


def test_a_reused_shell_is_poisoned_or_zeroed():
    backend = PoisonBackend(NumpyBackend(ROLES, SHELLS))
    shell = backend.free(backend.zeros(WHOLE))
    array = backend.empty(WHOLE, shell)
    assert all(np.isnan(a).all() for a in backend.to_numpy(array).values())
    array = backend.zeros(WHOLE, backend.free(array))
    assert all((a == 0).all() for a in backend.to_numpy(array).values())


def test_integers_are_left_alone():
    backend = PoisonBackend(NumpyBackend(ROLES))
    spec = BufferSpec(6, "int32", Placement.REPLICATED)
    array = backend.write(backend.empty(spec), spec, 0, np.arange(6))
    view = backend.read(array, spec, 0, 6)
    backend.free(array)
    np.testing.assert_array_equal(view, np.arange(6))


def test_an_array_that_the_wrapper_has_not_seen_can_be_freed():
    inner = NumpyBackend(ROLES)
    backend = PoisonBackend(inner)
    array = inner.zeros(WHOLE)
    assert backend.free(array) is None
    assert set(inner.nbytes(array).values()) == {0}


def test_what_is_freed_after_closing_is_not_touched():
    backend = PoisonBackend(NumpyBackend(ROLES))
    array = backend.zeros(WHOLE)
    backend.close()
    assert backend.free(array) is None


# --- faults -----------------------------------------------------------------------------------


def scenario(backend) -> None:
    """Every verb at least once."""
    whole = backend.zeros(WHOLE, backend.free(backend.empty(WHOLE)))
    whole = backend.write(whole, WHOLE, 0, np.ones(6, np.float32))
    split = backend.redistribute(whole, WHOLE, SPLIT, into=backend.empty(SPLIT))
    backend.wait(split)
    split = backend.scale(split, SPLIT, 2.0)
    backend.total([backend.square_sum(split, SPLIT, [(0, 6)])])
    backend.read(whole, WHOLE, 0, 6)
    backend.to_numpy(split)
    backend.nbytes(split)
    backend.exchange(b"done")
    for array in (whole, split):
        shell = backend.free(array)
        if shell is not None:
            backend.drop(shell)


def counted() -> int:
    backend = FaultyBackend(NumpyBackend(ROLES, SHELLS))
    scenario(backend)
    return backend.calls


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loop_over_k_fails_every_call_once_and_then_ends(when):
    fired = []
    for k in itertools.count():
        backend = FaultyBackend(NumpyBackend(ROLES, SHELLS), fail_at=k, when=when)
        if k == counted():
            scenario(backend)
            assert backend.fired is None
            break
        with pytest.raises(InjectedFaultError, match=f"call {k} .* {when} its effect"):
            scenario(backend)
        assert backend.calls == k + 1
        fired.append(backend.fired)
    assert set(fired) == set(VERBS)
    assert len(fired) == counted() > len(VERBS)


def test_only_the_named_verbs_are_counted():
    backend = FaultyBackend(NumpyBackend(ROLES), verbs=("free", "write"))
    scenario(backend)
    assert backend.calls == 4


def test_the_error_is_the_one_that_was_asked_for():
    backend = FaultyBackend(NumpyBackend(ROLES), fail_at=0, error=MemoryError)
    with pytest.raises(MemoryError, match=r"injected: call 0 \(zeros\)"):
        backend.zeros(WHOLE)
    assert issubclass(InjectedFaultError, BackendError)


def test_before_the_effect_nothing_happens():
    inner = NumpyBackend(ROLES)
    array = inner.write(inner.zeros(WHOLE), WHOLE, 0, np.ones(6, np.float32))
    for verb in ("write", "scale", "free"):
        backend = FaultyBackend(inner, fail_at=0, verbs=(verb,))
        arguments = {"write": (WHOLE, 0, np.zeros(6)), "scale": (WHOLE, 3.0), "free": ()}[verb]
        with pytest.raises(InjectedFaultError):
            getattr(backend, verb)(array, *arguments)
    np.testing.assert_array_equal(inner.to_numpy(array)[0], np.ones(6))


def test_after_the_effect_a_consumed_array_is_lost():
    inner = NumpyBackend(ROLES)
    array = inner.zeros(WHOLE)
    with pytest.raises(InjectedFaultError):
        FaultyBackend(inner, fail_at=0, when="after").write(array, WHOLE, 0, np.ones(6))
    assert set(inner.nbytes(array).values()) == {0}
    with pytest.raises(ClosedError, match="rebind"):
        inner.to_numpy(array)


def test_after_the_effect_a_move_that_rolls_back_leaves_its_destination():
    inner = NumpyBackend(ROLES)
    source = inner.write(inner.zeros(WHOLE), WHOLE, 0, np.ones(6, np.float32))
    into = inner.zeros(SPLIT)
    with pytest.raises(InjectedFaultError):
        FaultyBackend(inner, fail_at=0, when="after").redistribute(source, WHOLE, SPLIT, into=into)
    np.testing.assert_array_equal(inner.to_numpy(into)[0], np.zeros(2))
    np.testing.assert_array_equal(inner.to_numpy(source)[0], np.ones(6))


def test_after_the_effect_a_move_that_adds_has_consumed_its_destination():
    inner = NumpyBackend(ROLES)
    addends = BufferSpec(6, "float32", Placement.PARTIAL)
    source, into = inner.zeros(addends), inner.zeros(WHOLE)
    faulty = FaultyBackend(inner, fail_at=0, when="after")
    with pytest.raises(InjectedFaultError):
        faulty.redistribute(source, addends, WHOLE, into=into, add=True)
    assert set(inner.nbytes(into).values()) == {0}
    assert set(inner.nbytes(source).values()) == {24}


def test_after_the_effect_a_shell_is_still_there():
    inner = NumpyBackend(ROLES, SHELLS)
    shell = inner.free(inner.zeros(WHOLE))
    for verb in ("empty", "zeros"):
        with pytest.raises(InjectedFaultError):
            getattr(FaultyBackend(inner, fail_at=0, when="after"), verb)(WHOLE, shell)
    assert set(inner.nbytes(inner.zeros(WHOLE, shell)).values()) == {24}


def test_after_the_effect_freed_storage_is_gone():
    inner = NumpyBackend(ROLES, SHELLS)
    array = inner.zeros(WHOLE)
    with pytest.raises(InjectedFaultError):
        FaultyBackend(inner, fail_at=0, when="after").free(array)
    assert set(inner.nbytes(array).values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"verbs": ("close",)}, "close"), ({"when": "during"}, "during")],
)
def test_what_cannot_fail_is_refused(arguments, named):
    with pytest.raises(SpecError, match=named):
        FaultyBackend(NullBackend(ROLES), **arguments)


def test_faults_and_poison_compose():
    backend = FaultyBackend(PoisonBackend(NumpyBackend(ROLES)), fail_at=1)
    array = backend.empty(SPLIT)
    assert all(np.isnan(a).all() for a in backend.inner.to_numpy(array).values())
    with pytest.raises(InjectedFaultError):
        backend.zeros(SPLIT)


def test_an_injected_fault_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(InjectedFaultError("injected: call 3 (free)")))
    assert isinstance(error, InjectedFaultError)
    assert str(error) == "injected: call 3 (free)"
