"""Search for the first NaN or infinity in a call or in its gradient."""

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
from ._interpreter import Interpreter, NonFinite, Origin, nonfinite_kind


def find_nonfinite(
    model: Callable[..., Any], /, *args: Any, gradient: bool = True, **kwargs: Any
) -> NonFinite | None:
    """Finds the operation that made the first NaN or infinity of `model(*args, **kwargs)`.

    The call is traced, and the program runs once, operation by operation. This includes the
    operations inside jitted functions, loops, branches, custom rules and `jax.checkpoint`. If the
    output is finite, the gradient of the sum of the output is searched in the same way. The
    gradient is taken with respect to all floating-point arrays of the model and the arguments,
    except frozen arrays.

    Only values that reach the result count. An infinity that a mask removes does not count. An
    infinity that a mask inserts does not hide an infinity that an operation makes in another
    element. If a NaN passes through several operations, the first operation is reported. If the NaN
    or infinity is in an argument, such as an infinite weight, the path of the argument is reported.

    **Arguments:**

    - `model`: a Module or any function, such as a loss or a training step.
    - `*args`, `**kwargs`: the arguments of the call. Arrays are traced, and everything else is
      static.
    - `gradient`: whether to search the gradient too. Pass `False` if the function has no gradient,
      for example because it computes gradients itself.

    **Returns:** a `NonFinite`. Print it to see a report. `None` if everything is finite.

    **Raises:**

    - `TypeError` if `model` is not callable.
    - `ValueError` inside a jit or another transformation, because arrays have no values there.
    - Any exception that the call itself raises.

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
        # The program runs several times with the same random keys, so allow key reuse.
        jax.debug_key_reuse(False),
        # The search copies arrays to the host. Allow this inside `eqxlike.transfers`.
        jax.transfer_guard("allow"),
    ):
        found = _search(forward, "forward pass", arrays, rest, layers)
        if found is None and gradient:
            try:
                found = _search(backward, "gradient", arrays, rest, layers)
            except Exception as error:
                error.add_note(
                    "`find_nonfinite` raised this in the gradient; the forward pass has no NaN or "
                    "infinity. Pass `gradient=False` if the function has no gradient."
                )
                raise
    return found


def arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """A dict of the arguments by parameter name, and a function from it to `(args, kwargs)`."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # Either there is no signature, or the call does not fit the signature. In the latter case,
        # the call itself will raise.
        return {"args": args, "kwargs": kwargs}, lambda named: (named["args"], named["kwargs"])

    def back(named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Restore the order of the parameters, because JAX sorts the keys of a dict.
        ordered = {name: named[name] for name in bound.arguments}
        again = inspect.BoundArguments(bound.signature, ordered)  # pyright: ignore
        return again.args, again.kwargs

    return dict(bound.arguments), back


def _check_values(arrays: list[Any], rest: Rest, layers: "_Layers") -> None:
    for path, leaf in jtu.tree_leaves_with_path(rest.merge(arrays)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            problem = "it is a `jax.ShapeDtypeStruct`. Pass an array."
        elif isinstance(leaf, Tracer):
            problem = "it is a tracer. Call `find_nonfinite` outside of jit and other transforms."
        else:
            continue
        raise ValueError(
            f"`find_nonfinite` runs the program on values, but {layers.name_of(path)} has no "
            f"value: {problem}"
        )


def _inexact(tree: Any, name: Callable[[Any], str]) -> dict[str, Any]:
    """The floating-point and complex arrays of a tree, in a dict by name."""
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
    """The first NaN or infinity that reaches the outputs of a function of arrays, or `None`."""
    names: list[str] = []

    def traced(arrays: list[Any]) -> list[Any]:
        outputs = function(arrays)
        names.extend(outputs)
        return list(outputs.values())

    jaxpr = jax.make_jaxpr(traced)(arrays)
    interpreter = Interpreter(during, layers.at)
    inputs = []
    for path, array in jtu.tree_leaves_with_path(rest.merge_into(None, arrays)):
        origin = None
        if kind := nonfinite_kind(array):
            origin = interpreter.origin(kind, layers.name_of(path), is_given=kind == "infinity")
        inputs.append((array, origin))
    nonfinite_outputs = [
        (name, origin, kind)
        for name, (output, origin) in zip(names, interpreter.run(jaxpr, inputs), strict=True)
        if (kind := nonfinite_kind(output))
    ]
    if not nonfinite_outputs:
        return None
    reaches, origin, kind = min(nonfinite_outputs, key=lambda each: _order(each[1]))
    if origin is None:
        origin = interpreter.origin(kind, "a constant of the program")
    root = origin.root
    then = None if origin is root else dataclasses.replace(origin.found, reaches=reaches)
    return dataclasses.replace(root.found, reaches=reaches, then=then)


def _order(origin: Origin | None) -> tuple[int, int]:
    """The sort key of an origin. Operations come first, then infinite arguments, then constants."""
    return (2, 0) if origin is None else (int(origin.root.is_given), origin.root.number)


# --- The layer of an operation, found by a name scope with the number of the layer ---


_SCOPE = "eqxlike-layer-"


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A name scope around the calls of one layer.

    Scopes are static parts of the observed tree. All scopes of one call of `find_nonfinite` are
    equal, so that `tree_map` still works on two trees, such as a model and its optimiser state.
    Scopes of different calls are not equal. Otherwise JAX would reuse the trace of an earlier call,
    with other scopes.
    """

    layers: "_Layers"
    name: str = dataclasses.field(compare=False)

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        with jax.named_scope(self.name):
            yield lambda output: None


class _Layers:
    """The Modules in a function and its arguments."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]):
        self._found: list[tuple[str, str]] = []
        self._inside = _path_inside(function)
        self.function, self.arguments = observe_calls((function, arguments), self._add)

    def _add(self, path: tuple[Any, ...], layer: Module) -> Callable[..., Any]:
        self._found.append((_name_of(path), type(layer).__name__))
        return _Scope(self, f"{_SCOPE}{len(self._found) - 1}")

    def name_of(self, path: tuple[Any, ...]) -> str:
        """The path of a leaf as messages show it. The path through wrappers is left out."""
        whose, *inner = path
        if whose.idx == 0 and tuple(inner[: len(self._inside)]) == self._inside:
            inner = inner[len(self._inside) :]
        return _name_of((whose, *inner))

    def at(self, scopes: str) -> tuple[str, str]:
        """The path and type name of the innermost layer in the name scopes of an operation."""
        numbers = re.findall(rf"{_SCOPE}(\d+)", scopes)
        return self._found[int(numbers[-1])] if numbers else ("", "")


def _path_inside(function: Any) -> tuple[Any, ...]:
    """The path from a transformed or bound function to the Module that it wraps."""
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
    """The text of a path in the pair `(function, arguments by name)`."""
    whose, *inner = path
    if whose.idx == 0:
        return f"model{jtu.keystr(tuple(inner))}"
    return f"{inner[0].key}{jtu.keystr(tuple(inner[1:]))}"
