"""`export`: traces a function for given shapes and serialises the program."""

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util as jtu

from .. import Module, extend
from .._check_numbers import whole_number
from .._programs import departures
from .._traceback import hide_our_frames
from .._version import __version__
from ..extend import ArrayForm, Node, Tree, is_array_or_struct, listed, split
from ._exported import Exported, from_parts, need_flatbuffers
from ._file import Header, check_keys, describe_arguments, lost_in

# --- Dynamic axes of the arguments ---


Dynamic = Sequence[str] | Mapping[str, Mapping[int, str] | Sequence[str | None]]


def dynamic_shapes(
    paths: Sequence[str], arrays: Sequence[Any], are_weights: Sequence[bool], dynamic: Dynamic
) -> list[tuple[Any, ...]]:
    """The shapes of the arguments' arrays, with symbolic sizes for dynamic axes.

    **Arguments:**

    - `paths`: the path of each array.
    - `arrays`: arrays, or `jax.ShapeDtypeStruct`s whose shapes may contain names.
    - `are_weights`: for each array, `True` if the array is part of a Module. Weights have no batch
      axis.
    - `dynamic`: see `export`.

    **Raises:** `ValueError` with the path if `dynamic` names an axis or an argument that does not
    exist.
    """
    shapes = [list(array.shape) for array in arrays]
    sizes: dict[str, tuple[int, str]] = {}
    if isinstance(dynamic, Mapping):
        for place, axes in dynamic.items():
            below = (f"{place}[", f"{place}.")
            found = [n for n, path in enumerate(paths) if path == place or path.startswith(below)]
            if not found:
                raise ValueError(
                    f"`dynamic` names axes of {place!r}, but no array in the arguments has this "
                    f"path. The arrays are: {', '.join(paths) or 'none'}."
                )
            for n in found:
                _name_axes(shapes[n], _by_axis(axes), paths[n], sizes)
    elif all(isinstance(size, int) for shape in shapes for size in shape):
        axes = _by_axis(dynamic)
        for path, shape, is_weight in zip(paths, shapes, are_weights, strict=True):
            own = {axis: name for axis, name in axes.items() if axis < len(shape)}
            _name_axes(shape, {} if is_weight else own, path, sizes)
    scopes = [size.scope for shape in shapes for size in shape if jax.export.is_symbolic_dim(size)]
    scope = scopes[0] if scopes else jax.export.SymbolicScope()
    return [_symbolic(path, shape, scope) for path, shape in zip(paths, shapes, strict=True)]


def _by_axis(axes: Any) -> dict[int, Any]:
    if isinstance(axes, Mapping):
        return dict(axes)
    names = [axes] if isinstance(axes, str) else axes
    if not isinstance(names, Sequence):
        raise ValueError(
            f"`dynamic` must contain names of axes, such as ('batch',) or {{'x': {{0: 'batch'}}}}; "
            f"got {axes!r}."
        )
    return {axis: name for axis, name in enumerate(names) if name is not None}


def _name_axes(
    shape: list[Any], axes: dict[int, Any], path: str, sizes: dict[str, tuple[int, str]]
) -> None:
    """Replaces sizes in `shape` by the names in `axes`.

    **Arguments:**

    - `sizes`: the size of each name, and the path where the name was first used. New names are
      added in place.
    """
    for axis, name in axes.items():
        if not isinstance(name, str):
            raise ValueError(
                f"`dynamic` has {name!r} for axis {axis} of {path}: a name must be a string, as in "
                "('batch',) or {'x': {0: 'batch'}}."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"`dynamic` gives axis {axis} of {path} the name {name!r}, but {path} has "
                f"{len(shape)} axes."
            )
        other, where = sizes.setdefault(name, (shape[axis], path))
        if other != shape[axis]:
            raise ValueError(
                f"`dynamic` gives axis {axis} of {path} the name {name!r}. This axis has size "
                f"{shape[axis]}, but {name!r} has size {other} in {where}. Name the axes of each "
                "argument, as in `dynamic={'x': {0: 'batch'}}`."
            )
        shape[axis] = name


