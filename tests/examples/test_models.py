"""The two models are one function, and a step over chunks is a step of the whole model."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytestmark = [pytest.mark.torch, pytest.mark.jax]


@pytest.fixture
def batch(small):
    from gpt.text import language_reference, training_batches

    model, training = small
    (batch,) = training_batches(
        language_reference().train,
        steps=1,
        windows=training.batch,
        context=model.context,
        seed=3,
    )
    return batch


@pytest.fixture
def weights(small):
    from gpt.settings import initial_weights

    values = initial_weights(small[0], 1)
    # Away from the symmetric start, so that no term is too small to be seen.
    random = np.random.default_rng(2)
    return {
        name: value + np.float32(0.1) * random.standard_normal(value.shape, dtype=np.float32)
        for name, value in values.items()
    }


def torch_loss_and_grads(model, weights, batch):
    import torch
    from train_gpt_unsharded import whole_loss

    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in weights.items()}
    loss = whole_loss(model, leaves, batch)
    loss.backward()
    return loss.item(), {n: leaf.grad.numpy() for n, leaf in leaves.items()}


def jax_loss_and_grads(model, weights, batch):
    import jax
    import jax.numpy as jnp
    from gpt import jax_model
    from gpt.settings import units

    def whole_loss(weights):
        x = jnp.asarray(batch.inputs.astype(np.int32))
        for unit in units(model):
            x = jax_model.forward(unit.kind, model, unit.local(weights), x)
        return jax_model.loss(x, jnp.asarray(batch.targets.astype(np.int32)))

    both = jax.jit(jax.value_and_grad(whole_loss))  # one program; op by op is many
    loss, grads = both({n: jnp.array(v) for n, v in weights.items()})
    return float(loss), {n: np.asarray(g) for n, g in grads.items()}


def test_torch_and_jax_compute_the_same_loss_and_gradients(small, weights, batch):
    model, _ = small
    loss, grads = torch_loss_and_grads(model, weights, batch)
    other_loss, other_grads = jax_loss_and_grads(model, weights, batch)
    assert loss > 1.0
    assert other_loss == pytest.approx(loss, abs=1e-5)
    for name, grad in grads.items():
        assert np.abs(grad).max() > 1e-4, f"{name} has no gradient worth comparing"
        assert_allclose(other_grads[name], grad, rtol=1e-4, atol=1e-5, err_msg=name)


def test_no_position_sees_the_future(small, weights, batch):
    import torch
    from gpt import torch_model
    from gpt.settings import units

    model, _ = small
    values = {n: torch.tensor(v) for n, v in weights.items()}

    def logits(tokens):
        x = torch.from_numpy(tokens)
        for unit in units(model):
            x = torch_model.forward(unit.kind, model, unit.local(values), x)
        return x.numpy()

    changed = batch.inputs.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = logits(batch.inputs), logits(changed)
    assert_allclose(after[:, :9], before[:, :9], atol=1e-5)
    assert np.abs(after[:, 9:] - before[:, 9:]).max() > 1e-2
