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
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Unpack, overload

import jax
import jax.tree_util as jtu

from ..._module import METADATA, Traits, Wrapper, field, shown_by, stored_fields
from ..._pytree import MISSING, listed
from ..._traceback import hide_our_frames
from .._checks import EqxlikeRuntimeError, claim_failure
from .._signatures import (
    AnyArguments,
    DonateNames,
    DonateWord,
    Function,
    JitOptions,
    Method,
    Output,
    optional_function,
)
from ._arguments import ArgumentOrder, deleted_arguments, explain_error
from ._callables import Options, Unbound, attached, describe, unbind
from ._dispatch import MISS, Dispatcher
from ._lowered import CompilingDecorator, Lowerable, Lowered
from ._traces import History, OnRetrace, Policy, Trace, place_of


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


def _show(fields: dict[str, Any]) -> None:
    """Copies metadata of the wrapped function, such as its name, into the wrapper's `__dict__`."""
    fields.update(shown_by(fields["_function"]))


class JitFunction(Wrapper, _traits=Traits(complete=_show, is_layer=False)):
    """The compiled function that `filter_jit` returns: a pytree like the function itself."""

    __slots__ = ("_eqxlike_dispatch",)

    _function: Any
    _donate: Any = field(static=True)
    _jit_options: Options = field(static=True)

    # `Wrapper.__getattribute__` would slow down every call. It is not needed here, because the
    # `__dict__` has the metadata of the function.
    __getattribute__ = object.__getattribute__  # pyright: ignore[reportAssignmentType]

    @property
    def __wrapped__(self) -> Any:
        return self._function

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
            if type(self._function) is not types.FunctionType:
                dispatcher = _current_dispatcher(self, dispatcher)
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
        options = state["_jit_options"]
        # Older pickles contain the `Options` object itself.
        options = options if isinstance(options, Options) else Options(*options)
        fields = {**shown_by(state["_function"]), **state, "_jit_options": options}
        stored_fields(self).update(fields)

    def __repr__(self) -> str:
        return f"filter_jit({self._function!r})"

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The latest 32 traces of the function."""
        return find_dispatcher(self)[0].history.traces

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the function for these arguments, without compiling or running it.

        A `jax.ShapeDtypeStruct` may replace an array.
        """
        dispatcher, bound, bound_kwargs = find_dispatcher(self)
        try:
            ordered, names = dispatcher.order.arrange(bound + args, {**bound_kwargs, **kwargs})
            arrays, compiled = dispatcher.find(ordered, names, with_abstract=True)
            with compiled.donation_warnings or contextlib.nullcontext():
                lowered = compiled.traced_jit(arrays).lower(*arrays)
        except Exception as error:
            explain_error(error, dispatcher.order, bound + args, {**bound_kwargs, **kwargs})
            hide_our_frames(error)
            raise
        return Lowered(lowered, (dispatcher, compiled, bound, bound_kwargs))


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


# --- The dispatcher of a callable ---


def find_dispatcher(wrapper: JitFunction) -> tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]:
    """Finds the dispatcher and the bound arguments of a wrapper, and stores them in the wrapper."""
    unbound = unbind(wrapper._function)
    dispatcher = _dispatcher_for(unbound, wrapper._donate, wrapper._jit_options)
    dispatch = (dispatcher, unbound.args, unbound.kwargs)
    _set_dispatch(wrapper, dispatch)
    return dispatch


_set_dispatch = JitFunction.__dict__["_eqxlike_dispatch"].__set__


def _current_dispatcher(wrapper: JitFunction, dispatcher: Dispatcher) -> Dispatcher:
    """Returns `dispatcher`, or a new one if the `__call__` of the class has been replaced."""
    if unbind(wrapper._function).function is dispatcher.get_unbound_function():
        return dispatcher
    return find_dispatcher(wrapper)[0]


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
        order = ArgumentOrder(name, signature, fills_defaults=not is_mapping)
        history = History(*place_of(anchor), options.policy, key)
        return Dispatcher(unbound, order, donate, options.values, history, _full_name(anchor, name))

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


def _full_name(function: Callable[..., Any], name: str) -> str:
    module = getattr(function, "__module__", None)
    return name if module is None else f"{module}.{getattr(function, '__qualname__', name)}"