def _symbolic(path: str, shape: list[Any], scope: jax.export.SymbolicScope) -> tuple[Any, ...]:
    """Replaces names in a shape by symbolic sizes."""
    try:
        if None in shape:
            raise ValueError("give a size or a name for each axis, such as ('batch', 3).")
        found = jax.export.symbolic_shape(", ".join(map(str, shape)), scope=scope)
        if len(found) != len(shape):
            raise ValueError("give a name for each axis, such as ('batch', 'time').")
    except ValueError as error:
        raise ValueError(f"The shape {tuple(shape)} of {path} is invalid: {error}") from None
    return tuple(found)


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    function: Callable[..., Any],
    *args: Any,
    dynamic: Dynamic = ("batch",),
    platforms: Sequence[str] = ("cpu", "cuda"),
    vjp_order: int = 0,
) -> Exported:
    """Exports a function as a program that runs without the source of the function.

    The method `save` of the result writes the program to a file.

    Arrays that the function holds, such as the weights of a Module, become part of the program.
    Arrays in `*args` are arguments of each call. Everything that is not an array is static, as in
    `filter_jit`, and becomes part of the program.

    **Arguments:**

    - `function`: any callable, such as a Module, a filtered function or a method. It must be pure,
      because the program contains no Python.
    - `*args`: the arguments of the function. A `jax.ShapeDtypeStruct` may replace an array, and its
      shape may contain names of axes, as in `jax.ShapeDtypeStruct(("batch", 64), jnp.float32)`.
    - `dynamic`: the axes that may have any size of at least 1. Axes with the same name must have
      the same size.
        - A sequence of names, such as `("batch", "time")`, names the leading axes of every array
          that is not a weight of a Module. The sequence is ignored if shapes in `*args` contain
          names.
        - A dictionary names axes by argument, or by the path of an array, as in
          `{"x": {0: "batch"}, "y['mask']": ("batch", None, "time")}`. All other axes are fixed.
        - `()` fixes all axes.
    - `platforms`: platforms on which the program can run: any of `"cpu"`, `"cuda"`, `"rocm"` and
      `"tpu"`. The platforms need not be available when the function is exported.
    - `vjp_order`: how many times the program can be differentiated in reverse mode.

    **Returns:** an `Exported`, with `.call`, `.save` and `.stablehlo`.

    **Raises:**

    - `ValueError`, with file and line, if the function calls back to Python.
    - `ValueError` if an axis in `dynamic` or a platform does not exist.
    - `TypeError`, with the path, if an output is neither an array nor a plain value.
    - `ImportError` if flatbuffers is not installed.
    - Any error that tracing the function raises.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> def predict(x):
        ...     return jax.vmap(model)(x)
        >>> exported = eqx.export(predict, jax.ShapeDtypeStruct(("batch", 3), jnp.float32))
        >>> print(str(exported).splitlines()[0])
        Exported: predict(x: float32[batch, 3]) -> float32[batch, 2]
        >>> exported.call(jnp.ones((5, 3))).shape
        (5, 2)
    """
    need_flatbuffers("export")
    extend.check_callable(function, "export")
    platforms = _checked_platforms(platforms)
    vjp_order = whole_number(vjp_order, "vjp_order", least=0)
    parameters = _parameters(function, args)
    arrays, rest = split(args, is_array_or_struct)
    root = extend.root_node(parameters, extend.described(args).node.children)
    check_keys(root, "")
    structs = _structs(root, arrays, args, dynamic)
    inputs = Tree(root, tuple(map(ArrayForm.of, structs)))
    outputs: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        outputs.append(function(*rest.merge(arrays)))
        return split(outputs[-1])[0]

    flat.__name__ = flat.__qualname__ = name = _name_of(function)
    jitted = jax.jit(flat)
    try:
        jaxpr = jitted.trace(*structs).jaxpr
    except Exception as error:
        _note_shapes(error, f"{name}({describe_arguments(inputs)})")
        hide_our_frames(error)
        raise
    _refuse_calls(name, list(departures(jaxpr)))
    output = Tree(extend.described(outputs[-1]).node, tuple(map(ArrayForm.of, jaxpr.out_avals)))
    check_keys(output.node, "output")
    if lost := list(lost_in(output.node, "output")):
        raise TypeError(
            f"{name} returned a value at {listed(lost)} that cannot be written to a file: return "
            "only arrays, numbers and strings."
        )
    try:
        exported = jax.export.export(jitted, platforms=platforms)(*structs)
        program = bytes(exported.serialize(vjp_order=vjp_order))
    except NotImplementedError as error:
        # Other libraries may have callbacks with names that we do not know: look at the error.
        _refuse_calls(name, [str(error)] if "callback" in str(error) else [])
        raise
    header = Header(
        name=name,
        inputs=extend.from_plain(extend.to_plain(inputs)),
        outputs=extend.from_plain(extend.to_plain(output)),
        platforms=platforms,
        vjp_order=vjp_order,
        calling_convention_version=exported.calling_convention_version,
        versions={
            "eqxlike": __version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        },
    )
    return from_parts(header, program, name)


