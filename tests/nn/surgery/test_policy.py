import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn

BFLOAT16 = "params=float32,compute=bfloat16,output=float32"


def dtypes_of(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))}


def test_norms_keep_the_dtype_of_their_parameters(getkey):
    norms = (nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2))
    policy = nn.Policy("float16", "bfloat16", "float16")
    assert dtypes_of(policy.cast_to_parameter(norms)) == {"float32"}
    assert dtypes_of(policy.cast_to_compute(norms)) == {"float32"}


def test_only_floating_arrays_are_cast(getkey):
    tree = {
        "integer": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "key": getkey(),
        "number": 1.5,
        "text": "a",
        "none": None,
    }
    assert eqx.tree_equal(nn.Policy.parse("bfloat16").cast_to_compute(tree), tree)


def test_numpy_inputs_are_cast():
    policy = nn.Policy.parse(BFLOAT16)
    cast = policy.cast_to_compute([np.ones(2, np.float32), np.float32(1)])
    assert dtypes_of(cast) == {"bfloat16"}


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        (BFLOAT16, ("float32", "bfloat16", "float32")),
        ("output=float32, compute=float16", ("float32", "float16", "float32")),
        ("p=f32,c=bf16", ("float32", "bfloat16", "bfloat16")),
        ("params=bfloat16", ("bfloat16",) * 3),
        ("f16", ("float16",) * 3),
    ],
)
def test_policy_is_read_from_a_string(text, dtypes):
    assert nn.Policy.parse(text) == nn.Policy(*dtypes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Policy("float32", "int8", "float32"), "compute_dtype.*got int8"),
        (lambda: nn.Policy(None, "float32", "float32"), "parameter_dtype.*got None"),
        (lambda: nn.Policy.parse("weights=float32"), "got 'weights=float32'"),
        (lambda: nn.Policy.parse("p=f32,params=f32"), "got 'params=f32' in"),
        (lambda: nn.Policy.parse("c=float17"), "compute_dtype.*got 'float17'"),
        (lambda: nn.Policy.parse(""), "parameter_dtype.*got ''"),
        (lambda: nn.Policy.parse("p=f32,"), "got '' in 'p=f32,'"),
        (lambda: nn.Policy(np.longdouble, "f32", "f32"), "parameter_dtype.*got float"),
        (lambda: nn.Policy("f32", "f32", 32), "output_dtype.*got 32"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(make, message):
    with pytest.raises(ValueError, match=message):
        make()
