"""All runs see one text, one order of batches and one set of weights."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal


def test_the_last_tenth_is_held_out_and_overlaps_nothing():
    from pydoc_data.topics import topics

    from gpt.text import language_reference

    text = language_reference()
    whole = "\n".join(topics[name] for name in sorted(topics)).encode()
    assert bytes(text.train) + bytes(text.heldout) == whole
    assert len(text.heldout) == len(whole) // 10
    assert len(whole) > 400_000


def test_targets_are_the_next_bytes_and_the_order_depends_on_the_seed_alone():
    from gpt.text import training_batches

    train = np.arange(1000) % 251
    asked = {"steps": 3, "windows": 4, "context": 10}
    first = list(training_batches(train, **asked, seed=7))
    again = list(training_batches(train, **asked, seed=7))
    other = list(training_batches(train, **asked, seed=8))
    assert len(first) == 3
    for batch, same in zip(first, again, strict=True):
        assert batch.inputs.shape == (4, 10)
        assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert_array_equal((batch.inputs[:, -1] + 1) % 251, batch.targets[:, -1] % 251)
        assert_array_equal(batch.inputs, same.inputs)
    assert any((a.inputs != b.inputs).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_batch(ranks):
    from gpt.text import training_batches

    (batch,) = training_batches(np.arange(99), steps=1, windows=4, context=5, seed=0)
    parts = [batch.part(rank, ranks) for rank in range(ranks)]
    assert_array_equal(np.concatenate([part.inputs for part in parts]), batch.inputs)
    assert_array_equal(np.concatenate([part.targets for part in parts]), batch.targets)


def test_a_batch_that_does_not_divide_is_refused():
    from gpt.text import training_batches

    (batch,) = training_batches(np.arange(99), steps=1, windows=4, context=5, seed=0)
    with pytest.raises(ValueError, match="4 windows do not divide over 3 ranks"):
        batch.part(0, 3)


def test_heldout_windows_follow_each_other_and_stay_inside():
    from gpt.text import heldout_batches

    batches = list(heldout_batches(np.arange(101), batches=9, windows=3, context=10))
    assert len(batches) == 3  # 10 windows, 3 a batch, one left over
    flat = np.concatenate([batch.inputs.reshape(-1) for batch in batches])
    assert_array_equal(flat, np.arange(90))
    assert_array_equal(batches[-1].targets[-1], np.arange(81, 91))


def test_the_rate_warms_up_and_falls_to_its_last_value():
    from gpt.settings import Training

    training = Training(steps=100, warmup_steps=10, peak_rate=1.0, last_rate=0.1)
    rates = [training.rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert np.all(np.diff(rates[9:]) < 0)
    assert rates[-1] == pytest.approx(0.1)
    assert training.rate(55) == pytest.approx(0.55)  # half-way down the cosine


def test_the_model_has_the_promised_size_and_its_units_share_no_chunk():
    from gpt.settings import Model, initial_weights, param_specs, units

    import meshcore as mc

    model = Model()
    specs = param_specs(model)
    assert 1_000_000 <= sum(spec.numel for spec in specs) <= 3_000_000
    assert [n for unit in units(model) for n in unit.names] == [spec.name for spec in specs]
    plan = mc.plan_chunks(specs, shards=4)
    assert {chunk.group for chunk in plan.chunks} == {unit.name for unit in units(model)}
    weights = initial_weights(model, 0)
    assert {n: (v.shape, v.dtype) for n, v in weights.items()} == {
        spec.name: (spec.shape, np.float32) for spec in specs
    }
    assert_array_equal(weights["block0.qkv"], initial_weights(model, 0)["block0.qkv"])
    assert weights["block0.qkv"].std() == pytest.approx(0.02, rel=0.05)