def _structs(
    root: Node, arrays: list[Any], args: tuple[Any, ...], dynamic: Dynamic
) -> list[jax.ShapeDtypeStruct]:
    """Converts arrays to `jax.ShapeDtypeStruct`s whose shapes have symbolic sizes."""
    leaves = Tree(root, tuple(arrays)).leaves()
    paths = [path for path, leaf in leaves if leaf.arrays]
    are_weights = [
        isinstance(node, Module)
        for node in jtu.tree_leaves(args, is_leaf=lambda node: isinstance(node, Module))
        for leaf in jtu.tree_leaves(node)
        if is_array_or_struct(leaf)
    ]
    shapes = dynamic_shapes(paths, arrays, are_weights, dynamic)
    return [
        jax.ShapeDtypeStruct(
            shape,
            jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True),
            weak_type=bool(getattr(array, "weak_type", False)),
        )
        for shape, array in zip(shapes, arrays, strict=True)
    ]


def _checked_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [name for name in names if name not in PLATFORMS]
    if unknown or not names:
        raise ValueError(
            f"`platforms` must contain some of {', '.join(map(repr, PLATFORMS))}; got "
            f"{unknown[0] if unknown else platforms!r}."
        )
    return names


def _parameters(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """Names of the arguments. Without a signature, the names are `args[0]`, `args[1]` and so on."""
    try:
        bound = inspect.signature(function).bind(*args)
    except ValueError:
        return tuple(f"args[{index}]" for index in range(len(args)))
    except TypeError as error:
        raise TypeError(f"export({_name_of(function)}, ...): {error}.") from None
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{index}]" for index in range(len(value))] if is_variadic else [name]
    return tuple(names)


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _refuse_calls(name: str, calls: list[str]) -> None:
    if calls:
        raise ValueError(
            f"{name} cannot be exported, because it calls back to Python, which a program does not "
            f"contain: {listed(calls)}. Remove the callback from the exported function."
        )


def _note_shapes(error: Exception, call: str) -> None:
    """Adds a note with the traced shapes to an error that tracing has raised."""
    error.add_note(
        f"While exporting {call}. Named axes may have any size; `dynamic=()` fixes all sizes, and "
        "`dynamic={'x': {0: 'batch'}}` names single axes."
    )
    if isinstance(error, TypeError) and "integer" in str(error):
        error.add_note(
            "Python functions such as `len(x)` and `range(x.shape[0])` need a fixed size. JAX "
            "functions such as `jnp.arange(x.shape[0])` accept a named axis."
        )
