"""What goes wrong, and of which class the error or warning is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        x: Any

        def __call__(self, y):
            return self.x * y

        def method(self, y):
            return self.x * y

    return Model


@program
def field_assigned_after_init(eqx):
    make(eqx)(1).x = 2


@program
def undeclared_name_assigned_after_init(eqx):
    make(eqx)(1).y = 2


@program
def method_assigned_after_init(eqx):
    make(eqx)(1).method = lambda: 1


@program
def call_assigned_after_init(eqx):
    make(eqx)(1).__call__ = lambda: 1


@program
def field_incremented(eqx):
    model = make(eqx)(1)
    model.x += 1


@program
def field_assigned_by_setattr_in_a_method(eqx):
    class Model(eqx.Module):
        x: int

        def method(self):
            self.x = 2

    Model(1).method()


@program
def field_assigned_under_jit(eqx):
    class Model(eqx.Module):
        x: Any

        @jax.jit
        def method(self):
            self.x = 2

    Model(jnp.ones(2)).method()


@program(differs="deleting a field is refused like assigning it")
def field_deleted(eqx):
    model = make(eqx)(1)
    del model.x
    return vars(model)


@program
def undeclared_name_assigned_in_init(eqx):
    class Model(eqx.Module):
        def __init__(self):
            self.x = 1

    return Model()


@program
def annotation_in_init_declares_nothing(eqx):
    class Model(eqx.Module):
        def __init__(self):
            self.x: int = 1

    return Model()


@program
def field_read_before_it_is_set(eqx):
    class Model(eqx.Module):
        x: int

        def __init__(self):
            self.x = self.x + 1

    return Model()


@program
def field_never_set(eqx):
    class Model(eqx.Module):
        x: int
        y: int

        def __init__(self):
            self.x = 1

    return Model()


@program
def field_never_set_by_post_init(eqx):
    class Model(eqx.Module):
        x: int = eqx.field(init=False)

        def __post_init__(self):
            pass

    return Model()


@program
def field_of_the_base_never_set(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1

    class Model(Base):
        y: int

        def __init__(self):
            self.y = 1

    return Model()


@program
def field_without_annotation(eqx):
    class Model(eqx.Module):
        x = eqx.field(static=True)

    return Model


@program
def array_in_the_class_without_annotation_is_no_field(eqx):
    class Model(eqx.Module):
        table = jnp.arange(2)

    return Model().table.tolist(), jtu.tree_leaves(Model())


@program
def list_as_a_default(eqx):
    class Model(eqx.Module):
        x: Any = []  # noqa: RUF012

    return Model


@program
def array_as_a_default(eqx):
    class Model(eqx.Module):
        x: Any = jnp.ones(2)

    return Model


@program
def array_as_a_default_in_a_field(eqx):
    class Model(eqx.Module):
        x: Any = eqx.field(default=np.ones(2))

    return Model


@program
def annotation_and_method_of_one_name(eqx):
    class Model(eqx.Module):
        x: Any

        def x(self):
            return 1

    return Model(2).x


@program
def init_and_inherited_post_init(eqx):
    class Base(eqx.Module):
        x: int

        def __post_init__(self):
            pass

    class Model(Base):
        def __init__(self):
            self.x = 1

    return vars(Model())


@program
def post_init_and_inherited_init(eqx):
    class Base(eqx.Module):
        x: int

        def __init__(self):
            self.x = 1

    class Model(Base):
        def __post_init__(self):
            pass

    return vars(Model())


@program
def method_of_self_in_a_field(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    return Model()


@program
def method_of_self_in_a_static_field(eqx):
    class Model(eqx.Module):
        function: Any = eqx.field(static=True)

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    return Model()


@program
def method_of_another_instance_in_a_field(eqx):
    Model = make(eqx)
    return Model(Model(2).method).x(3)


@program
def partial_of_a_method_of_self_in_a_field(eqx):
    class Model(eqx.Module):
        function: Any

        def __init__(self):
            self.function = functools.partial(self.method, 1)

        def method(self, x):
            return x

    return Model().function()


@program
def closure_over_self_in_a_field(eqx):
    class Model(eqx.Module):
        x: int
        function: Any

        def __init__(self):
            self.x = 1
            self.function = lambda: self.x

    return Model().function()


def storing(transform, make_value):
    def stored(eqx):
        Model = make(eqx)
        value = transform(make_value(Model(jnp.ones(2))))
        return type(Model(value)).__name__

    return stored


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": jax.grad,
    "checkpoint": jax.checkpoint,
    "custom_jvp": jax.custom_jvp,
}
for name, transform in TRANSFORMS.items():
    module = storing(transform, lambda model: model)
    module.__name__ = f"{name}_of_a_module_in_a_field"
    program(module)
    closure = storing(transform, lambda model: lambda y: model.x * y)
    closure.__name__ = f"{name}_of_a_closure_in_a_field"
    program(closure)


@program
def jit_of_a_method_in_a_field(eqx):
    Model = make(eqx)
    return type(Model(jax.jit(Model(jnp.ones(2)).method))).__name__


@program
def jit_of_a_module_in_a_list_in_a_field(eqx):
    Model = make(eqx)
    return type(Model([jax.jit(Model(jnp.ones(2)))])).__name__


@program
def jit_of_a_module_in_a_dict_in_a_field(eqx):
    Model = make(eqx)
    return type(Model({"a": jax.vmap(Model(jnp.ones(2)))})).__name__


@program
def jit_of_a_module_in_a_static_field(eqx):
    class Holder(eqx.Module):
        function: Any = eqx.field(static=True)

    return type(Holder(jax.jit(make(eqx)(jnp.ones(2))))).__name__


@program
def filtered_function_in_a_field(eqx):
    Model = make(eqx)
    model = Model(eqx.filter_jit(Model(jnp.ones(2))))
    return [leaf.shape for leaf in jtu.tree_leaves(model) if eqx.is_array(leaf)]


@program
def jit_made_in_init(eqx):
    class Model(eqx.Module):
        x: Any
        function: Any

        def __init__(self, x):
            self.x = x
            self.function = jax.jit(lambda y: self.x * y)

    return Model(jnp.ones(2)).function(2.0).tolist()


STATIC = {
    "a_jax_array": (lambda: jnp.ones(2), "raises where Equinox warns"),
    "a_numpy_array": (lambda: np.ones(2), "raises where Equinox warns"),
    "a_tuple_with_an_array": (lambda: (jnp.ones(2),), "raises where Equinox warns"),
    "a_key": (lambda: jax.random.key(0), "raises where Equinox warns"),
    "a_numpy_scalar": (lambda: np.float32(1), "a NumPy scalar is as good as a number"),
    "a_list": (lambda: [1], ""),
    "a_dict": (lambda: {"a": 1}, ""),
    "a_set": (lambda: {1}, ""),
    "a_frozenset": (lambda: frozenset({1}), ""),
    "a_function": (lambda: len, ""),
    "a_tuple": (lambda: (1, "a"), ""),
    "a_shape": (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), ""),
}


def put_in_a_static_field(make_value):
    def put(eqx):
        class Model(eqx.Module):
            option: Any = eqx.field(static=True)

        return jtu.tree_leaves(Model(make_value()))

    return put


for name, (make_value, differs) in STATIC.items():
    put = put_in_a_static_field(make_value)
    put.__name__ = f"{name}_in_a_static_field"
    program(put, differs=differs)


@program(differs="raises where Equinox warns")
def module_with_an_array_in_a_static_field(eqx):
    class Model(eqx.Module):
        option: Any = eqx.field(static=True)

    return jtu.tree_leaves(Model(make(eqx)(jnp.ones(2))))


@program(differs="raises where Equinox warns")
def tracer_in_a_static_field(eqx):
    class Model(eqx.Module):
        option: Any = eqx.field(static=True)

    return jax.jit(lambda x: Model(x).option)(jnp.ones(2)).tolist()


@program
def string_leaf_passed_to_jax_jit(eqx):
    return jax.jit(lambda model: model)(make(eqx)("a"))


@program
def static_field_changed_by_tree_at(eqx):
    class Model(eqx.Module):
        option: Any = eqx.field(static=True)

    return eqx.tree_at(lambda model: model.option, Model("a"), "b")


@program(differs="a Module needs a slot of its own")
def module_that_is_an_exception(eqx):
    class Model(eqx.Module, Exception):
        x: int

    return Model(1).x


@program(differs="a Module needs a slot of its own")
def module_that_is_a_dict(eqx):
    class Model(eqx.Module, dict):
        x: int

    return Model(1).x


@program(differs="a Module needs a slot of its own")
def module_with_slots_of_a_mixin(eqx):
    class Mixin:
        __slots__ = ("y",)

    class Model(eqx.Module, Mixin):
        x: int

    return Model(1).x


@program
def virtual_subclass(eqx):
    class Other:
        pass

    eqx.Module.register(Other)


@program
def attribute_that_is_not_there(eqx):
    return make(eqx)(1).absent


@program
def setattr_of_a_users_own(eqx):
    class Model(eqx.Module):
        x: int

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    model = Model(1)
    model.x = 2
    return model.x
