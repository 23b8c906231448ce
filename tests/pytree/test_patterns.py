import jax
import jax.numpy as jnp
import pytest

from eqxlike._pytree import path_matches

LEAF = jax.ShapeDtypeStruct((2, 3), jnp.float32)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers[0].weight", "layers[0].weight", True),
        ("layers[0].weight", "layers[0].weights", False),
        ("layers[0].weight", "layers0.weight", False),
        ("layers[*].weight", "layers[11].weight", True),
        ("layers[*].weight", "layers[0].inner[1].weight", False),
        ("*", "layers[0]", False),
        ("**", "", True),
        ("**.weight", "layers[0].inner['a'].weight", True),
        (lambda path, leaf: leaf.ndim == 2, "anything", True),
        (lambda path, leaf: path.endswith("bias"), "weight", False),
    ],
)
def test_pattern_means_these_paths(pattern, path, expected):
    assert path_matches(pattern, path, LEAF) is expected
