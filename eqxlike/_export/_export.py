"""From a function and the shapes of its arguments to a program that needs neither."""

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util as jtu

from .._check_numbers import whole_number
from .._module import Module
from .._partition import ArrayForm, Node, Tree, described, from_plain, root_node, split, to_plain
from .._programs import departures
from .._pytree import listed
from .._traceback import hide_our_frames
from .._transforms import is_array_or_struct
from .._transforms._signatures import check_callable
from .._version import __version__
from ._exported import Exported, from_parts, need_flatbuffers
from ._file import Header
from ._form import check_keys, describe_arguments, lost_in

# --- Which axes of the arguments of a program have dynamic sizes, and their names ---


Dynamic = Sequence[str] | Mapping[str, Mapping[int, str] | Sequence[str | None]]


def dynamic_shapes(
    paths: Sequence[str], arrays: Sequence[Any], are_weights: Sequence[bool], dynamic: Dynamic
) -> list[tuple[Any, ...]]:
    """The shapes of the arrays that are passed as arguments, whose dynamic axes are symbolic.

    **Arguments:**

    - `arrays`: the arrays, or `jax.ShapeDtypeStruct`s whose shapes may contain names.
    - `are_weights`: whether each is part of a Module. Weights have no batch axis.
    - `dynamic`: see `export`.

    **Raises:** `ValueError`, with the path, for an axis or an argument that does not exist.
    """
    shapes = [list(array.shape) for array in arrays]
    sizes: dict[str, tuple[int, str]] = {}
    if isinstance(dynamic, Mapping):
        for place, axes in dynamic.items():
            below = (f"{place}[", f"{place}.")
            found = [n for n, path in enumerate(paths) if path == place or path.startswith(below)]
            if not found:
                raise ValueError(
                    f"`dynamic` names axes of {place!r}, and there is no such array among the "
                    f"arguments. There are: {', '.join(paths) or 'none'}."
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
            f"`dynamic` has {axes!r}, and not names of axes, as in ('batch',) or "
            "{'x': {0: 'batch'}}."
        )
    return {axis: name for axis, name in enumerate(names) if name is not None}


def _name_axes(
    shape: list[Any], axes: dict[int, Any], path: str, sizes: dict[str, tuple[int, str]]
) -> None:
    """Replaces sizes by names.

    **Arguments:**

    - `sizes`: the size of each named axis so far, and its place; those of `shape` are added.
    """
    for axis, name in axes.items():
        if not isinstance(name, str):
            raise ValueError(
                f"`dynamic` has {name!r} for axis {axis} of {path}: a name is a string, as in "
                "('batch',) or {'x': {0: 'batch'}}."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"`dynamic` names axis {axis} of {path} {name!r}, and that has {len(shape)} axes."
            )
        other, where = sizes.setdefault(name, (shape[axis], path))
        if other != shape[axis]:
            raise ValueError(
                f"`dynamic` names axis {axis} of {path} {name!r}: it has size {shape[axis]}, and "
                f"that of {where} has {other}. Say which axes are meant, as in "
                "`dynamic={'x': {0: 'batch'}}`."
            )
        shape[axis] = name


def _symbolic(path: str, shape: list[Any], scope: jax.export.SymbolicScope) -> tuple[Any, ...]:
    """The shape, with names replaced by symbolic sizes."""
    try:
        if None in shape:
            raise ValueError("give a size or a name for each axis, as in ('batch', 3).")
        found = jax.export.symbolic_shape(", ".join(map(str, shape)), scope=scope)
        if len(found) != len(shape):
            raise ValueError("give a name for each axis, as in ('batch', 'time').")
    except ValueError as error:
        raise ValueError(f"The shape {tuple(shape)} of {path} cannot be read: {error}") from None
    return tuple(found)


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    function: Callable[..., Any],
    *args: Any,
    dynamic: Dynamic = ("batch",),
    platforms: Sequence[str] = ("cpu", "cuda"),
    vjp_order: int = 0,
) -> Exported:
    """Exports a function as a program that runs without its source; `.save` writes it to a file.

    Arrays that the function holds, such as the weights of a Module that is called, are part of the
    program. Those of `*args` are passed to each call. Everything but arrays is static, as in
    `filter_jit`: part of the program too.

    **Arguments:**

    - `function`: any callable: a Module, a filtered function, a method. It must be pure: a program
      contains no Python.
    - `*args`: its arguments, or `jax.ShapeDtypeStruct`s instead of arrays. A shape may contain
      names of axes, as in `jax.ShapeDtypeStruct(("batch", 64), jnp.float32)`.
    - `dynamic`: the axes that have any size from 1 upwards. Names, as in `("batch", "time")`, apply
      to the leading axes of every array, as far as it has that many. Weights of Modules
      have none, and names in a shape of `*args` take precedence. A dictionary
      names the axes of an argument, or of an array in it by its path, as in `{"x": {0: "batch"},
      "y['mask']": ("batch", None, "time")}`; all others have a fixed size. Axes of the same name
      have the same size. `()` for none.
    - `platforms`: where it can run, of `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`. They need not be
      available here.
    - `vjp_order`: how many times the program can be differentiated, in reverse mode.

    **Returns:** an `Exported`, with `.call`, `.save` and `.stablehlo`.

    **Raises:** `ValueError`, with file and line, for a function that calls back to Python; for an
    axis or a platform that does not exist; `TypeError` for an output, at a path, that is neither
    an array nor a plain value; any error from tracing the function; `ImportError` if flatbuffers is
    not installed.

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
    check_callable(function, "export")
    platforms = _checked_platforms(platforms)
    vjp_order = whole_number(vjp_order, "vjp_order", least=0)
    parameters = _parameters(function, args)
    arrays, rest = split(args, is_array_or_struct)
    root = root_node(parameters, described(args).node.children)
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
    form = Tree(described(outputs[-1]).node, tuple(map(ArrayForm.of, jaxpr.out_avals)))
    check_keys(form.node, "output")
    if lost := list(lost_in(form.node, "output")):
        raise TypeError(
            f"{name} returned something at {listed(lost)} that no file can hold: return arrays, "
            "numbers and strings."
        )
    try:
        exported = jax.export.export(jitted, platforms=platforms)(*structs)
        program = bytes(exported.serialize(vjp_order=vjp_order))
    except NotImplementedError as error:
        # Other libraries' operations may call back too, under unknown names.
        _refuse_calls(name, [str(error)] if "callback" in str(error) else [])
        raise
    header = Header(
        name=name,
        inputs=from_plain(to_plain(inputs)),
        outputs=from_plain(to_plain(form)),
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
    """The arrays as `jax.ShapeDtypeStruct`s, with symbolic shapes."""
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
            f"`platforms` must be of {', '.join(map(repr, PLATFORMS))}; got "
            f"{unknown[0] if unknown else platforms!r}."
        )
    return names


def _parameters(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the arguments: from the signature, or `args[0]` and so on."""
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
            f"{name} cannot be exported, for a program takes no Python along, and it calls back: "
            f"{listed(calls)}. Leave that out of what is exported."
        )


def _note_shapes(error: Exception, call: str) -> None:
    """Adds to an error from tracing the shapes that were traced."""
    error.add_note(
        f"While {call} was exported. Axes that go by name are of any size; "
        "`dynamic=()` fixes all, `dynamic={'x': {0: 'batch'}}` names some."
    )
    if isinstance(error, TypeError) and "integer" in str(error):
        error.add_note(
            "Where Python wants a number, as in `len(x)` and `range(x.shape[0])`, a name will not "
            "do. `x.shape[0]` will, in `jnp.arange(x.shape[0])` and its like."
        )
