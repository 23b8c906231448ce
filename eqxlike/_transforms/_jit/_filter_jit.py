"""`filter_jit`: `jax.jit` in which every array is traced and everything else is static.

A sketch of the implementation, in which comments name the class or method behind each part:

    def filter_jit(fun):
        compiled_functions = {}                         # Dispatcher
        def call(*args):                                # JitFunction.__call__
            arrays, structure = flatten(args)           # the structure: all but the arrays
            compiled = compiled_functions.get(structure)    # Dispatcher.find
            if compiled is None:                        # CompiledFunction
                outputs = []
                def flat(*arrays):
                    output = fun(*structure.rebuild(arrays))
                    arrays, output_structure = flatten(output)
                    outputs.append(output_structure)
                    return arrays
                compiled = compiled_functions[structure] = jax.jit(flat), outputs
            jitted, outputs = compiled
            arrays = jitted(*arrays)                    # for other shapes JAX traces flat again
            return outputs[0].rebuild(arrays)           # CompiledFunction.finish
        return call

The rest of this folder makes the sketch fast and thread-safe, and makes its errors clear.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol, Unpack, overload

import jax
import jax.tree_util as jtu
import numpy as np

from ..._module import METADATA, Traits, Wrapper, field, shown_by, stored_fields
from ..._pytree import (
    MISSING,
    deleted_paths,
    is_array,
    is_reference,
    listed,
    paths_without_numbers,
)
from ..._traceback import hide_our_frames, name_tracers
from .._checks import ERRORS_OF_JAX, EqxlikeRuntimeError, claim_failure
from .._signatures import (
    AnyArguments,
    DonateNames,
    DonateWord,
    Function,
    JitOptions,
    Method,
    Output,
    TransformedFunction,
    optional_function,
)
from ._arguments import ArgumentOrder, Unbound, attached, describe, unbind
from ._dispatch import CompiledFunction, Dispatcher
from ._fast_path import MISS
from ._traces import History, OnRetrace, Policy, Trace, place_of

# --- The types of `filter_jit` and `filter_pmap`, for type checkers: see `_signatures` ---


class Lowerable(Protocol[Function]):
    """A compiled function."""

    # An annotation with a `ParamSpec` would keep only one signature of an overloaded function.
    __call__: Function

    def lower(self, *args: Any, **kwargs: Any) -> "Lowered":
        """Traces and lowers the function for these arguments, without running it."""
        ...

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The latest 32 traces of the function."""
        ...


class CompilingDecorator(Protocol):
    """The decorator that `filter_jit` or `filter_pmap` returns if called with options alone."""

    @overload
    def __call__(self, fun: AnyArguments[Output], /) -> Lowerable[Callable[..., Output]]: ...
    @overload
    def __call__(self, fun: Method, /) -> Method: ...
    @overload
    def __call__(self, fun: Function, /) -> Lowerable[Function]: ...


class _Options(JitOptions, total=False):
    """The options of `filter_jit`."""

    donate: DonateWord | DonateNames
    on_retrace: OnRetrace | None
    max_traces: int | None


