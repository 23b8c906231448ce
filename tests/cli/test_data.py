import numpy as np
import pytest

from eqxlike._cli import _models
from eqxlike._cli._models import Part


@pytest.fixture(scope="module", params=["diabetes", "digits"])
def prepared(request):
    whole = _models.load(request.param)
    return whole, _models.prepare(request.param, whole, seed=3)


def test_parts_are_disjoint_and_hold_every_example(prepared):
    whole, data = prepared
    held = np.concatenate([data.train.x, data.test.x]) * data.x_scaling.scale + data.x_scaling.mean
    assert len(held) == len(whole)
    np.testing.assert_allclose(np.sort(held, axis=0), np.sort(whole.x, axis=0), atol=1e-3)
    assert whole.x.shape == {"diabetes": (442, 10), "digits": (1797, 64)}[data.name]
    # The training part is standardised.
    np.testing.assert_allclose(data.train.x.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.mean(data.train.x**2), 1, rtol=1e-4)


def test_scaling_ignores_the_test_part(prepared):
    whole, data = prepared
    order = np.random.default_rng(3).permutation(len(whole))
    is_test = np.zeros(len(whole), bool)
    is_test[order[: len(data.test)]] = True
    x = np.where(is_test[:, None], 1e6, whole.x)
    changed = _models.prepare(data.name, Part(x, whole.y), seed=3)
    np.testing.assert_array_equal(changed.train.x, data.train.x)
    np.testing.assert_array_equal(changed.x_scaling.scale, data.x_scaling.scale)
    assert not np.any(changed.test.x == data.test.x)


def test_seed_decides_the_split(prepared):
    whole, data = prepared
    other = _models.prepare(data.name, whole, seed=4)
    assert not np.array_equal(other.train.y, data.train.y)


def test_validation_part_comes_from_the_training_part(prepared):
    _, data = prepared
    fit_part, validation = data.validation_split()
    joined = np.concatenate([validation.x, fit_part.x])
    np.testing.assert_array_equal(joined, data.train.x)
    assert 0.2 < len(validation) / len(data.train) < 0.3
