"""What a plan says of itself: specs, slots, shards, digest, look-ups, and the table for people."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcore.dtypes import ALL_DTYPES, itemsize
from meshcore.errors import DuplicateNameError, SpecError, UnknownTensorError
from meshcore.layout import ChunkLayout, ChunkPlan, ParamSpec, Slot, format_nbytes
from meshcore.plan import plan_chunks

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def specs_of(numels):
    return [ParamSpec(f"t{i}", (numel,)) for i, numel in enumerate(numels)]


# Specs


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0, 4), 0), ((3,), 3), ([2, 3, 4], 24), ((1, 1), 1)]
)
def test_number_of_elements(shape, numel):
    spec = ParamSpec("w", shape)
    assert spec.numel == numel
    assert spec.shape == tuple(shape)


@pytest.mark.parametrize(
    ("dtype", "trainable", "takes_grad"),
    [
        ("float32", True, True),
        ("bfloat16", True, True),
        ("float32", False, False),
        ("int32", True, False),
        ("bool", True, False),
    ],
)
def test_what_takes_a_gradient(dtype, trainable, takes_grad):
    spec = ParamSpec("w", (2,), dtype, trainable)
    assert spec.takes_grad is takes_grad
    assert plan_chunks([spec], shards=1).chunks[0].takes_grad is takes_grad


def test_a_spec_is_a_value():
    spec = ParamSpec("w", [2, 3], ties=["v"])
    assert spec == ParamSpec("w", (2, 3), ties=("v",))
    assert hash(spec) == hash(ParamSpec("w", (2, 3), ties=("v",)))
    assert spec.names == ("w", "v")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "v"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "non-empty string, not ''"),
        ({"name": 3}, "non-empty string, not 3"),
        ({"shape": (2, -1)}, r"'w' has the shape \(2, -1\); .* ints that are 0 or more"),
        ({"shape": (2.7,)}, r"'w' has the shape \(2\.7,\)"),
        ({"shape": 4}, "'w' has the shape 4; a shape is a sequence"),
        ({"dtype": ["float32"]}, r"\['float32'\] is not known"),
        ({"ties": (3,)}, r"ties of 'w' are non-empty strings, not \(3,\)"),
        ({"ties": ("v", "")}, "ties of 'w' are non-empty strings"),
        ({"dtype": "float31"}, "'float31' is not known"),
        ({"ties": "vw"}, "ties of 'w' is a sequence of names"),
    ],
)
def test_a_bad_spec_is_refused(arguments, message):
    with pytest.raises(SpecError, match=message):
        ParamSpec(**{"name": "w", "shape": (2,), **arguments})


# Chunks


@given(sizes, st.integers(1, 6), st.sampled_from([1, 8, 64]))
def test_shards_are_equal_and_their_ranges_join_to_the_slots(numels, shards, alignment):
    plan = plan_chunks(specs_of(numels), shards=shards, alignment_nbytes=alignment)
    (chunk,) = plan.chunks
    assert chunk.numel == shards * chunk.shard_numel
    for slots in (None, chunk.slots, chunk.slots[::2]):
        covered = []
        for i in range(shards):
            ranges = chunk.shard_ranges(i, slots)
            assert all(0 <= start < stop <= chunk.shard_numel for start, stop in ranges)
            offset = i * chunk.shard_numel
            covered += [offset + j for start, stop in ranges for j in range(start, stop)]
        wanted = chunk.slots if slots is None else slots
        assert covered == [j for slot in wanted for j in range(slot.start, slot.stop)]
    assert sum(chunk.valid_numel(i) for i in range(shards)) == sum(numels)


@given(sizes, st.integers(1, 6), st.sampled_from(ALL_DTYPES))
def test_waste_is_what_is_held_beyond_the_tensors(numels, shards, dtype):
    specs = [dataclasses.replace(spec, dtype=dtype) for spec in specs_of(numels)]
    plan = plan_chunks(specs, shards=shards, capacity_numel=50)
    held = sum(chunk.numel for chunk in plan.chunks)
    assert plan.param_nbytes == sum(numels) * itemsize(dtype)
    assert plan.waste_nbytes == held * itemsize(dtype) - plan.param_nbytes
    assert plan.waste_nbytes == sum(chunk.waste_nbytes for chunk in plan.chunks)


def test_a_chunk_without_slots_uses_nothing():
    chunk = ChunkLayout(0, "param", "float32", True, (), 2, 3)
    assert (chunk.used, chunk.numel, chunk.waste_nbytes) == (0, 6, 24)
    assert chunk.shard_ranges(0) == ()


def test_a_slot_knows_its_place_and_shape():
    slot = Slot(ParamSpec("w", [2, 3]), 4)
    assert (slot.name, slot.shape, slot.start, slot.stop) == ("w", (2, 3), 4, 10)


# Plans


def variants():
    """Arguments of one plan, and of plans that differ from it in one thing each."""
    base = {
        "specs": [ParamSpec("a", (4, 2)), ParamSpec("b", (3,))],
        "shards": 2,
        "capacity_numel": 16,
        "alignment_nbytes": 4,
    }
    a, b = base["specs"]
    yield base
    yield {**base, "shards": 4}
    yield {**base, "alignment_nbytes": 8}
    yield {**base, "capacity_numel": 8}
    yield {**base, "mode": "uniform"}
    yield {**base, "specs": [b, a]}
    yield {**base, "specs": [a]}
    for change in (
        {"name": "c"},
        {"shape": (2, 4)},
        {"dtype": "int32"},
        {"trainable": False},
        {"group": "embed"},
        {"ties": ("c",)},
    ):
        yield {**base, "specs": [dataclasses.replace(a, **change), b]}


def make(arguments):
    arguments = dict(arguments)
    return plan_chunks(arguments.pop("specs"), **arguments)


def test_digests_are_equal_exactly_where_plans_are():
    plans = [make(arguments) for arguments in variants()]
    again = [make(arguments) for arguments in variants()]
    assert plans == again
    assert [p.digest() for p in plans] == [p.digest() for p in again]
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert all(p != q for i, p in enumerate(plans) for q in plans[:i])
    assert len(bytes.fromhex(plans[0].digest())) == hashlib.sha256().digest_size


@given(st.lists(sizes, min_size=2, max_size=2), st.integers(1, 4), st.integers(1, 4))
def test_digests_of_random_plans(pair, shards, others):
    p = plan_chunks(specs_of(pair[0]), shards=shards)
    q = plan_chunks(specs_of(pair[1]), shards=others)
    assert (p.digest() == q.digest()) == (p == q)


def test_names_and_look_ups():
    specs = [
        ParamSpec("block.weight", (2,), ties=("head.weight", "tied")),
        ParamSpec("table", (3,), group="embed"),
        ParamSpec("block.bias", (1,)),
    ]
    plan = plan_chunks(specs, shards=1)
    assert plan.names == ("block.weight", "block.bias", "table")  # chunk by chunk
    assert plan.specs == (specs[0], specs[2], specs[1])
    for spec in specs:
        for name in spec.names:
            chunk, slot = plan.find(name)
            assert slot in chunk.slots
            assert slot.spec is spec


@pytest.mark.parametrize("name", ["block.weigth", "zzz", 3, None, ["block.weight"]])
def test_an_unknown_name_is_refused_with_close_ones(name):
    plan = plan_chunks([ParamSpec("block.weight", (2,))], shards=1)
    with pytest.raises(UnknownTensorError, match="in a plan of 1 names") as caught:
        plan.find(name)
    assert isinstance(caught.value, LookupError)
    close = "did you mean 'block.weight'?" in str(caught.value)
    assert close == (name in ("block.weigth", ["block.weight"]))


def test_a_plan_is_iterated_by_chunk_and_survives_pickle_and_copies():
    specs = [ParamSpec("a", (4,), ties=("b",)), ParamSpec("c", (4,))]
    plan = plan_chunks(specs, shards=2, capacity_numel=4)
    assert list(plan) == list(plan.chunks)
    assert len(list(plan)) == 2
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert hash(twin) == hash(plan)
        assert twin.digest() == plan.digest()
        assert twin.find("b") == plan.find("a")


def test_a_plan_made_by_hand_is_checked_for_names_too():
    slots = (Slot(ParamSpec("w", (1,)), 0), Slot(ParamSpec("w", (1,)), 1))
    with pytest.raises(DuplicateNameError, match="'w' occurs twice"):
        ChunkPlan((ChunkLayout(0, "param", "float32", True, slots, 1, 2),), 1, 1, "variable")


def test_the_report_says_everything_in_100_columns():
    specs = [
        ParamSpec("a", (50_000_000,), "float8_e4m3fn", group="encoder-of-the-images"),
        ParamSpec("b", (7,), trainable=False),
    ]
    plan = plan_chunks(specs, shards=16)
    lines = plan.report().splitlines()
    assert all(len(line) <= 100 for line in lines)
    header, rule, first, second, total = (" ".join(line.split()) for line in lines)
    assert header == "chunk group dtype train tensors elements a rank waste"
    assert set(rule) == {"-"}
    assert first == "0 encoder-of-the-image float8_e4m3fn yes 1 50,000,896 2.98 MiB 896 B"
    assert second == "1 param float32 no 1 256 64 B 996 B"
    assert total == (
        "2 chunks (variable) over 16 shards: 47.68 MiB of tensors, 1.85 KiB waste (0.00 %)"
    )


def test_the_report_of_an_empty_plan():
    assert plan_chunks([], shards=2).report().splitlines()[-1] == (
        "0 chunks (variable) over 2 shards: 0 B of tensors, 0 B waste (0.00 %)"
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 19, "1.50 MiB"),
        (5 << 30, "5.00 GiB"),
        (7 << 40, "7.00 TiB"),
        (9000 << 40, "9000.00 TiB"),
    ],
)
def test_bytes_for_people(nbytes, text):
    assert format_nbytes(nbytes) == text
