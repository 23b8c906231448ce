import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqxlike import train
from eqxlike.train._sharding import place_batch
from tests.train.sharding import trainings

SHARDING = train.data_parallel()


def test_examples_are_split_and_the_rest_is_whole():
    batch = {"x": np.ones((4, 3)), "weight": jnp.ones(()), "name": "training", "none": None}
    placed = place_batch(batch, SHARDING)
    assert placed["x"].sharding == SHARDING.batch
    assert placed["x"].dtype == jnp.float32
    assert placed["weight"].sharding.spec == P()
    assert (placed["name"], placed["none"]) == ("training", None)


def test_keys_are_split_as_examples_are():
    keys = jax.random.split(jax.random.key(0), 4)
    assert place_batch(keys, SHARDING).sharding == SHARDING.batch


def test_batches_are_placed_ahead_of_time():
    batches = [{"x": np.full((4, 3), number), "name": "training"} for number in range(2)]
    with train.prefetch(batches, sharding=SHARDING) as ahead:
        placed = list(ahead)
    assert [float(batch["x"].sum()) for batch in placed] == [0, 12]
    assert {batch["x"].sharding for batch in placed} == {SHARDING.batch}
    assert {batch["name"] for batch in placed} == {"training"}


@pytest.mark.parametrize("where", ["before", "within"])
def test_batch_that_does_not_divide_is_refused(where):
    batch = np.ones((8, 4), np.float32), np.ones((3, 4), np.float32)
    expected = (
        r"the batch does not divide: \[1\] has 3 examples, of shape \(3, 4\), and the mesh axes "
        "data split them into 2 parts. Choose a batch size that is a multiple"
    )
    step = train.make_step(trainings.squares, trainings.OPTIMISER, sharding=SHARDING)
    state = train.shard(trainings.start(), SHARDING)
    call = (
        (lambda: place_batch(batch, SHARDING)) if where == "before" else lambda: step(state, batch)
    )
    with pytest.raises(ValueError, match=expected):
        call()