@overload
def filter_jit(**options: Unpack[_Options]) -> CompilingDecorator: ...
@overload
def filter_jit(
    fun: AnyArguments[Output], **options: Unpack[_Options]
) -> Lowerable[Callable[..., Output]]: ...
@overload
def filter_jit(fun: Method, **options: Unpack[_Options]) -> Method: ...
@overload
def filter_jit(fun: Function, **options: Unpack[_Options]) -> Lowerable[Function]: ...
@optional_function
def filter_jit(
    fun: Callable[..., Any] = MISSING,
    *,
    donate: DonateWord | Iterable[str] = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Any,
) -> Any:
    """Compiles a function of any arguments: arrays are traced, everything else is static.

    **Arguments:**

    - `fun`: any callable: a function, a method, a Module, a `functools.partial`. Arrays in its
      bound arguments are traced too. Without `fun`, a decorator is returned.
    - `donate`: the arguments whose buffers may be reused for the output. The value is `"all"`,
      `"all-except-first"`, `"none"`, `"warn"`, `"warn-except-first"`, or a collection of parameter
      names, such as `("model", "opt_state")`. `"warn"` donates like `"all"`, and
      `"warn-except-first"` like `"all-except-first"`. Both also warn if a buffer could not be
      reused. JAX raises `JaxRuntimeError` or `ValueError` if a donated buffer occurs twice in a
      call. A buffer that is shared with NumPy or DLPack is copied instead of reused.
    - `on_retrace`: the reaction if the function is traced, and so compiled, more than once:
      `"warn"`, `"error"`, or a function that is called with an `eqxlike.debug.Trace`. `str(trace)`
      lists the differences from the most similar earlier trace.
    - `max_traces`: the maximum number of traces. A further trace raises an error.
    - `**jitkwargs`: passed to `jax.jit`. The options for static and donated arguments, such as
      `static_argnums`, are refused. `in_shardings` is a sequence with one entry for each parameter,
      in the order of the signature, or a dictionary from parameter names to entries. Each entry is
      a sharding, or a prefix of its argument with shardings as leaves.

    **Returns:** a callable with the signature of `fun`. Like a function compiled by `jax.jit`, it
    returns before the result is ready. It traces `fun` once for each combination of the structure
    of the arguments and the shapes and dtypes of their arrays. Passing an argument by position or
    by keyword makes no difference. The trace computes the leaves of the output that are not arrays,
    and later calls return the same leaves. The callable has a method `lower`, and a property
    `traces` with the latest traces as a tuple of `eqxlike.debug.Trace`.

    **Raises:**

    - `TypeError` if `fun` is not callable.
    - `ValueError` if `donate`, `in_shardings`, `on_retrace` or `max_traces` is invalid.
    - `ValueError`, when called, if `in_shardings` has fewer entries than the call has arguments.
    - `TypeError`, when called, if a static leaf is not hashable. The message names the path of the
      leaf.
    - `eqxlike.debug.RetraceError`, when called, if `on_retrace` or `max_traces` forbids a trace.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def scale(x, how):
        ...     return 2 * x if how == "double" else x
        >>> print(scale(jnp.array(3.0), "double"))
        6.0
    """
    for name, instead in _REFUSED.items():
        if name in jitkwargs:
            raise ValueError(f"`filter_jit` does not take `{name}`: {instead}.")
    for name in jitkwargs:
        if name not in _JIT_KEYWORDS:
            known = ", ".join(sorted(_JIT_KEYWORDS))
            raise TypeError(
                f"`filter_jit` got an unexpected keyword argument {name!r}; it takes `donate`, "
                f"`on_retrace`, `max_traces`, and these options of `jax.jit`: {known}."
            )
    donate = donate if isinstance(donate, str) else tuple(donate)
    if type(fun) is functools.partial:
        # `jtu.Partial` is also a pytree, so the arrays that are bound to it become leaves of the
        # wrapper.
        fun = jtu.Partial(fun.func, *fun.args, **fun.keywords)
    is_limited = on_retrace is not None or max_traces is not None
    policy = Policy(on_retrace, max_traces) if is_limited else None
    wrapper = JitFunction(fun, donate, Options(jitkwargs, policy))
    find_dispatcher(wrapper)
    _show(stored_fields(wrapper))
    return wrapper


_REFUSED = {
    "static_argnums": "everything that is not an array is already static",
    "static_argnames": "everything that is not an array is already static",
    "donate_argnums": "use `donate`",
    "donate_argnames": "use `donate`",
    "abstracted_axes": "it is not supported",
}


_JIT_KEYWORDS = frozenset(inspect.signature(jax.jit).parameters) - {"fun", *_REFUSED}


# --- What `filter_jit` returns ---


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Options:
    """Options of a compiled function. They are hashable even if a value is a dict or a list.

    - `values`: keyword arguments of `jax.jit` or `jax.pmap`. They are never changed.
    - `policy`: the reaction to a retrace, or `None`.
    """

    values: dict[str, Any] = dataclasses.field(hash=False)
    policy: Policy | None = None


