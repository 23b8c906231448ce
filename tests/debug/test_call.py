import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import eqxlike
from eqxlike.debug._traces import describe_call, describe_changes


def call(function, *args, **kwargs):
    return describe_call(function, args, kwargs)


def take(x, *args, key=None, **kwargs):
    return x


def changes(before, after):
    """What differs between two values of the parameter `x`."""
    return describe_changes(call(take, before), call(take, after))


class Model(eqxlike.Module):
    weight: jax.Array
    bias: jax.Array | None
    size: int = eqxlike.field(static=True)

    def apply(self, x):
        return x


@jtu.register_pytree_node_class
@dataclasses.dataclass
class Foreign:
    child: int
    note: str

    def tree_flatten(self):
        return (self.child,), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(*children, note)


def model(size=2):
    return Model(jnp.ones(size), None, size)


def test_arguments_go_by_the_names_of_their_parameters():
    described = call(take, 1, 2, key=3, other=4)
    assert described == {
        "x": "1",
        "args": "tuple",
        "args[0]": "2",
        "key": "3",
        "kwargs": "dict",
        "kwargs['other']": "4",
    }


def test_arguments_that_have_no_names_go_by_their_places_and_a_partial_is_looked_into():
    for function in (max, lambda: None):
        described = call(function, "a", b=3)
        assert (described["args[0]"], described["kwargs['b']"]) == ("'a'", "3")
    assert call(lambda x, y: x, 1, 2) == call(lambda x, y: x, y=2, x=1)
    assert call(functools.partial(take, 1, key=3), 2)["args[0]"] == "2"


def test_what_the_function_holds_goes_by_self():
    for bound in (model().apply, model()):
        described = call(bound, 1)
        assert described["self"] == "Model"
        assert (described["self.weight"], described["self.size"]) == ("f32[2]", "2")


LEAVES = {
    "dtype": (jnp.ones(2), jnp.ones(2, jnp.bfloat16), "f32[2] then bf16[2]"),
    "weak-type": (jnp.array(1.0), jnp.float32(1), "weak_f32[] then f32[]"),
    "numpy": (np.ones(2, np.int32), jnp.ones(2, int), "i32[2](numpy) then i32[2]"),
    "key": (jax.random.key(0), jnp.ones(()), "key<fry>[] then f32[]"),
    "type-of-number": (1, 1.0, "1 then 1.0"),
    "text": ("a", None, "'a' then None"),
    "leaf-to-node": (1, (1,), "1 then tuple"),
    "named-tuple": (optax.EmptyState(), (), "EmptyState then tuple"),
    "other-node": (Foreign(1, "a"), Foreign(1, "b"), "Foreign with 'a' then Foreign with 'b'"),
}


def test_a_change_is_said_at_its_path():
    for before, after, message in LEAVES.values():
        assert changes(before, after)[0] == f"x: {message}"
    assert changes(jnp.ones(2), jnp.zeros(2)) == []
    before, after = ({"models": [model()], "step": step} for step in (3, 4))
    assert changes(before, after) == ["x['step']: 3 then 4"]
    assert changes([model(2)], [model(3)]) == [
        "x[0].size: 2 then 3",
        "x[0].weight: f32[2] then f32[3]",
    ]
    assert changes({"a": 1}, {"b": 2}) == ["x['a']: 1 then absent", "x['b']: absent then 2"]


def test_long_text_is_cut_and_functions_of_one_name_are_told_apart():
    (line,) = changes("a" * 1000, "b")
    assert line.endswith("aaa... then 'b'")
    assert len(line) < 300
    (line,) = changes(*(eval("lambda: None") for _ in range(2)))
    assert line.count("<function <lambda> at 0x") == 2


def test_shardings_and_tracers_are_described_by_their_types():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P("i")))
    assert changes(jnp.ones(2), sharded) == ["x: f32[2] then f32[2] sharded over i"]
    described = []
    jax.jit(lambda x: described.append(call(take, x)))(jnp.ones(2))
    assert described == [{"x": "f32[2]"}]
