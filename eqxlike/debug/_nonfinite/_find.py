"""The first NaN or infinity of a call, and of its gradient."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._partition import Rest, split
from ..._pytree import is_inexact_array
from ..._transforms._signatures import check_callable
from ._walk import Layers, NonFinite, Origin, Walk, arguments_by_name, what_is_wrong


def find_nonfinite(
    model: Callable[..., Any], /, *args: Any, gradient: bool = True, **kwargs: Any
) -> NonFinite | None:
    """The operation that made the first NaN or infinity of `model(*args, **kwargs)`, and its layer.

    The call is traced, and the program run once on the values, operation by operation: into jitted
    functions, loops, branches, custom rules and `jax.checkpoint`. The model stays as it is. If the
    output is finite, so is done with the gradient of the sum of the output with respect to all
    floating-point arrays of the model and the arguments that are not frozen.

    What counts is what reaches the result: an infinity that a mask takes out again is none, and one
    that a mask puts in hides none that an operation makes beside it. A NaN that operations hand on
    from one to another is that of the first. Where an argument came with it, as a weight that is
    infinite, its path is told.

    **Arguments:**

    - `model`: a Module, or any function: a loss, or a training step.
    - `*args`, `**kwargs`: what to call it with. Arrays are traced, all else is static.
    - `gradient`: whether to look at the gradient too. `False` for a function that has none, such as
      one that takes gradients itself.

    **Returns:** a `NonFinite`, which says in text what was found; `None` if all is finite.

    **Raises:** `TypeError` if `model` is not callable; `ValueError` inside of a jit or another
    transformation, where arrays have no values; what the call itself raises.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> class Log(eqx.Module):
        ...     def __call__(self, x, *, key=None):
        ...         return jnp.log(x)
        >>> model = nn.Sequential([nn.Lambda(jax.nn.relu), Log(), nn.Lambda(jnp.sum)])
        >>> found = eqx.debug.find_nonfinite(model, jnp.array([1.0, -2.0]))
        >>> found.kind, found.during, found.layer, found.operation
        ('infinity', 'forward pass', 'model.layers[1]', 'log')
        >>> print(found.inputs[0])
        float32[2]: 0 to 1
    """
    check_callable(model, "find_nonfinite")
    named, back = arguments_by_name(model, args, kwargs)
    layers = Layers(model, named)
    arrays, rest = split((layers.function, layers.arguments))
    _check_values(arrays, rest, layers)

    def call(tree: Any) -> Any:
        function, named = tree
        args, kwargs = back(named)
        return function(*args, **kwargs)

    def forward(arrays: list[Any]) -> dict[str, Any]:
        return _inexact(call(rest.merge(arrays)), lambda path: f"output{jtu.keystr(path)}")

    def backward(arrays: list[Any]) -> dict[str, Any]:
        given, others = split(rest.merge(arrays), is_inexact_array)
        outputs, pull_back = jax.vjp(
            lambda given: list(_inexact(call(others.merge(given)), jtu.keystr).values()), given
        )
        (gradients,) = pull_back([jnp.ones_like(each) for each in outputs])
        return _inexact(
            others.merge_into(None, gradients),
            lambda path: f"the gradient of {layers.name_of(path)}",
        )

    with _values_at_hand():
        found = _search(forward, "forward pass", arrays, rest, layers)
        if found is None and gradient:
            try:
                found = _search(backward, "gradient", arrays, rest, layers)
            except Exception as error:
                error.add_note(
                    "It happened in the gradient that `find_nonfinite` took, after a forward pass "
                    "without NaN or infinity. Write `gradient=False` for a function that has none."
                )
                raise
    return found


@contextlib.contextmanager
def _values_at_hand() -> Iterator[None]:
    """A context in which a program is run operation by operation, and its values are looked at."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        # A random key that the program uses once is used by each run of it.
        jax.debug_key_reuse(False),
        # Who searches within `eqxlike.transfers` has asked for the copies that it takes.
        jax.transfer_guard("allow"),
    ):
        yield


def _check_values(arrays: list[Any], rest: Rest, layers: Layers) -> None:
    for path, leaf in jtu.tree_leaves_with_path(rest.merge(arrays)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`find_nonfinite` runs the program on values, and {layers.name_of(path)} has "
                "none: it is a `jax.ShapeDtypeStruct`. Give an array."
            )
        if isinstance(leaf, Tracer):
            raise ValueError(
                f"`find_nonfinite` runs the program on values, and {layers.name_of(path)} has "
                "none: it is being traced. Call it outside of jit and other transformations."
            )


def _inexact(tree: Any, name: Callable[[Any], str]) -> dict[str, Any]:
    """The floating-point arrays of a tree by name."""
    return {
        name(path): leaf for path, leaf in jtu.tree_leaves_with_path(tree) if is_inexact_array(leaf)
    }


def _search(
    function: Callable[[list[Any]], dict[str, Any]],
    during: str,
    arrays: list[Any],
    rest: Rest,
    layers: Layers,
) -> NonFinite | None:
    """What spoils the outputs of a function of arrays; `None` if nothing does."""
    names: list[str] = []

    def traced(arrays: list[Any]) -> list[Any]:
        outputs = function(arrays)
        names.extend(outputs)
        return list(outputs.values())

    jaxpr = jax.make_jaxpr(traced)(arrays)
    walk = Walk()
    paths = jtu.tree_leaves_with_path(rest.merge_into(None, arrays))
    inputs = []
    for path, array in paths:
        wrong, name = what_is_wrong(array), layers.name_of(path)
        is_given = wrong == "infinity"
        origin = walk.origin(kind=wrong, operation=name, is_given=is_given) if wrong else None
        inputs.append((array, origin))
    spoiled = [
        (name, origin, what_is_wrong(output))
        for name, (output, origin) in zip(names, walk.run(jaxpr, inputs), strict=True)
    ]
    spoiled = [each for each in spoiled if each[2]]
    if not spoiled:
        return None
    reaches, origin, kind = min(spoiled, key=_order)
    if origin is None:
        assert kind is not None
        origin = walk.origin(kind=kind, operation="a constant of the program")
    return _report(origin, during, reaches, layers)


def _order(spoiled: tuple[str, Origin | None, Any]) -> tuple[int, int]:
    """Makers first, in their order; then infinite arguments, then constants."""
    origin = spoiled[1]
    if origin is None:
        return 2, 0
    root = _root(origin)
    return int(root.is_given), root.number


def _root(origin: Origin) -> Origin:
    while origin.cause is not None:
        origin = origin.cause
    return origin


def _report(origin: Origin, during: str, reaches: str, layers: Layers) -> NonFinite:
    root = _root(origin)
    then = None if origin is root else _one(origin, during, reaches, layers, None)
    return _one(root, during, reaches, layers, then)


def _one(
    origin: Origin, during: str, reaches: str, layers: Layers, then: NonFinite | None
) -> NonFinite:
    layer, layer_type = layers.at(origin.scopes)
    return NonFinite(
        kind=origin.kind,
        during=during,
        layer=layer,
        layer_type=layer_type,
        operation=origin.operation,
        source=origin.source,
        turns=origin.turns,
        inputs=origin.inputs,
        outputs=origin.outputs,
        came_with=origin.came_with,
        reaches=reaches,
        then=then,
    )
