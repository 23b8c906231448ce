"""`report`: traces and compiles a function; reports its operations, costs, memory and gradient."""

import collections
import dataclasses
import functools
import inspect
import json
import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import Module, is_array, is_inexact_array
from .._names import import_extra
from .._programs import Collective, collectives
from ..extend import FreshTrace, JitFunction, Wrapper, fresh_trace, is_array_or_struct, split
from ._operations import Operation, Program, num_bytes_of, program_of, root_of, type_of
from ._rows import (
    Kinds,
    Redundant,
    Row,
    Side,
    Stored,
    aliases_in,
    instructions_in,
    kinds_of,
    redundant_in,
    rows_by_kind,
    rows_by_layer,
    sides,
    stablehlo_kinds,
    stored_in,
)
from ._stable._stabilise import Unstable, unstable_in
from ._text import as_rich, as_text, page_of

LARGE_CONSTANT_BYTES = 2**20
"""`Report.warnings` lists constants of this many bytes or more."""

_EFFECTS = ("device_put", "infeed", "outfeed", "copy_to_host_async", "debug_print", "check")
"""Primitives, other than callbacks, that communicate with the host or with another device.

`error_if` binds the primitive `check`.
"""


def report(
    function: Callable[..., Any], /, *args: Any, gradient: bool = False, **kwargs: Any
) -> "Report":
    """Compiles `function(*args, **kwargs)` and reports its operations, costs and memory.

    The compiled function is not executed.

    Each operation belongs to a layer. The path of a layer starts with the name of the argument that
    contains the layer, such as `model.layers[0]`. If `function` is a Module, the path starts with
    the name of its class. If `report` cannot find this argument, it uses the class name of the
    layer as the path. This happens under `jax.grad`, which rebuilds the layers: `report` then
    cannot distinguish layers of the same structure. Scopes of `jax.named_scope` count as layers.

    **Arguments:**

    - `function`: any callable, such as a function, a Module, the output of `filter_jit` or
      `jax.jit`, or a step of `train.make_step`. Options of `filter_jit` and `jax.jit` are kept.
    - `*args`, `**kwargs`: the arguments of `function`. A `jax.ShapeDtypeStruct` may replace an
      array.
    - `gradient`: whether to report on the gradient too. All floating-point outputs are
      differentiated, with cotangents of ones. If `function` is a Module, they are differentiated
      with respect to the arrays of the Module, otherwise with respect to the arrays of the first
      argument.

    **Returns:** a `Report`.

    **Raises:**

    - `TypeError` if `function` is not callable.
    - `ValueError`, with a message of one line, if `function` cannot be traced for these arguments.
    - `ValueError`, with `gradient=True`, if `function` returns no floating-point array, or has no
      floating-point array to differentiate with respect to.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import graph, nn
        >>> model = nn.Linear(8, 4, key=jax.random.key(0))
        >>> found = graph.report(model, jax.ShapeDtypeStruct((8,), jnp.float32))
        >>> for row in found.layers[1:]:
        ...     print(row.name, row.operations, row.flops)
        Linear 2 68
    """
    if not callable(function):
        raise TypeError(
            f"graph.report expects a function, followed by its arguments; it got "
            f"{function!r:.60}, of type {type(function).__name__}."
        )
    name = _name_of(function)
    found = _report_on(name, _traced(function, args, kwargs))
    if not gradient:
        return found
    of_gradient, of_stored, arguments = _gradient_of(function, args)
    backward = _report_on(name, _traced(of_gradient, arguments, kwargs, "the gradient of "))
    stored_program = _traced(of_stored, arguments, kwargs, "the gradient of ").traced
    outputs = [each.aval for each in stored_program.jaxpr.jaxpr.outvars]
    stored = stored_in(
        program_of(stored_program.jaxpr), [(type_of(each), num_bytes_of(each)) for each in outputs]
    )
    return dataclasses.replace(
        found,
        gradient=backward,
        stored=stored,
        sides=sides(found.program, backward.program, stored),
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Number of operations of each kind, before and after XLA's optimisations.

    - `stablehlo`: operations in the StableHLO program, the input of XLA.
    - `before`: HLO instructions before optimisation.
    - `after`: HLO instructions after optimisation, including instructions inside fusions.
    - `fusions`: number of fusions of each kind.
    - `fused`: number of instructions inside fusions.
    """

    stablehlo: Kinds
    before: Kinds
    after: Kinds
    fusions: Kinds
    fused: int

    @property
    def changes(self) -> tuple[tuple[str, int, int], ...]:
        """Kinds of HLO instructions, each with its number before and after optimisation."""
        kinds = dict.fromkeys([*self.before, *self.after])
        return tuple((kind, self.before.get(kind, 0), self.after.get(kind, 0)) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class Memory:
    """XLA's estimate of the memory that one execution needs, in bytes.

    - `arguments`, `outputs`: total size of the arguments and of the outputs.
    - `aliased`: total size of the outputs that reuse the buffers of arguments.
    - `temporaries`: total size of the buffers for intermediate results.
    - `peak`: total size of arguments, outputs and temporaries. A buffer that an argument and an
      output share counts once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that the program captured.

    - `type`: dtype and shape.
    - `num_bytes`: size in bytes.
    - `layer`, `source`: layer and source line of the first operation that reads the array.
    """

    type: str
    num_bytes: int
    layer: str
    source: str


@dataclasses.dataclass(frozen=True)
class Effect:
    """A callback to the host, or a copy between devices.

    - `kind`: name of the JAX primitive, such as `pure_callback`. The primitive of `error_if` is
      `check`.
    - `times`: number of executions.
    - `source`: the source line that created the callback or the copy.
    """

    kind: str
    layer: str
    times: int
    source: str


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The output of `report`. `str` returns the report as text; `rich.print` prints tables.

    - `name`: name of the function.
    - `operations`: operations of the traced program and of its inner functions, in order.
    - `layers`: sums over the operations of each layer; the first row is the whole program.
    - `kinds`: sums over the operations of each kind.
    - `redundant`: number of operations that a compiler can remove.
    - `compiled`: number of operations before and after XLA's optimisations.
    - `xla_flops`, `xla_bytes`: XLA's estimate of the FLOPs, and of the bytes read and written. XLA
      counts the body of a loop once. `None` if XLA gives no estimate.
    - `memory`: XLA's estimate of the memory used; `None` if XLA gives no estimate.
    - `donated`: paths of donated arguments.
    - `aliased`: for each output that reuses the buffer of an argument, the number of the output and
      the path of the argument.
    - `constants`: arrays that the program captured, largest first.
    - `effects`: callbacks to the host and copies between devices.
    - `collectives`: communication between devices.
    - `trace_s`, `lower_s`, `compile_s`: seconds to trace, lower and compile. The times are smaller
      if JAX has already traced inner functions, or has the program in its compilation cache.
    - `sides`: for each layer, costs of the function and of its gradient; empty without
      `gradient=True`.
    - `stored`: arrays stored for the backward pass; empty without `gradient=True`.
    - `gradient`: report on the program that computes the value and the gradient; `None` without
      `gradient=True`.
    - `unstable`: formulas that lose digits; see `graph.unstable`.
    - `jaxpr`, `stablehlo`, `hlo`: the traced program, the input of XLA, and the optimised program.
    """

    name: str
    operations: tuple[Operation, ...]
    layers: tuple[Row, ...]
    kinds: tuple[Row, ...]
    redundant: Redundant
    compiled: Compiled
    xla_flops: float | None
    xla_bytes: float | None
    memory: Memory | None
    donated: tuple[str, ...]
    aliased: tuple[tuple[int, str], ...]
    constants: tuple[Constant, ...]
    effects: tuple[Effect, ...]
    collectives: tuple[Collective, ...]
    trace_s: float
    lower_s: float
    compile_s: float
    jaxpr: Any
    stablehlo: str
    hlo: str
    program: Program
    sides: tuple[Side, ...] = ()
    stored: tuple[Stored, ...] = ()
    gradient: "Report | None" = None
    unstable: tuple[Unstable, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of one execution."""
        return self.layers[0].flops

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity: `xla_flops / xla_bytes`. `None` if XLA gives no estimate."""
        return self.xla_flops / self.xla_bytes if self.xla_flops and self.xla_bytes else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning for each large constant."""
        return tuple(
            f"A constant of {each.num_bytes:,} bytes, {each.type}, is baked into the program: "
            f"pass it as an argument.{f' It is read at {each.source}.' if each.source else ''}"
            for each in self.constants
            if each.num_bytes >= LARGE_CONSTANT_BYTES
        )

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return as_rich(self)

    def to_json(self) -> str:
        """The report as JSON, without the programs."""
        return json.dumps({"jax": jax.__version__, **_to_json_value(self)})

    def to_html(self) -> str:
        """The report as a self-contained HTML page: tables, and a graph with collapsible layers."""
        return page_of(self)

    def by_enzyme(self) -> tuple[Kinds, float]:
        """Optimises the StableHLO program with Enzyme.

        **Returns:** the number of operations of each kind in the optimised program, and the
        duration of Enzyme's passes in seconds. Compare the numbers with `compiled.stablehlo`.

        **Raises:** `ImportError` if Enzyme is not installed.
        """
        enzyme = import_extra(
            "enzyme_ad.jax",
            "Report.by_enzyme needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`. "
            "There are builds for Python 3.11 on Linux and macOS.",
        )
        start_s = time.perf_counter()
        _, text = enzyme.enzyme_call.run_pass_pipeline(
            ["main"], self.stablehlo, enzyme.full_optimization_pass_pipeline()
        )
        return stablehlo_kinds(text), time.perf_counter() - start_s


_NOT_IN_JSON = frozenset({"jaxpr", "stablehlo", "hlo", "program"})
"""Fields that hold programs. They are left out because they are large or not JSON."""


def _to_json_value(value: Any) -> Any:
    """Converts dataclasses and named tuples to dictionaries, and tuples to lists."""
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if names is None:
        return list(map(_to_json_value, value)) if isinstance(value, tuple) else value
    return {
        name: _to_json_value(getattr(value, name)) for name in names if name not in _NOT_IN_JSON
    }


def _report_on(name: str, trace: FreshTrace) -> Report:
    start_s = time.perf_counter()
    compiled = _compile(trace.lowered)
    compile_s = time.perf_counter() - start_s
    jaxpr, hlo = trace.traced.jaxpr, compiled.as_text() or ""
    program = program_of(jaxpr)
    instructions = instructions_in(hlo)
    operations = tuple(step.operation for step in program.steps)
    stablehlo, costs = trace.lowered.as_text(), compiled.cost_analysis() or {}
    fused = {each.calls for each in instructions if each.calls}
    donated = [each.donated for each in jtu.tree_leaves(trace.lowered.args_info)]
    # JAX drops unused arguments, so the number of a parameter does not identify its argument, but
    # the name of the parameter does.
    paths = {f"arrays[{index}]": path for index, path in enumerate(trace.paths)}
    return Report(
        name=name,
        operations=operations,
        layers=rows_by_layer(program, [each for each in instructions if each.kind != "fusion"]),
        kinds=rows_by_kind(program),
        redundant=redundant_in(program),
        compiled=Compiled(
            stablehlo=stablehlo_kinds(stablehlo),
            before=kinds_of(instructions_in(_text_before(trace.lowered))),
            after=kinds_of(instructions),
            fusions=dict(collections.Counter(each.fusion for each in instructions if each.fusion)),
            fused=sum(each.computation in fused for each in instructions),
        ),
        xla_flops=_known(costs.get("flops")),
        xla_bytes=_known(costs.get("bytes accessed")),
        memory=_memory(compiled.memory_analysis()),
        donated=tuple(path for path, flag in zip(trace.paths, donated, strict=False) if flag),
        aliased=tuple((output, paths.get(name, name)) for output, name in aliases_in(hlo)),
        constants=_constants(program),
        effects=tuple(
            Effect(each.kind, each.layer, each.times, each.source)
            for each in operations
            if each.kind.endswith("callback") or each.kind in _EFFECTS
        ),
        collectives=collectives(compiled),
        trace_s=trace.trace_s,
        lower_s=trace.lower_s,
        compile_s=compile_s,
        jaxpr=jaxpr,
        stablehlo=stablehlo,
        hlo=hlo,
        program=program,
        unstable=unstable_in(jaxpr),
    )


def _compile(lowered: Any) -> Any:
    """Compiles a program. Adds metadata to the key of JAX's compilation cache.

    Without metadata in the key, the cache may return an equal program in which operations have
    other names.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        return lowered.compile()
    finally:
        jax.config.update(name, before)


def _text_before(lowered: Any) -> str:
    try:
        return lowered.as_text("hlo")
    # Some programs have no HLO text, for example programs with symbolic shapes.
    except jax.errors.JaxRuntimeError:
        return ""


def _known(cost: float | None) -> float | None:
    """Returns `None` for a negative cost, because XLA gives unknown costs as negative numbers."""
    return cost if cost is not None and cost >= 0 else None


def _memory(stats: Any) -> Memory | None:
    # XLA gives no memory analysis on some platforms.
    if stats is None:
        return None
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    # XLA also reports a peak, but on CPU XLA's peak excludes the temporaries.
    peak = arguments + outputs - aliased + temporaries
    return Memory(arguments, outputs, aliased, temporaries, peak)


def _constants(program: Program) -> tuple[Constant, ...]:
    readers: dict[int, Operation] = {}
    for step in program.steps:
        for kind, where in map(root_of, step.inputs):
            if kind == "constant":
                readers.setdefault(where, step.operation)
    found = []
    for index, array in enumerate(program.constants):
        reader = readers.get(index)
        read = (reader.layer, reader.source) if reader else ("", "")
        found.append(Constant(type_of(array), num_bytes_of(array), *read))
    return tuple(sorted(found, key=lambda each: -each.num_bytes))


# --- Tracing and lowering ---


def _traced(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str = ""
) -> FreshTrace:
    """Traces `function` for these arguments.

    **Raises:** `ValueError` if the trace fails.
    """
    try:
        return fresh_trace(function, args, kwargs)
    except Exception as error:
        reason = " ".join([type(error).__name__ + ":", *str(error).strip().splitlines()[:1]])
        reason = reason.rstrip(".:") + "."
        raise ValueError(
            f"graph.report could not trace {what}{_name_of(function)}: {reason}"
        ) from error


def _name_of(function: Any) -> str:
    """The name of a function, or of the class of a Module."""
    while isinstance(function, Wrapper):
        function = function.__wrapped__
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


# --- The programs of a function and of its gradient ---


def _gradient_of(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Builds a function for the gradient, and a function for the arrays of the backward pass.

    A Module is differentiated with respect to its arrays, any other function with respect to its
    first argument. Each floating-point output has a cotangent of ones.

    **Returns:** a function that computes the outputs and the gradient, a function that computes the
    arrays stored for the backward pass, and the arguments for a call of either function.
    """
    if isinstance(function, JitFunction):
        function = function.__wrapped__
    is_model = isinstance(function, Module) and any(map(_is_inexact, jtu.tree_leaves(function)))
    if not is_model and not args:
        raise ValueError(
            "graph.report(gradient=True) differentiates a Module with respect to its arrays, and a "
            "function with respect to its first argument: pass an argument to "
            f"{_name_of(function)}."
        )
    call: Any = operator.call if is_model else function
    arguments = (function, *args) if is_model else args
    if not any(map(_is_inexact, jtu.tree_leaves(arguments[0]))):
        raise ValueError(
            "graph.report(gradient=True) differentiates with respect to floating-point arrays, but "
            f"the first argument of {_name_of(function)}, of type {type(arguments[0]).__name__}, "
            f"has none: {jtu.tree_leaves(arguments[0])!r:.80}."
        )

    def pulled_back(first: Any, /, *others: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        arrays, rest = split(first, is_inexact_array)

        def of_arrays(arrays: list[Any]) -> list[Any]:
            outputs = call(rest.merge(arrays), *others, **kwargs)
            return list(filter(_is_inexact, jtu.tree_leaves(outputs)))

        outputs, pull_back = jax.vjp(of_arrays, arrays)
        if not outputs:
            raise ValueError(
                f"{_name_of(function)} returns no floating-point array to differentiate"
            )
        return outputs, pull_back

    def program(of: Callable[[list[Any], Any], Any]) -> Any:
        def new(*arguments: Any, **kwargs: Any) -> Any:
            return of(*pulled_back(*arguments, **kwargs))

        return _with_signature_of(function, new, is_model)

    return (
        program(lambda outputs, pull_back: (outputs, pull_back(list(map(jnp.ones_like, outputs))))),
        program(lambda _, pull_back: list(filter(is_array, jtu.tree_leaves(pull_back)))),
        arguments,
    )


_LEFT_OUT = object()


def _is_inexact(leaf: Any) -> bool:
    return is_array_or_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _with_signature_of(function: Any, new: Callable[..., Any], is_model: bool) -> Any:
    """Gives `new` the name and parameters of `function`.

    If `is_model`, the first parameter of `new` is the model itself.
    """
    name = _name_of(function)
    new.__name__ = new.__qualname__ = name
    try:
        # If an argument is omitted and its default is a simple value, filter_jit passes the default
        # explicitly. Some functions reject an explicit default. filter_jit does not pass this
        # sentinel, so use the sentinel as the default of each parameter.
        parameters = [
            each if each.default is inspect.Parameter.empty else each.replace(default=_LEFT_OUT)
            for each in inspect.signature(function).parameters.values()
        ]
        if is_model:
            parameters.insert(0, inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
        signature = inspect.Signature(parameters)
    # Some functions have no signature, and `name` is not always a valid name of a parameter.
    except (TypeError, ValueError):
        return new
    vars(new)["__signature__"] = signature
    return new
