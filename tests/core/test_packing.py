"""Packing: next-fit against a plain model of it, equal chunks against all capacities, and cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshcore.dtypes import itemsize
from meshcore.errors import DuplicateNameError, SpecError
from meshcore.layout import ChunkPlan, ParamSpec
from meshcore.plan import DEFAULT_CAPACITY_NUMEL, best_capacity, plan_chunks

DTYPES = ("float32", "bfloat16", "int64", "float8_e5m2")
numels = st.one_of(st.integers(0, 5), st.integers(0, 60))
alignments = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64])


@st.composite
def spec_lists(draw, max_size=16):
    rows = draw(
        st.lists(
            st.tuples(
                numels, st.sampled_from(DTYPES), st.booleans(), st.sampled_from(["param", "embed"])
            ),
            max_size=max_size,
        )
    )
    return [
        ParamSpec(f"t{i}", (numel,), dtype, trainable, group)
        for i, (numel, dtype, trainable, group) in enumerate(rows)
    ]


def key_of(thing):
    return thing.group, thing.dtype, thing.trainable


def align_numel(dtype, alignment_nbytes):
    """The least number of elements that is a whole number of alignments in bytes."""
    return next(n for n in range(1, 1000) if n * itemsize(dtype) % alignment_nbytes == 0)


def ceil_to(value, multiple):
    return math.ceil(value / multiple) * multiple


def naive_next_fit(sizes, capacity, align):
    """Starts by chunk, written as the rule is spoken."""
    chunks = []
    for numel in sizes:
        if chunks:
            start = ceil_to(chunks[-1][-1][0] + chunks[-1][-1][1], align)
            if start + numel <= capacity:
                chunks[-1].append((start, numel))
                continue
        chunks.append([(0, numel)])
    return chunks


# Next-fit


@given(
    specs=spec_lists(),
    shards=st.integers(1, 5),
    capacity=st.integers(1, 100),
    alignment=alignments,
    mode=st.sampled_from(["variable", "uniform"]),
)
def test_chunks_follow_the_rule(specs, shards, capacity, alignment, mode):
    plan = plan_chunks(
        specs, shards=shards, capacity_numel=capacity, alignment_nbytes=alignment, mode=mode
    )
    assert (plan.shards, plan.alignment_nbytes, plan.mode) == (shards, alignment, mode)
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    for key in {key_of(spec) for spec in specs}:
        chunks = [chunk for chunk in plan.chunks if key_of(chunk) == key]
        mine = [spec for spec in specs if key_of(spec) == key]
        align = align_numel(key[1], alignment)
        assert [slot.spec for chunk in chunks for slot in chunk.slots] == mine
        expected = naive_next_fit([spec.numel for spec in mine], capacity, align)
        assert [[(s.start, s.spec.numel) for s in chunk.slots] for chunk in chunks] == expected
        for chunk in chunks:
            wanted = chunk.used if mode == "variable" else max(chunk.used, capacity)
            assert chunk.shards == shards
            assert chunk.numel == shards * ceil_to(math.ceil(wanted / shards), align)


@given(specs=spec_lists(), shards=st.integers(1, 5), capacity=st.integers(1, 100))
def test_chunks_are_numbered_as_they_are_opened(specs, shards, capacity):
    plan = plan_chunks(specs, shards=shards, capacity_numel=capacity)
    place = {spec.name: i for i, spec in enumerate(specs)}
    first = [place[chunk.slots[0].name] for chunk in plan.chunks]
    assert first == sorted(first)
    assert all(chunk.slots for chunk in plan.chunks)


@given(specs=spec_lists(), shards=st.integers(1, 5), alignment=alignments)
def test_layouts_cover_each_element_once_and_are_aligned(specs, shards, alignment):
    plan = plan_chunks(specs, shards=shards, capacity_numel=40, alignment_nbytes=alignment)
    assert sorted(plan.names) == sorted(spec.name for spec in specs)
    for chunk in plan.chunks:
        size = itemsize(chunk.dtype)
        owners = [[] for _ in range(chunk.numel)]
        for slot in chunk.slots:
            assert slot.start * size % alignment == 0
            for element in range(slot.start, slot.stop):
                owners[element].append(slot.name)
        assert chunk.shard_numel * size % alignment == 0
        assert max(map(len, owners), default=0) <= 1
        gaps = sum(not names for names in owners)
        assert chunk.waste_nbytes == gaps * size


def test_a_tensor_closes_the_chunk_that_it_does_not_fit_in():
    specs = [ParamSpec(name, (numel,)) for name, numel in (("a", 6), ("b", 3), ("c", 2))]
    plan = plan_chunks(specs, shards=1, capacity_numel=8, alignment_nbytes=1)
    # c would fit behind a, but that chunk is never opened again.
    assert [[slot.name for slot in chunk.slots] for chunk in plan.chunks] == [["a"], ["b", "c"]]


@pytest.mark.parametrize("mode", ["variable", "uniform"])
def test_a_tensor_larger_than_the_capacity_is_alone(mode):
    specs = [ParamSpec(name, (numel,)) for name, numel in (("a", 2), ("big", 9), ("c", 2))]
    plan = plan_chunks(specs, shards=2, capacity_numel=4, alignment_nbytes=1, mode=mode)
    assert [[slot.name for slot in chunk.slots] for chunk in plan.chunks] == [["a"], ["big"], ["c"]]
    assert [chunk.numel for chunk in plan.chunks] == (
        [2, 10, 2] if mode == "variable" else [4, 10, 4]
    )


def test_groups_dtypes_and_frozen_tensors_have_chunks_of_their_own_that_stay_open():
    specs = [
        ParamSpec("a", (1,)),
        ParamSpec("frozen", (1,), trainable=False),
        ParamSpec("half", (1,), "bfloat16"),
        ParamSpec("other", (1,), group="embed"),
        ParamSpec("b", (1,)),
        ParamSpec("half2", (1,), "bfloat16"),
    ]
    plan = plan_chunks(specs, shards=1)
    names = [[slot.name for slot in chunk.slots] for chunk in plan.chunks]
    assert names == [["a", "b"], ["frozen"], ["half", "half2"], ["other"]]
    assert [chunk.name for chunk in plan.chunks] == ["param.0", "param.1", "param.2", "embed.3"]


def test_the_default_capacity_of_variable_chunks_is_16_mi_elements():
    half = ParamSpec("a", (8 << 20,)), ParamSpec("b", (8 << 20,))
    assert DEFAULT_CAPACITY_NUMEL == 16 * 1024 * 1024
    assert len(plan_chunks(half, shards=2).chunks) == 1
    assert len(plan_chunks([*half, ParamSpec("c", (1,))], shards=2).chunks) == 2


def test_empty_tensors_take_a_slot_of_length_0():
    specs = [ParamSpec("z", (0, 4)), ParamSpec("y", (0,))]
    (chunk,) = plan_chunks(specs, shards=3, capacity_numel=4).chunks
    assert [(slot.start, slot.stop, slot.shape) for slot in chunk.slots] == [
        (0, 0, (0, 4)),
        (0, 0, (0,)),
    ]
    assert (chunk.numel, chunk.used, chunk.waste_nbytes) == (0, 0, 0)
    uniform = plan_chunks(specs, shards=3, capacity_numel=4, alignment_nbytes=1, mode="uniform")
    assert [chunk.numel for chunk in uniform.chunks] == [6]
    searched = plan_chunks(specs, shards=3, mode="uniform")
    assert [chunk.numel for chunk in searched.chunks] == [0]


@pytest.mark.parametrize("mode", ["variable", "uniform"])
def test_no_tensors_is_a_plan_without_chunks(mode):
    plan = plan_chunks([], shards=4, mode=mode)
    assert isinstance(plan, ChunkPlan)
    assert (plan.chunks, plan.waste_nbytes, plan.param_nbytes) == ((), 0, 0)


def test_an_alignment_that_the_dtype_does_not_divide_takes_a_common_multiple():
    specs = [ParamSpec("a", (1,), "float32"), ParamSpec("b", (1,), "float32")]
    (chunk,) = plan_chunks(specs, shards=2, alignment_nbytes=6).chunks
    assert chunk.slots[1].start == 3  # 12 bytes: a multiple of 6 and of 4
    assert chunk.shard_numel == 3


# Equal chunks: the optimum


def waste_at(sizes, capacity, align, shards):
    chunks = len(naive_next_fit(sizes, capacity, align))
    return chunks * shards * ceil_to(math.ceil(capacity / shards), align) - sum(sizes)


@given(
    sizes=st.lists(numels, min_size=1, max_size=14),
    align=st.integers(1, 6),
    shards=st.integers(1, 4),
    most=st.integers(1, 150),
)
@example(sizes=[0, 0], align=1, shards=1, most=5)
@example(sizes=[3, 3, 3, 3], align=1, shards=1, most=3)
@example(sizes=[3, 3, 3, 3], align=1, shards=1, most=6)  # two of 6 or four of 3: equal
@example(sizes=[5, 1, 5, 1, 5, 1], align=4, shards=3, most=100)
def test_the_best_capacity_equals_brute_force(sizes, align, shards, most):
    candidates = range(max(sizes), max(most, *sizes, 0) + 1)
    expected = min(candidates, key=lambda c: (waste_at(sizes, c, align, shards), c))
    found = best_capacity(sizes, align_numel=align, shards=shards, max_capacity_numel=most)
    assert found == expected


@given(specs=spec_lists(), shards=st.integers(1, 4), alignment=alignments, most=st.integers(1, 99))
def test_uniform_plans_waste_as_little_as_any_capacity_allows(specs, shards, alignment, most):
    plan = plan_chunks(
        specs, shards=shards, alignment_nbytes=alignment, mode="uniform", max_capacity_numel=most
    )
    for key in {key_of(spec) for spec in specs}:
        chunks = [chunk for chunk in plan.chunks if key_of(chunk) == key]
        sizes = [spec.numel for spec in specs if key_of(spec) == key]
        align = align_numel(key[1], alignment)
        assert len({chunk.numel for chunk in chunks}) == 1
        least = min(
            waste_at(sizes, capacity, align, shards)
            for capacity in range(max(sizes), max(most, *sizes, 0) + 1)
        )
        assert sum(chunk.waste_nbytes for chunk in chunks) == least * itemsize(key[1])


def test_the_search_tries_16_mi_elements_or_twice_the_largest_tensor():
    mega = 1 << 20
    sizes = [12 * mega, 12 * mega, 13 * mega]
    specs = [ParamSpec(f"t{i}", (numel,)) for i, numel in enumerate(sizes)]
    # Three chunks of 13 Mi waste 2 Mi, two of 24 Mi 11 Mi; all in one of 37 Mi would waste nothing.
    assert waste_at(sizes, 37 * mega, 1, 1) == 0
    plan = plan_chunks(specs, shards=1, alignment_nbytes=1, mode="uniform")
    assert [chunk.numel for chunk in plan.chunks] == [13 * mega] * 3
    wider = plan_chunks(
        specs, shards=1, alignment_nbytes=1, mode="uniform", max_capacity_numel=37 * mega
    )
    assert [chunk.numel for chunk in wider.chunks] == [37 * mega]
    # Twice the largest tensor is tried: two of 12 Mi fit together.
    pair = plan_chunks(specs[:2], shards=1, alignment_nbytes=1, mode="uniform")
    assert [chunk.numel for chunk in pair.chunks] == [12 * mega] * 2
    three = [ParamSpec(f"t{i}", (n * mega,)) for i, n in enumerate((12, 1, 12))]
    plan = plan_chunks(three, shards=1, alignment_nbytes=1, mode="uniform")
    assert [chunk.numel for chunk in plan.chunks] == [13 * mega] * 2


def test_the_search_beats_a_scan_on_a_mixture_of_experts():
    # 18,771 tensors: 128 experts of three matrices in 48 layers, and what lies between them.
    width, inner = 2048, 768
    layer = [width * 4096, width * 512, width * 512, 4096 * width, width, 128 * width]
    sizes = [151936 * width]
    for _ in range(48):
        sizes += layer + [width * inner] * (3 * 128)
    sizes = sizes[:18771]
    found = best_capacity(sizes, align_numel=16, shards=8, max_capacity_numel=2 * max(sizes))
    waste = waste_at(sizes, found, 16, 8)
    tried = range(max(sizes), 2 * max(sizes), 16 * 8 * 160033)
    assert waste <= min(waste_at(sizes, capacity, 16, 8) for capacity in tried)


def test_without_elements_the_best_capacity_is_0():
    assert best_capacity([], max_capacity_numel=9) == 0
    assert best_capacity([0, 0], max_capacity_numel=9) == 0


@pytest.mark.parametrize(("sizes", "align", "shards"), [([1], 0, 1), ([1], 1, 0), ([1, -2], 1, 1)])
def test_the_search_refuses_numbers_out_of_range(sizes, align, shards):
    with pytest.raises(SpecError, match=f"not {align}, {shards} and {min(sizes)}"):
        best_capacity(sizes, align_numel=align, shards=shards, max_capacity_numel=9)


# Cases


def test_odd_world():
    plan = plan_chunks(
        [ParamSpec("w", (8,))], shards=3, capacity_numel=8, alignment_nbytes=1, mode="uniform"
    )
    (chunk,) = plan.chunks
    assert (chunk.shard_numel, chunk.numel) == (3, 9)
    assert [chunk.valid_numel(i) for i in range(3)] == [3, 3, 2]
    assert chunk.shard_numel * itemsize(chunk.dtype) == 12
    assert plan.waste_nbytes == 4


@pytest.mark.parametrize("mode", ["variable", "uniform"])
def test_exactly_the_chunk(mode):
    specs = [ParamSpec("a", (8,)), ParamSpec("b", (8,))]
    plan = plan_chunks(specs, shards=2, capacity_numel=8, alignment_nbytes=1, mode=mode)
    assert [chunk.numel for chunk in plan.chunks] == [8, 8]
    assert plan.waste_nbytes == 0


def test_empty_and_scalar_among_others():
    specs = [ParamSpec("a", (3,)), ParamSpec("z", (0, 4)), ParamSpec("s", ()), ParamSpec("b", (2,))]
    (chunk,) = plan_chunks(specs, shards=2, capacity_numel=8, alignment_nbytes=1).chunks
    slots = [(slot.name, slot.start, slot.stop, slot.shape) for slot in chunk.slots]
    assert slots == [
        ("a", 0, 3, (3,)),
        ("z", 3, 3, (0, 4)),
        ("s", 3, 4, ()),
        ("b", 4, 6, (2,)),
    ]
    assert (chunk.used, chunk.numel, chunk.waste_nbytes) == (6, 6, 0)


def test_fewer_elements_than_ranks():
    (chunk,) = plan_chunks([ParamSpec("w", (1,))], shards=4, alignment_nbytes=1).chunks
    assert chunk.shard_numel == 1
    assert [chunk.valid_numel(i) for i in range(4)] == [1, 0, 0, 0]


def test_a_tied_weight_larger_than_the_capacity_is_stored_once():
    specs = [ParamSpec("a.weight", (5, 2), ties=("b.weight",))]
    plan = plan_chunks(specs, shards=2, capacity_numel=4, alignment_nbytes=1)
    (chunk,) = plan.chunks
    assert (chunk.numel, plan.param_nbytes) == (10, 40)
    assert plan.find("b.weight") == plan.find("a.weight") == (chunk, chunk.slots[0])


# Bad input


@pytest.mark.parametrize(
    "name", ["shards", "capacity_numel", "alignment_nbytes", "max_capacity_numel"]
)
@pytest.mark.parametrize("value", [0, -3, 2.0, "8", True])
def test_a_number_out_of_range_is_named(name, value):
    arguments = {"shards": 2, "mode": "uniform", name: value}
    with pytest.raises(SpecError, match=rf"^{name} is an int of 1 or more, not {value!r}$"):
        plan_chunks([ParamSpec("w", (4,))], **arguments)


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(SpecError, match="mode 'best' is not known; it is one of variable, uniform"):
        plan_chunks([], shards=1, mode="best")


@pytest.mark.parametrize("arguments", [{}, {"mode": "uniform", "capacity_numel": 4}])
def test_a_bound_for_a_search_that_is_not_made_is_refused(arguments):
    with pytest.raises(SpecError, match="max_capacity_numel=9 bounds the search .* leave it out"):
        plan_chunks([], shards=1, max_capacity_numel=9, **arguments)


def test_only_param_specs_make_a_plan():
    with pytest.raises(SpecError, match=r"made of ParamSpecs, not of tuple: \('w', \(4,\)\)"):
        plan_chunks([("w", (4,))], shards=1)


@pytest.mark.parametrize(
    "specs",
    [
        [ParamSpec("w", (1,)), ParamSpec("w", (2,))],
        [ParamSpec("w", (1,)), ParamSpec("v", (2,), ties=("w",))],
        [ParamSpec("u", (1,), ties=("w",)), ParamSpec("v", (2,), group="other", ties=("w",))],
        [ParamSpec("w", (1,), ties=("w",))],
    ],
)
def test_a_name_that_occurs_twice_is_named(specs):
    with pytest.raises(DuplicateNameError, match="'w' occurs twice"):
        plan_chunks(specs, shards=1)