def _show(fields: dict[str, Any]) -> None:
    """Copies metadata of the wrapped function, such as its name, into the wrapper's `__dict__`."""
    fields.update(shown_by(fields["_function"]))


class JitFunction(TransformedFunction, _traits=Traits(complete=_show, is_layer=False)):
    """The compiled function that `filter_jit` returns: a pytree like the function itself."""

    __slots__ = ("_eqxlike_dispatch",)

    _donate: Any = field(static=True)
    _jit_options: Options = field(static=True)

    # `Wrapper.__getattribute__` would slow down every call. It is not needed here, because the
    # `__dict__` has the metadata of the function.
    __getattribute__ = object.__getattribute__  # pyright: ignore[reportAssignmentType]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            dispatcher, bound, bound_kwargs = self._eqxlike_dispatch
        except AttributeError:
            dispatcher, bound, bound_kwargs = find_dispatcher(self)
        if bound:
            args = bound + args
        if bound_kwargs:
            kwargs = {**bound_kwargs, **kwargs}
        try:
            if not kwargs:
                # A fast path unpacks all arguments in the order of the signature. If a call omits
                # an argument, the fast path misses here. `dispatcher.call` tries the fast path
                # again with the default of the argument.
                output = dispatcher.fast_path(args)
                if output is not MISS:
                    return output
            # The `__call__` of a class may have been replaced.
            if (
                type(self._function) is not types.FunctionType
                and unbind(self._function).function is not dispatcher.get_unbound_function()
            ):
                dispatcher, _, _ = find_dispatcher(self)
            return dispatcher.call(args, kwargs)
        except Exception as error:
            failure = claim_failure(error) or _not_finite(error, dispatcher)
            if failure is None:
                explain_error(error, dispatcher.order, args, kwargs)
                hide_our_frames(error)
                raise
        # Raise outside of the `except` block, so that JAX's long error is not shown as the context.
        if paths := deleted_arguments(dispatcher.order, args, kwargs):
            failure.add_note(
                f"These arrays were donated to the failed call, and are deleted: {listed(paths)}."
            )
        try:
            raise failure
        except EqxlikeRuntimeError:
            hide_our_frames(failure)
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the metadata of the function, because some annotations cannot be pickled.
        shown = shown_by(self._function)
        kept = {
            name: value
            for name, value in stored_fields(self).items()
            if name not in METADATA or value is not shown.get(name)
        }
        # Pickle the attributes of the `Options` object, not the object, because the class `Options`
        # is private and may move.
        return {**kept, "_jit_options": (self._jit_options.values, self._jit_options.policy)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = Options(*state["_jit_options"])
        fields = {**shown_by(state["_function"]), **state, "_jit_options": options}
        stored_fields(self).update(fields)

    def __repr__(self) -> str:
        return f"filter_jit({self._function!r})"

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The latest 32 traces of the function."""
        return find_dispatcher(self)[0].history.traces

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """Traces and lowers the function for these arguments, without compiling or running it.

        A `jax.ShapeDtypeStruct` may replace an array.
        """
        dispatcher, bound, bound_kwargs = find_dispatcher(self)
        args, kwargs = bound + args, {**bound_kwargs, **kwargs}
        try:
            ordered, names = dispatcher.order.arrange(args, kwargs)
            arrays, compiled = dispatcher.find(ordered, names, with_abstract=True)
            with compiled.donation_warnings or contextlib.nullcontext():
                lowered = compiled.traced_jit(arrays).lower(*arrays)
        except Exception as error:
            explain_error(error, dispatcher.order, args, kwargs)
            hide_our_frames(error)
            raise
        return Lowered(lowered, (dispatcher, compiled, bound, bound_kwargs))


_Call = tuple[Dispatcher, CompiledFunction, tuple[Any, ...], dict[str, Any]]
"""The dispatcher of a function, the `CompiledFunction` for the arguments of `lower`, and the bound
positional and keyword arguments.
"""


class Lowered:
    """A lowered function, like `jax.stages.Lowered`."""

    def __init__(self, lowered: jax.stages.Lowered, call: _Call):
        self._lowered = lowered
        self._call = call

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        return Compiled(self._lowered.compile(compiler_options), self._call)

    def as_text(self, dialect: str | None = None, **kwargs: Any) -> str:
        return self._lowered.as_text(dialect, **kwargs)

    def cost_analysis(self) -> Any:
        return self._lowered.cost_analysis()


class Compiled:
    """A compiled function, like `jax.stages.Compiled`. It takes the same arguments as `lower`."""

    def __init__(self, executable: jax.stages.Compiled, call: _Call):
        self._executable = executable
        self._call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        dispatcher, compiled, bound, bound_kwargs = self._call
        ordered, names = dispatcher.order.arrange(bound + args, {**bound_kwargs, **kwargs})
        arrays, found = dispatcher.find(ordered, names)
        # Compare the keys, not the functions, because `compiled` may no longer be in the table.
        if found.key != compiled.key:
            raise TypeError(
                f"{dispatcher.order.function_name} was compiled for arguments of another "
                "structure, or with other static values: compile it again for these arguments."
            )
        try:
            return compiled.finish(self._executable(*arrays))
        except ERRORS_OF_JAX as error:
            failure = claim_failure(error)
            if failure is None:
                raise
        raise failure

    def as_text(self) -> str | None:
        return self._executable.as_text()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()


# --- The errors of a call ---


def _not_finite(error: Exception, dispatcher: Dispatcher) -> FloatingPointError | None:
    """The error to raise if JAX fails to find the operation that made a NaN.

    For `jax.debug_nans`, JAX runs the program a second time. This run fails if the first run
    donated its arguments.
    """
    is_rerun = type(error.__context__).__name__ == "InternalFloatingPointError"
    if not is_rerun or "deleted" not in str(error):
        return None
    dispatcher.clear()
    name = dispatcher.order.function_name
    return FloatingPointError(
        f"{name} returned NaN or infinity, and `jax.debug_nans` or `jax.debug_infs` is set. JAX "
        "could not run it again to find the operation, because its arguments were donated. Call "
        f"{name} again with new arrays: then it is compiled without donation, and the error names "
        "the operation."
    )


_NAMED = re.compile(r"Of .*, arrays\[\d+\] is ")


def explain_error(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to an error with the names and paths of the arguments that cause it."""
    text, among = str(error), f"These arguments of {order.function_name}"
    arguments = order.named(args, kwargs)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        name_tracers(error, args, kwargs)
    if isinstance(error, jax.errors.ConcretizationTypeError):
        paths = [path for path, leaf in _leaves(arguments) if is_array(leaf)]
        # JAX's message has the index of an array among the arrays of all arguments.
        counted = dict.fromkeys(map(int, re.findall(r"\barrays\[(\d+)\]", text)))
        known = [f"arrays[{each}] is {paths[each]}" for each in counted if each < len(paths)]
        # An inner call may already have added a note, with the names of its own arguments.
        if known and not any(map(_NAMED.match, getattr(error, "__notes__", ()))):
            error.add_note(f"Of {order.function_name}, {', '.join(known)}.")
    # JAX's error has no path. At most, it has the shape of the first deleted array.
    if "deleted" in text and (paths := deleted_arguments(order, args, kwargs)):
        error.add_note(
            f"{among} are deleted, since they were donated to a call: {listed(paths)}. Use the "
            "output of that call, or donate a copy to it."
        )
    if "only one reference" in text or "both closed over and passed" in text:
        references = ", ".join(_equal_paths(id, is_reference, arguments))
        error.add_note(f"The references in the arguments of {order.function_name}: {references}.")
    if "donate the same buffer twice" in text or "previously donated in the same call" in text:
        shared = [each for each in _equal_paths(_buffer, is_array, arguments) if " = " in each]
        error.add_note(
            f"{among} share a buffer, and one is donated: {', '.join(shared)}. Pass a copy, "
            "`jnp.copy`, for all but one."
        )
    if "Disallowed host-to-device" in text:
        on_host = [
            path for path, leaf in _leaves(arguments) if isinstance(leaf, np.ndarray | np.generic)
        ]
        if on_host:
            error.add_note(
                f"{among} are NumPy arrays, which each call copies to the device: "
                f"{listed(on_host)}. Put them on the device once with `jax.device_put`."
            )
    if isinstance(error, TypeError):
        paths = [path for name, each in arguments for path in paths_without_numbers(each, name)]
        if paths:
            error.add_note(
                f"{among} are arrays without numbers: {listed(paths)}. Pass numbers, or keep the "
                "values in a static field, such as a tuple."
            )


def deleted_arguments(
    order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The paths of the deleted arrays among the arguments of a call."""
    return [path for name, each in order.named(args, kwargs) for path in deleted_paths(each, name)]


def _equal_paths(key: Any, is_wanted: Any, arguments: Iterable[tuple[str, Any]]) -> Iterable[str]:
    """The paths of all wanted leaves. If leaves have equal keys, ` = ` joins their paths."""
    found: dict[Any, list[str]] = {}
    for path, leaf in filter(lambda each: is_wanted(each[1]), _leaves(arguments)):
        found.setdefault(key(leaf), []).append(path)
    return map(" = ".join, found.values())


def _buffer(array: Any) -> int:
    """The address of an array's first buffer; if there is none, the `id` of the array."""
    try:
        return array.addressable_shards[0].data.unsafe_buffer_pointer()
    except Exception:
        return id(array)


def _leaves(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, argument in arguments:
        for path, leaf in jtu.tree_leaves_with_path(argument):
            yield name + jtu.keystr(path), leaf


# --- The dispatcher of a callable ---


def find_dispatcher(wrapper: JitFunction) -> tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]:
    """Finds the dispatcher and the bound arguments of a wrapper, and stores them in the wrapper."""
    unbound = unbind(wrapper._function)
    dispatcher = _dispatcher_for(unbound, wrapper._donate, wrapper._jit_options)
    dispatch = (dispatcher, unbound.args, unbound.kwargs)
    _set_dispatch(wrapper, dispatch)
    return dispatch


_set_dispatch = JitFunction.__dict__["_eqxlike_dispatch"].__set__


_OF_FUNCTION = "__eqxlike_dispatchers__"
_dispatchers_of: weakref.WeakKeyDictionary[Any, dict[Hashable, Dispatcher]] = (
    weakref.WeakKeyDictionary()
)
"""The dispatchers of callables other than functions (a function has them in its `__dict__`).

A dispatcher lives as long as its callable. So `filter_jit(f)` in a loop does not compile each time.
"""


def _dispatcher_for(unbound: Unbound, donate: Any, options: Options) -> Dispatcher:
    """The dispatcher that all wrappers of a callable with equal options share.

    Two callables that bind different parameters of the same function have different dispatchers.
    """
    description = describe(unbound)
    anchor = description.anchor
    wrapper_types = tuple(type(each) for each in unbound.args if isinstance(each, Wrapper))
    key = (description.path, wrapper_types, donate, options)

    def make() -> Dispatcher:
        # `filter_vmap` and `filter_pmap` map every argument that they get. They do not map an
        # omitted argument. So the defaults of omitted arguments must not be filled in here.
        is_mapping = any(getattr(type(each), "maps_arguments", False) for each in unbound.args[:1])
        name, signature = description.name, description.signature
        order = ArgumentOrder(name, signature, unbound, fills_defaults=not is_mapping)
        history = History(*place_of(anchor), options.policy, key)
        module = getattr(anchor, "__module__", None)
        full_name = name if module is None else f"{module}.{getattr(anchor, '__qualname__', name)}"
        return Dispatcher(unbound, order, donate, options.values, history, full_name)

    try:
        if isinstance(anchor, types.FunctionType):
            of_function = attached(anchor, _OF_FUNCTION, dict)
        else:
            of_function = _dispatchers_of.setdefault(anchor, {})
    except TypeError:
        # Some callables, such as the `__call__` of a C class, do not support weak references. Each
        # wrapper of such a callable has its own dispatcher.
        return make()
    found = of_function.get(key)
    return of_function.setdefault(key, make()) if found is None else found
