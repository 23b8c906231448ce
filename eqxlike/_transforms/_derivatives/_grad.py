"""Gradients, Jacobians and Hessians with respect to an argument's floating-point arrays."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from ..._module import field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import (
    MISSING,
    describe_node,
    is_array_like,
    is_array_or_traced_reference,
    is_inexact_array,
)
from .._flat_call import path_of
from .._signatures import (
    Aux,
    GradOptions,
    Params,
    TransformedFunction,
    Value,
    check_callable,
    differentiated_and_others,
    value_and_aux,
)
from ._products import varying_like

Arrays = list[Array]
OfArrays = Callable[[Arrays], tuple[Any, Arrays]]
"""A function of the differentiated arrays. It returns a value and the arrays of an `aux`."""


class DifferentiationMode(Protocol):
    """Protocol of a differentiation mode, with the only method that `filter_grad` calls.

    The base class of modes is `eqxlike.ad.Mode`.
    """

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays, /
    ) -> tuple[tuple[Any, Arrays], Arrays]: ...


class _GradFunction(TransformedFunction):
    """The function that `filter_value_and_grad` and `filter_grad` return."""

    _has_aux: bool = field(static=True)
    _returns_value: bool = field(static=True)
    # Not static, because a mode is a Module, and a user's mode may have arrays.
    _mode: DifferentiationMode | None
    _grad_options: tuple[tuple[str, Any], ...] = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        transform = _name_of(self._returns_value)
        differentiated, others = differentiated_and_others(args, transform)
        # `split` treats frozen arrays like integers: see `flag_leaves` in `_pytree/_predicates.py`.
        arrays, rest = split(differentiated, is_inexact_array)
        # JAX returns only arrays. The trace stores all other leaves of the output here.
        aux_rest: Rest = UNTRACED

        def of_arrays(arrays: list[Any]) -> Any:
            nonlocal aux_rest
            output = self._function(rest.merge(arrays), *others, **kwargs)
            value, aux = value_and_aux(output, self._has_aux, self)
            aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
            return value, aux_arrays

        options, name = dict(self._grad_options), getattr(self, "__name__", "the function")
        with advised(self._mode, name):
            if self._mode is None:
                differentiated_function = jax.value_and_grad(of_arrays, has_aux=True, **options)
                (value, aux_arrays), gradients = differentiated_function(arrays)
            else:
                (value, aux_arrays), gradients = value_and_grad_by(
                    self._mode, of_arrays, arrays, rest, options, name
                )
        gradient = rest.merge_into(None, gradients)
        aux = aux_rest.merge(aux_arrays)
        if self._returns_value:
            return ((value, aux), gradient) if self._has_aux else (value, gradient)
        return (gradient, aux) if self._has_aux else gradient


@overload
def filter_value_and_grad(
    *, has_aux: Literal[False] = False, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Value]], Callable[Params, tuple[Value, PyTree]]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: Literal[True], **gradkwargs: Unpack[GradOptions]
) -> Callable[
    [Callable[Params, tuple[Value, Aux]]], Callable[Params, tuple[tuple[Value, Aux], PyTree]]
]: ...
@overload
def filter_value_and_grad(
    *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Any]], Callable[Params, tuple[Any, PyTree]]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, Value],
    *,
    has_aux: Literal[False] = False,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[Value, PyTree]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, tuple[Value, Aux]],
    *,
    has_aux: Literal[True],
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[tuple[Value, Aux], PyTree]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Params, Any], *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[Params, tuple[Any, PyTree]]: ...
def filter_value_and_grad(
    fun: Callable[..., Any] = MISSING,
    *,
    has_aux: bool = False,
    mode: DifferentiationMode | None = None,
    **gradkwargs: Any,
) -> Any:
    """Makes a function that computes the value of `fun` and the gradient for its first argument.

    The gradient is taken with respect to the floating-point and complex arrays of the first
    argument, except those that `nn.freeze` has frozen. If there is no such array, the gradient is
    `None` at every leaf.

    **Arguments:**

    - `fun`: a function of any arguments that returns a floating-point scalar. Without it, a
      decorator is returned.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.
    - `mode`: a mode of `eqxlike.ad`, such as `ad.Forward()`. `None` selects JAX's reverse mode.
    - `**gradkwargs`: `holomorphic`, `allow_int` as in `jax.value_and_grad`.

    **Returns:** a function of the same arguments that returns `(value, gradient)`, or
    `((value, aux), gradient)`. The gradient has the structure of the first argument, with `None`
    for every leaf that is not differentiated.

    **Raises:**

    - `ValueError` if `argnums` is passed.
    - `TypeError` if `mode` is not a mode.
    - `TypeError`, when the returned function is called, if the first argument is passed by keyword,
      or if the value is not a floating-point scalar.
    - JAX's own error if the mode cannot differentiate an operation. A note names a mode that can
      differentiate it.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_value_and_grad
        ... def loss(parameters, x):
        ...     return (parameters["scale"] * x).sum() ** parameters["power"]
        >>> value, gradient = loss({"scale": jnp.array(3.0), "power": 2}, jnp.ones(2))
        >>> print(value, gradient["scale"], gradient["power"])
        36.0 24.0 None
    """
    return _make(fun, has_aux, True, mode, gradkwargs)


@overload
def filter_grad(
    *, has_aux: Literal[False] = False, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, ArrayLike]], Callable[Params, PyTree]]: ...
@overload
def filter_grad(
    *, has_aux: Literal[True], **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, tuple[ArrayLike, Aux]]], Callable[Params, tuple[PyTree, Aux]]]: ...
@overload
def filter_grad(
    *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[[Callable[Params, Any]], Callable[Params, Any]]: ...
@overload
def filter_grad(
    fun: Callable[Params, ArrayLike],
    *,
    has_aux: Literal[False] = False,
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, PyTree]: ...
@overload
def filter_grad(
    fun: Callable[Params, tuple[ArrayLike, Aux]],
    *,
    has_aux: Literal[True],
    **gradkwargs: Unpack[GradOptions],
) -> Callable[Params, tuple[PyTree, Aux]]: ...
@overload
def filter_grad(
    fun: Callable[Params, Any], *, has_aux: bool, **gradkwargs: Unpack[GradOptions]
) -> Callable[Params, Any]: ...
def filter_grad(
    fun: Callable[..., Any] = MISSING,
    *,
    has_aux: bool = False,
    mode: DifferentiationMode | None = None,
    **gradkwargs: Any,
) -> Any:
    """Makes a function that computes the gradient of `fun` for its first argument.

    The arguments, the errors and the arrays that are differentiated are the same as for
    `filter_value_and_grad`.

    **Returns:** a function of the same arguments that returns the gradient, or `(gradient, aux)`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> print(eqx.filter_grad(lambda x: x**2)(jnp.array(3.0)))
        6.0
    """
    return _make(fun, has_aux, False, mode, gradkwargs)


def _name_of(returns_value: bool) -> str:
    return "filter_value_and_grad" if returns_value else "filter_grad"


def _make(
    fun: Any, has_aux: bool, returns_value: bool, mode: Any, gradkwargs: dict[str, Any]
) -> Any:
    if "argnums" in gradkwargs:
        raise ValueError(
            "`argnums` should not be passed. If you need to differentiate multiple objects then "
            "collect them into a tuple and pass that as the first argument."
        )
    transform = _name_of(returns_value)
    if mode is not None:
        check_mode(mode, transform)
        # Without a mode, JAX itself checks `gradkwargs`, when the function is called.
        if unknown := gradkwargs.keys() - GradOptions.__annotations__.keys():
            raise TypeError(f"`{transform}` got an unexpected keyword argument {min(unknown)!r}.")
    if fun is MISSING:
        return functools.partial(
            _make, has_aux=has_aux, returns_value=returns_value, mode=mode, gradkwargs=gradkwargs
        )
    check_callable(fun, transform)
    return _GradFunction(fun, has_aux, returns_value, mode, tuple(sorted(gradkwargs.items())))


# --- Jacobians and Hessians for the floating-point arrays of the first argument ---


class JacobianFunction(TransformedFunction):
    """The function that `filter_jacfwd` and similar transformations return.

    - `_modes`: the transformations to apply, such as `jax.jacfwd`, with the innermost one first.
    """

    _has_aux: bool = field(static=True)
    _name: str = field(static=True)
    _modes: tuple[Callable[..., Any], ...] = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        differentiated, others = differentiated_and_others(args, self._name)
        arrays, rest = split(differentiated, is_inexact_array)
        # JAX returns only arrays. The trace stores all other leaves of the output here.
        value_rest: Rest = UNTRACED
        aux_rest: Rest = UNTRACED

        def of_arrays(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal value_rest, aux_rest
            output = self._function(rest.merge(arrays), *others, **kwargs)
            value, aux = value_and_aux(output, self._has_aux, self)
            value_arrays, value_rest = split(value, is_array_like)
            aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
            return value_arrays, aux_arrays

        def tree_of(rows: list[Any], depth: int) -> PyTree:
            """Converts nested lists of derivatives to nested trees with the structure of the first
            argument. The trees have one level for each transformation in `_modes`.
            """
            subtrees = [tree_of(row, depth - 1) for row in rows] if depth else rows
            return rest.merge_into(None, subtrees)

        transformed: Callable[..., Any] = of_arrays
        if arrays:
            for mode in self._modes:
                transformed = mode(transformed, has_aux=True)
            try:
                rows_of_outputs, aux_arrays = transformed(arrays)
            except CannotDifferentiate as error:
                raise error.at(path_of_taken(rest, error.place)) from None
        else:
            # `jax.jacfwd` and `jax.jacrev` need at least one array; `jax.value_and_grad` needs
            # none.
            value_arrays, aux_arrays = of_arrays(arrays)
            rows_of_outputs = [[] for _ in value_arrays]
        depth = len(self._modes) - 1
        jacobian = value_rest.merge_into(None, [tree_of(rows, depth) for rows in rows_of_outputs])
        return (jacobian, aux_rest.merge(aux_arrays)) if self._has_aux else jacobian


def filter_jacfwd(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """Makes a function that computes the Jacobian of `fun` for its first argument, by forward mode.

    The function makes one forward pass for each element of the input arrays. Use forward mode if
    the outputs have more elements than the inputs.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** a function of the same arguments that returns the Jacobian, or `(jacobian, aux)`.
    The Jacobian has the structure of the value. In place of each array of the value, the Jacobian
    has a tree with the structure of the first argument. In this tree, each floating-point array of
    the argument is replaced by an array of derivatives, and each other leaf by `None`. For an
    output of shape `(*out)` and an input of shape `(*in)`, the derivatives have shape
    `(*out, *in)`. In place of leaves of the value that are neither arrays nor numbers, the Jacobian
    has `None`.

    **Raises:** when called, `TypeError` if the first argument is passed by keyword, or if the
    argument contains a complex array.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(parameters, x):
        ...     return parameters["scale"] ** parameters["power"] * x
        >>> jacobian = eqx.filter_jacfwd(scale)({"scale": jnp.array(3.0), "power": 2}, jnp.ones(2))
        >>> print(jacobian["scale"], jacobian["power"])
        [6. 6.] None
    """
    check_callable(fun, "filter_jacfwd")
    return JacobianFunction(fun, has_aux, "filter_jacfwd", (jax.jacfwd,))


def filter_jacrev(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """Makes a function that computes the Jacobian of `fun` for its first argument, by reverse mode.

    The function makes one backward pass for each element of the outputs. Arguments and output are
    as in `filter_jacfwd`.

    **Raises:** when called, `TypeError` if the first argument is passed by keyword, or if the value
    contains an array that is not real.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> print(eqx.filter_jacrev(lambda x: x.sum())(jnp.ones(3)))
        [1. 1. 1.]
    """
    check_callable(fun, "filter_jacrev")
    return JacobianFunction(fun, has_aux, "filter_jacrev", (jax.jacrev,))


def filter_hessian(fun: Callable[Params, Any], has_aux: bool = False) -> Callable[Params, PyTree]:
    """Makes a function that computes the Hessian of `fun` for its first argument.

    The function applies forward mode to reverse mode. Arguments and errors are as in
    `filter_jacfwd`.

    **Returns:** a function of the same arguments that returns the Hessian, or `(hessian, aux)`. The
    Hessian is the Jacobian of the Jacobian: in place of each array of the Jacobian, it has another
    tree with the structure of the first argument. The arrays of this tree have shape
    `(*out, *in, *in)`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> hessian = eqx.filter_jit(eqx.filter_hessian(lambda p: p["a"] ** 2 * p["b"]))
        >>> second = hessian({"a": jnp.array(3.0), "b": jnp.array(5.0)})
        >>> print(second["a"]["a"], second["a"]["b"], second["b"]["b"])
        10.0 6.0 0.0
    """
    check_callable(fun, "filter_hessian")
    return JacobianFunction(fun, has_aux, "filter_hessian", (jax.jacrev, jax.jacfwd))


# --- Gradients by a mode of `eqxlike.ad` that the caller selects ---


class CannotDifferentiate(ValueError):
    """Raised by a mode that cannot differentiate with respect to one of the arrays.

    `place` is the index of the array. In the message, `why` follows the index. A caller that knows
    the path of the array raises `at(path)` instead; there, `why` follows the path.
    """

    def __init__(self, place: int, why: str):
        super().__init__(f"Differentiated array {place} {why}")
        self.place = place
        self.why = why

    def at(self, path: str) -> ValueError:
        """The same error, with the path of the array instead of its index."""
        return ValueError(f"The array at {path} {self.why}")


def check_mode(mode: Any, transform: str) -> None:
    """Raises `TypeError` unless `mode` is a mode."""
    if isinstance(mode, type) or not callable(getattr(mode, "value_and_grad", None)):
        hint = f": call it, `{mode.__name__}()`" if isinstance(mode, type) else ""
        raise TypeError(
            f"`{transform}` expects a mode of eqxlike.ad as `mode`, such as `ad.Reverse()`; "
            f"got {mode!r}{hint}."
        )


def value_and_grad_by(
    mode: DifferentiationMode,
    function: OfArrays,
    arrays: Arrays,
    rest: Rest,
    options: Mapping[str, Any],
    name: str,
) -> tuple[tuple[Any, Arrays], Arrays]:
    """Computes `jax.value_and_grad(function, has_aux=True, **options)(arrays)` by `mode`.

    **Arguments:**

    - `rest`: the first argument of the user's function, without `arrays`. Error messages show the
      paths of the arrays in this argument.
    - `name`: the name of the function in error messages.
    """
    is_holomorphic = bool(options.get("holomorphic", False))
    for place, array in enumerate(arrays if is_holomorphic else ()):
        if not jnp.iscomplexobj(array):
            raise TypeError(
                f"With `holomorphic=True`, every differentiated array of {name} must be complex; "
                f"{path_of_taken(rest, place)} is {describe_node(array)}."
            )

    def of_real_value(arrays: Arrays) -> tuple[Array, Arrays]:
        value, aux = function(arrays)
        value = checked_value(value, is_holomorphic, name)
        # In JAX's convention, the derivative of a holomorphic function equals the gradient
        # of its real part.
        return jnp.real(value), [value, *aux]

    arrays = list(map(jnp.asarray, arrays))
    if arrays:
        try:
            found = mode.value_and_grad(of_real_value, arrays)
        except CannotDifferentiate as error:
            raise error.at(path_of_taken(rest, error.place)) from None
        try:
            (_, (value, *aux)), gradients = found
        except (TypeError, ValueError):
            raise TypeError(
                f"`value_and_grad` of {mode!r} must return `((value, aux), gradient)`, where `aux` "
                f"and `gradient` are lists of arrays; it returned {describe_node(found)}."
            ) from None
        if len(gradients) != len(arrays):
            raise ValueError(
                f"{mode!r} differentiated {name} with respect to {len(arrays)} arrays, but "
                f"returned {len(gradients)} gradients: `value_and_grad` must return one each."
            )
        gradients = list(map(varying_like, gradients, arrays))
    else:
        (_, (value, *aux)), gradients = of_real_value([]), []
    return (value, aux), gradients


def path_of_taken(rest: Rest, place: int) -> str:
    """The path of a differentiated array. `place` is its index among the differentiated arrays."""
    places = rest.take(range(rest.treedef.num_leaves))
    return f"args[0]{path_of(places[place], rest.treedef)}"


def checked_value(value: Any, is_holomorphic: bool, name: str) -> Array:
    """Returns `value` as an array. Raises `TypeError` unless `value` is a differentiable scalar."""
    if not is_array_like(value):
        what, hint = describe_node(value), "return only the scalar, or pass `has_aux=True`"
    else:
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        what = f"an array of shape {shape} and dtype {dtype}"
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if shape:
            hint = "sum or average it, or take `ad.jacobian` of the function"
        elif not jnp.issubdtype(dtype, jnp.inexact):
            hint = "return a floating-point number: integers and booleans have no derivative"
        elif is_complex and not is_holomorphic:
            hint = "take its real part or modulus, or pass `holomorphic=True`"
        elif is_holomorphic and not is_complex:
            hint = "leave out `holomorphic=True`"
        else:
            return jnp.asarray(value)
    wanted = "complex" if is_holomorphic else "real floating-point"
    raise TypeError(
        "Gradient only defined for scalar-output functions: the value of "
        f"{name} must be a {wanted} scalar, but is {what}. To fix this, {hint}."
    )


# --- Hints for operations that a mode cannot differentiate ---


_ANY_FUNCTION = (
    "`ad.FiniteDifference()` differentiates any function, and `ad.differentiate_with(part, "
    "ad.FiniteDifference())` only this part"
)

# JAX's messages (0.10.2 to 0.12.0.1), and what to add to them.
_HINTS = (
    (
        r"Gradient only defined for scalar-output functions",
        "Return a scalar, such as the mean of the current output, or with `has_aux=True` a pair of "
        "a scalar and anything else. `filter_jacrev` differentiates all outputs.",
    ),
    (
        r"requires real-valued (in|out)puts .* but got u?int",
        "Integers have no derivative: pass floating-point numbers, such as `jnp.float32(3)`.",
    ),
    (
        r"Reverse-mode differentiation does not work for lax\.while_loop",
        "`jax.lax.while_loop`, and `fori_loop` with traced bounds, have no reverse mode, since "
        "the number of steps is unknown. Use `ad.Forward()`, or the loops of `eqxlike.loops` with "
        '`kind="checkpointed"` or `kind="bounded"`.',
    ),
    (
        r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp",
        "A `jax.custom_vjp` has only a reverse mode. Use `ad.Reverse()`, or wrap that part as "
        "`ad.differentiate_with(part, ad.Reverse())`, which has both.",
    ),
    (
        r"(Pure|IO) callbacks do not support JVP",
        f"JAX does not see into a callback. {_ANY_FUNCTION}; `filter_custom_jvp` takes your own "
        "rule.",
    ),
    (
        r"Differentiation rule for '(?P<operation>.*)' not implemented",
        "The operation `{operation}` has no derivative in JAX. " + _ANY_FUNCTION + ".",
    ),
    (
        r"Transpose rule .* for '(?P<operation>.*)' not implemented",
        "The operation `{operation}` has no reverse mode in JAX: use `ad.Forward()`. If the "
        "operation is in the backward rule of a `jax.custom_vjp`, the rule is not linear: use only "
        "`ad.Reverse()`.",
    ),
    (
        r"vmapped value on an unbatched array reference",
        "Writes to a reference cannot be mapped over several directions at once. "
        "Use `ad.Reverse()` or `ad.Checkpointed()`, which evaluate the function once.",
    ),
    (
        r"Batching rule for '(?P<operation>.*)' not implemented"
        r"|vmap is only supported for the (?P<callback>\w+) primitive when vmap_method",
        "The operation `{operation}` cannot be mapped with `jax.vmap`. A callback can, with "
        '`vmap_method="sequential"`. If the cause is the `vmap` of `ad.Forward` over its '
        "directions, `ad.Forward(chunk=1)` takes one direction at a time.",
    ),
)


@contextlib.contextmanager
def advised(mode: Any, name: str | None) -> Iterator[None]:
    """Context manager that adds a note to JAX's error if a mode cannot differentiate an operation.

    The note names a mode that can differentiate the operation. An error gets at most one such note.

    **Arguments:**

    - `name`: the name of the function in the note. With `None`, no note is added here, because a
      caller adds it.
    """
    try:
        yield
    except Exception as error:
        start, notes = "This was while ", getattr(error, "__notes__", ())
        is_noted = name is None or any(note.startswith(start) for note in notes)
        for pattern, hint in () if is_noted else _HINTS:
            if found := re.search(pattern, str(error)):
                operation = next((each for each in found.groupdict().values() if each), "")
                hint = hint.replace("{operation}", operation)
                by = "by reverse mode" if mode is None else f"by {mode!r}"
                error.add_note(f"{start}{name} was differentiated {by}. {hint}")
                break
        raise
