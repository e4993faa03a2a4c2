"""The transfer profile: which form a move takes, what scratch it needs, and its text form."""

from __future__ import annotations

import json
import pickle
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcore.backend import (
    BACKEND_API,
    BackendInfo,
    BackendOptions,
    MoveForm,
    Staging,
    SupportsLiveBytes,
    TransferProfile,
    scratch_specs,
)
from meshcore.dtypes import ALL_DTYPES, itemsize
from meshcore.errors import SpecError
from meshcore.mesh import DeviceMesh
from meshcore.spec import AxisRoles, BufferSpec, Memory, MoveKind, Placement

P = Placement
K = MoveKind


def roles_of(replicas, shards):
    mesh = DeviceMesh(range(replicas * shards), (replicas, shards), ("replica", "shard"))
    return AxisRoles(mesh, "shard", "replica")


def spec(numel, dtype, placement, memory=Memory.DEVICE):
    return BufferSpec(numel, dtype, placement, memory)


def gather(numel, dtype="float32", to="float32"):
    return spec(numel, dtype, P.SHARDED), spec(numel, to, P.REPLICATED)


stagings = st.builds(
    Staging,
    st.sampled_from(["full", "shard", "peers"]),
    st.sampled_from(["src", "dst"]),
    st.booleans(),
)


@st.composite
def form_lists(draw):
    starts = draw(st.sets(st.integers(1, 1 << 30), max_size=3))
    return tuple(
        MoveForm(f"form{i}", start, tuple(draw(st.lists(stagings, max_size=3))))
        for i, start in enumerate([0, *sorted(starts)])
    )


@st.composite
def profiles(draw):
    forms = draw(st.dictionaries(st.sampled_from(MoveKind), form_lists()))
    staged = any(form.staging for rows in forms.values() for form in rows)
    return TransferProfile(
        name=draw(st.text(min_size=1, max_size=8)),
        dtypes=tuple(draw(st.lists(st.sampled_from(ALL_DTYPES), unique=True))),
        forms=forms,
        shells=draw(st.frozensets(st.sampled_from(Memory))),
        preallocates=staged or draw(st.booleans()),
        has_data=draw(st.booleans()),
    )


# Text form


@settings(max_examples=40)
@given(profiles())
def test_a_profile_survives_json_and_pickle(profile):
    text = profile.to_json()
    again = TransferProfile.from_json(text)
    assert again == profile
    assert again.to_json() == text
    assert pickle.loads(pickle.dumps(profile)) == profile


def broken(**changes):
    raw = json.loads(TransferProfile("x", forms={K.GATHER: (MoveForm("a"),)}).to_json())
    return json.dumps({**raw, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        broken(forms={"teleport": []}),
        broken(forms={"gather": [{"name": "a"}]}),
        broken(forms={"gather": [{"name": "a", "from_nbytes": 0, "staging": [["full"]]}]}),
        broken(forms={"gather": [{"name": "a", "from_nbytes": 0, "staging": 3}]}),
        broken(shells=["moon"]),
        broken(forms=3),
        broken(dtypes=3),
        broken(dtypes="float32"),
    ],
)
def test_text_that_is_no_profile_is_refused(text):
    with pytest.raises(SpecError):
        TransferProfile.from_json(text)


def test_the_refusal_keeps_the_cause():
    with pytest.raises(SpecError, match="no transfer profile: KeyError") as caught:
        TransferProfile.from_json("{}")
    assert isinstance(caught.value.__cause__, KeyError)


