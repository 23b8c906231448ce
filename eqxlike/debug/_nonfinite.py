"""The first NaN or infinity of a call, and of its gradient."""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import Module, is_inexact_array
from .._compat import Tracer
from ..extend import Rest, Wrapper, check_callable, observe_calls, split
from ._walk import NonFinite, Origin, Walk, what_is_wrong


def find_nonfinite(
    model: Callable[..., Any], /, *args: Any, gradient: bool = True, **kwargs: Any
) -> NonFinite | None:
    """The operation that made the first NaN or infinity of `model(*args, **kwargs)`, and its layer.

    The call is traced, and the program run once on the values, operation by operation: into jitted
    functions, loops, branches, custom rules and `jax.checkpoint`. The model stays as it is. If the
    output is finite, so is done with the gradient of the sum of the output with respect to all
    floating-point arrays of the model and the arguments that are not frozen.

    A value counts if it reaches the result: an infinity that a mask removes does not, and one that
    a mask inserts hides none that an operation makes next to it. A NaN that passes through several
    operations belongs to the first. Where an argument came with it, as a weight that is
    infinite, its path is reported.

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
    layers = _Layers(model, named)
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

    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        # A random key that the program uses once is used by each run of it.
        jax.debug_key_reuse(False),
        # Who searches within `eqxlike.transfers` has asked for the copies that it takes.
        jax.transfer_guard("allow"),
    ):
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


def arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arguments under the names of their parameters, and the inverse of this."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or a call that does not fit it, of which Python will say so.
        return {"args": args, "kwargs": kwargs}, lambda named: (named["args"], named["kwargs"])

    def back(named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # In the order of the parameters: a tree of a dict comes back in that of the names.
        ordered = {name: named[name] for name in bound.arguments}
        again = inspect.BoundArguments(bound.signature, ordered)  # pyright: ignore
        return again.args, again.kwargs

    return dict(bound.arguments), back


def _check_values(arrays: list[Any], rest: Rest, layers: "_Layers") -> None:
    for path, leaf in jtu.tree_leaves_with_path(rest.merge(arrays)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            problem = "it is a `jax.ShapeDtypeStruct`. Give an array."
        elif isinstance(leaf, Tracer):
            problem = "it is being traced. Call it outside of jit and other transformations."
        else:
            continue
        raise ValueError(
            f"`find_nonfinite` runs the program on values, and {layers.name_of(path)} has none: "
            f"{problem}"
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
    layers: "_Layers",
) -> NonFinite | None:
    """What spoils the outputs of a function of arrays; `None` if nothing does."""
    names: list[str] = []

    def traced(arrays: list[Any]) -> list[Any]:
        outputs = function(arrays)
        names.extend(outputs)
        return list(outputs.values())

    jaxpr = jax.make_jaxpr(traced)(arrays)
    walk = Walk(during, layers.at)
    inputs = []
    for path, array in jtu.tree_leaves_with_path(rest.merge_into(None, arrays)):
        origin = None
        if wrong := what_is_wrong(array):
            origin = walk.origin(wrong, layers.name_of(path), is_given=wrong == "infinity")
        inputs.append((array, origin))
    spoiled = [
        (name, origin, wrong)
        for name, (output, origin) in zip(names, walk.run(jaxpr, inputs), strict=True)
        if (wrong := what_is_wrong(output))
    ]
    if not spoiled:
        return None
    reaches, origin, kind = min(spoiled, key=lambda each: _order(each[1]))
    if origin is None:
        origin = walk.origin(kind, "a constant of the program")
    root = _root(origin)
    then = None if origin is root else dataclasses.replace(origin.found, reaches=reaches)
    return dataclasses.replace(root.found, reaches=reaches, then=then)


def _order(origin: Origin | None) -> tuple[int, int]:
    """Makers first, in their order; then infinite arguments, then constants."""
    if origin is None:
        return 2, 0
    root = _root(origin)
    return int(root.is_given), root.number


def _root(origin: Origin) -> Origin:
    while origin.cause is not None:
        origin = origin.cause
    return origin


# --- The layer that was being called: each puts its number in the scope of its operations ---


_SCOPE = "eqxlike-layer-"


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Names what a layer makes.

    All of one call of `find_nonfinite` are equal: a program that maps one tree onto another, as a
    step of a training does with the model and what its optimiser keeps, is to find them of one
    structure, as they were. Those of different calls are not, since JAX keeps what it has traced.
    """

    layers: "_Layers"
    name: str = dataclasses.field(compare=False)

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        with jax.named_scope(self.name):
            yield lambda output: None


class _Layers:
    """The Modules of a call."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]):
        self._found: list[tuple[str, str]] = []
        self._inside = _path_inside(function)
        self.function, self.arguments = observe_calls((function, arguments), self._add)

    def _add(self, path: tuple[Any, ...], layer: Module) -> Callable[..., Any]:
        self._found.append((_name_of(path), type(layer).__name__))
        return _Scope(self, f"{_SCOPE}{len(self._found) - 1}")

    def name_of(self, path: tuple[Any, ...]) -> str:
        """The name of a leaf: like a layer, it stands under the path of the wrapper around it."""
        whose, *inner = path
        if whose.idx == 0 and tuple(inner[: len(self._inside)]) == self._inside:
            inner = inner[len(self._inside) :]
        return _name_of((whose, *inner))

    def at(self, scopes: str) -> tuple[str, str]:
        """The path and the type of the innermost layer in the scopes of an operation."""
        numbers = re.findall(rf"{_SCOPE}(\d+)", scopes)
        return self._found[int(numbers[-1])] if numbers else ("", "")


def _path_inside(function: Any) -> tuple[Any, ...]:
    """The path from a function that was transformed, or bound, to the Module inside."""
    path: tuple[Any, ...] = ()
    while isinstance(function, Wrapper):
        wrapped = (function.__wrapped__, getattr(function, "__self__", None))
        parts = jtu.tree_leaves_with_path(
            function,
            is_leaf=lambda part, whole=function: part is not whole and isinstance(part, Module),
        )
        for key, part in parts:
            if isinstance(part, Module) and any(part is each for each in wrapped):
                path, function = path + key, part
                break
        else:
            break
    return path


def _name_of(path: tuple[Any, ...]) -> str:
    """The name of a place in the pair of a function and its arguments by name."""
    whose, *inner = path
    if whose.idx == 0:
        return f"model{jtu.keystr(tuple(inner))}"
    return f"{inner[0].key}{jtu.keystr(tuple(inner[1:]))}"
