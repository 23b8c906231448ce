"""Modules, a mesh and shardings for several tests of transformations."""

from typing import Any

import jax

import eqxlike

# On a machine with one GPU, `benchmarks.all` runs the tests that need only one device.
MESH = jax.make_mesh(
    (min(2, jax.device_count()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
)
ROWS, WHOLE = jax.P("data"), jax.P()
SPLIT, COPIED = jax.NamedSharding(MESH, ROWS), jax.NamedSharding(MESH, WHOLE)


class Scale(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x


class Node(eqxlike.Module):
    weight: Any
    others: Any = ()
    size: int = eqxlike.field(static=True, default=1)