# Forms


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 5, 5], [0, 8, 4], [4, 0]])
def test_forms_start_at_0_and_rise(starts):
    forms = tuple(MoveForm(f"form{i}", start) for i, start in enumerate(starts))
    with pytest.raises(SpecError, match=r"forms of gather start at 0 .* not \["):
        TransferProfile("x", forms={K.GATHER: forms})
    text = broken(
        forms={
            "gather": [{"name": f.name, "from_nbytes": f.from_nbytes, "staging": []} for f in forms]
        }
    )
    with pytest.raises(SpecError, match="forms of gather"):
        TransferProfile.from_json(text)


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(0, "small"), (1020, "small"), (1024, "medium"), (4092, "medium"), (4096, "large")],
)
def test_the_form_goes_by_the_bytes_of_the_full_buffer(nbytes, name):
    forms = MoveForm("small"), MoveForm("medium", 1024), MoveForm("large", 4096)
    profile = TransferProfile("x", forms={K.GATHER: forms})
    assert profile.form(*gather(nbytes // 4), roles_of(1, 1)).name == name


def test_the_bytes_that_travel_decide():
    # A gather casts at the source, so the destination's dtype travels; a sum casts after transport.
    forms = MoveForm("small"), MoveForm("large", 400)
    profile = TransferProfile("x", forms={K.GATHER: forms, K.REDUCE_SCATTER: forms})
    roles = roles_of(1, 4)
    assert profile.form(*gather(100, "float32", "float32"), roles).name == "large"
    assert profile.form(*gather(100, "float32", "bfloat16"), roles).name == "small"
    assert profile.form(*gather(100, "bfloat16", "float32"), roles).name == "large"
    for dtype, name in (("float32", "large"), ("bfloat16", "small")):
        src, dst = spec(100, dtype, P.PARTIAL), spec(100, "float32", P.SHARDED)
        assert profile.form(src, dst, roles).name == name


def test_a_kind_without_forms_has_one_without_scratch():
    profile = TransferProfile("x")
    form = profile.form(*gather(8), roles_of(1, 4))
    assert (form.name, form.from_nbytes, form.staging) == ("default", 0, ())
    assert scratch_specs(profile, roles_of(1, 4), *gather(8)) == ()


# Scratch


def profile_with(kind, *staging):
    return TransferProfile("x", forms={kind: (MoveForm("a", 0, staging),)})


@given(
    shards=st.integers(2, 5),
    shard_numel=st.integers(1, 50),
    src_dtype=st.sampled_from(["float32", "bfloat16"]),
    staging=st.lists(stagings, max_size=4),
    memory=st.sampled_from(Memory),
    add=st.booleans(),
)
def test_scratch_is_what_the_form_says_in_its_order(
    shards, shard_numel, src_dtype, staging, memory, add
):
    numel = shards * shard_numel
    src = spec(numel, src_dtype, P.PARTIAL, memory)
    dst = spec(numel, "float64", P.SHARDED, memory)
    found = scratch_specs(
        profile_with(K.REDUCE_SCATTER, *staging), roles_of(1, shards), src, dst, add=add
    )
    wanted = [one for one in staging if add or not one.only_add]
    assert len(found) == len(wanted)
    for one, scratch in zip(wanted, found, strict=True):
        elements = {"full": numel, "shard": shard_numel, "peers": (shards - 1) * shard_numel}
        size = itemsize(src_dtype if one.dtype == "src" else "float64")
        assert scratch.local_nbytes(shards) == elements[one.numel] * size
        assert scratch.memory is memory


@pytest.mark.parametrize(
    ("replicas", "shards", "src", "dst", "kind"),
    [
        (1, 1, P.SHARDED, P.REPLICATED, K.GATHER),
        (3, 1, P.SHARDED, P.REPLICATED, K.GATHER),
        (3, 1, P.PARTIAL, P.SHARDED_PARTIAL, K.REDUCE_SCATTER),
        (1, 3, P.SHARDED_PARTIAL, P.SHARDED, K.REPLICA_SUM),
        (1, 1, P.PARTIAL, P.REPLICATED, K.ALL_REDUCE),
        (1, 3, P.REPLICATED, P.SHARDED, K.SCATTER),
    ],
)
def test_a_move_within_one_rank_needs_no_scratch(replicas, shards, src, dst, kind):
    profile = profile_with(kind, Staging("full", "src"))
    ends = spec(6, "float32", src), spec(6, "float32", dst)
    assert scratch_specs(profile, roles_of(replicas, shards), *ends) == ()


def test_nothing_to_move_needs_no_scratch():
    profile = profile_with(K.GATHER, Staging("full", "src"))
    assert scratch_specs(profile, roles_of(1, 3), *gather(0)) == ()
    assert len(scratch_specs(profile, roles_of(1, 3), *gather(3))) == 1


def test_a_sum_over_replicas_needs_scratch_where_there_are_replicas():
    profile = profile_with(K.REPLICA_SUM, Staging("shard", "src"))
    ends = spec(6, "float32", P.SHARDED_PARTIAL), spec(6, "float32", P.SHARDED)
    (scratch,) = scratch_specs(profile, roles_of(2, 3), *ends)
    assert scratch.local_numel(3) == 2


@pytest.mark.parametrize("staging", [Staging("half", "src"), Staging("full", "both")])
def test_an_unknown_staging_is_refused(staging):
    with pytest.raises(SpecError, match="'x' has an unknown staging"):
        scratch_specs(profile_with(K.GATHER, staging), roles_of(1, 2), *gather(4))


def test_scratch_of_a_move_that_is_none_is_refused():
    with pytest.raises(SpecError, match="scale and add belong"):
        scratch_specs(TransferProfile("x"), roles_of(1, 2), *gather(4), add=True)
    with pytest.raises(SpecError, match="does not divide over 3 shards"):
        scratch_specs(TransferProfile("x"), roles_of(1, 3), *gather(4))


# Data that plugins are made of


def test_what_a_plugin_and_a_user_say_are_frozen_values():
    assert BackendInfo("x", BACKEND_API) == BackendInfo("x", (1, 0), "", None)
    options = BackendOptions()
    assert (options.timeout_seconds, options.profile, options.device) == (600.0, None, None)
    assert options.extra == {}
    for value, attribute in ((options, "device"), (BackendInfo("x", BACKEND_API), "name")):
        with pytest.raises(AttributeError):
            setattr(value, attribute, "y")


def test_knowing_live_bytes_is_an_ability_that_is_seen_by_its_method():
    able = types.SimpleNamespace(live_nbytes=dict)
    assert isinstance(able, SupportsLiveBytes)
    assert not isinstance(types.SimpleNamespace(), SupportsLiveBytes)


def test_a_backend_that_makes_its_destinations_gets_no_scratch():
    forms = {MoveKind.REDUCE_SCATTER: (MoveForm("peers", staging=(Staging("peers", "src"),)),)}
    with pytest.raises(SpecError, match="reduce_scatter.*leave staging out"):
        TransferProfile("odd", forms=forms, preallocates=False)
