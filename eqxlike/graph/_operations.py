"""The operations of a traced program, each with its layer, cost and inputs."""

import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

from .._compat import scan_counts
from .._flops import cost_of
from .._traceback import frame_of_user, is_of_user_or_layer
from ..extend import is_hashable

Origin = tuple[str, Any]
"""Where a value comes from: `("argument", i)`, `("constant", i)`, `("literal", value)`,
`("operation", (i, j))` for output `j` of operation `i`, or `("passed", passed_value)`.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class PassedValue:
    """A value that enters an iteration of a loop, or leaves a loop or `cond`.

    Two `PassedValue`s are equal only if they are the same Python object.

    - `layer`: path of the enclosing layer.
    - `kind`: name of the JAX primitive.
    - `origin`: one possible origin of the value. For a loop carry, this is the origin of the
      initial carry. For an output, it is the origin of the output of the body or of one branch.
    """

    layer: str
    kind: str
    origin: Origin


def root_of(origin: Origin) -> Origin:
    """The origin of a value, after following all `PassedValue`s."""
    while origin[0] == "passed":
        origin = origin[1].origin
    return origin


def source_of(origin: Origin) -> int | None:
    """Index of the operation that computes a value, or None if no operation computes it.

    For a loop carry, this is the operation that computes the initial value of the carry.
    """
    kind, where = root_of(origin)
    return where[0] if kind == "operation" else None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of the traced program that is not a call, a loop or a branch.

    - `layer`: path of the layer; `""` outside all layers.
    - `kind`: name of the JAX primitive.
    - `is_backward`: whether the operation belongs to the backward pass of reverse mode.
    - `times`: number of executions. The body of a `while_loop` counts once. Only the most
      expensive branch of a `cond` counts. Unused operations count 0.
    - `is_in_while`: whether the operation is in a `while_loop`. If True, `times` is a lower bound.
    - `flops`, `transcendentals`: cost of one execution; `None` if unknown.
    - `num_bytes`: bytes that one execution would read and write if XLA fused no operations.
    - `output`: type of the first output, such as `f32[5,3]`.
    - `source`: the line of the user's code, or of a layer of `eqxlike.nn`, that created the
      operation, such as `file.py:3:4 (function)`. The column is left out if JAX does not record it.
    """

    layer: str
    kind: str
    is_backward: bool
    times: int
    is_in_while: bool
    flops: int | None
    transcendentals: int | None
    num_bytes: int
    output: str
    source: str

    @property
    def work(self) -> int:
        """FLOPs and transcendentals of all executions; unknown costs count as 0."""
        return self.times * ((self.flops or 0) + (self.transcendentals or 0))


@dataclasses.dataclass
class PlacedOperation:
    """An operation with its position in the program and its inputs.

    - `scopes`: the name scopes around the operation, outermost first.
    - `groups`: the name scopes, loops and branches around the operation, outermost first.
    - `inputs`: origins of the inputs.
    - `params`: the equation's parameters if they are hashable, otherwise a unique object.
    - `has_effect`: whether the operation has a side effect.
    - `is_inner`: whether the operation is in a loop or branch.
    - `is_needed`: whether an output or a side effect depends on the operation.
    """

    operation: Operation
    scopes: tuple[str, ...]
    groups: tuple[str, ...]
    inputs: tuple[Origin, ...]
    params: Hashable
    has_effect: bool
    is_inner: bool
    is_needed: bool = True


@dataclasses.dataclass
class Program:
    """A traced program as a flat list of operations.

    - `steps`: all operations in order. A call is replaced by the operations of the called program.
    - `outputs`: origins of the outputs.
    - `decisions`: origins of the branch indices and branch outputs of each `cond`, and of the
      initial carries of each `while_loop`.
    - `constants`: the arrays that the program captured.
    """

    steps: list[PlacedOperation] = dataclasses.field(default_factory=list)
    outputs: tuple[Origin, ...] = ()
    decisions: list[Origin] = dataclasses.field(default_factory=list)
    constants: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Position:
    """The scopes, loops and branches around an inner program, and its number of executions."""

    scopes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    is_backward: bool = False
    times: int = 1
    is_in_while: bool = False
    is_inner: bool = False
    repeated: tuple[str, ...] = ()

    def inside(self, group: str, **changes: Any) -> "_Position":
        """The position inside a loop or branch."""
        return dataclasses.replace(self, groups=(*self.groups, group), is_inner=True, **changes)

    def passed_on(self, origins: Iterable[Origin], kind: str) -> list[Origin]:
        """Wraps the origins of values that enter a loop iteration, or leave a loop or `cond`."""
        layer = path_of(self.scopes)
        return [("passed", PassedValue(layer, kind, each)) for each in origins]


def program_of(closed: Any) -> Program:
    """Flattens a closed jaxpr to a `Program`."""
    program = Program()
    flattener = _Flattener(program)
    inputs = [("argument", index) for index in range(len(closed.jaxpr.invars))]
    program.outputs = tuple(flattener.run(closed, inputs, _Position()))
    _complete_scopes(program)
    needed = _needed(program)
    for index, step in enumerate(program.steps):
        step.is_needed = index in needed
        if not step.is_needed:
            step.operation = dataclasses.replace(step.operation, times=0)
    return program


def _needed(program: Program) -> set[int]:
    """Indices of the operations on which outputs and side effects depend.

    Every operation in a loop or branch counts as needed, because the next iteration may depend on
    it.
    """
    steps = program.steps
    needed = {index for index, step in enumerate(steps) if step.has_effect or step.is_inner}
    waiting = [each for index in needed for each in steps[index].inputs]
    waiting += [*program.outputs, *program.decisions]
    while waiting:
        index = source_of(waiting.pop())
        if index is not None and index not in needed:
            needed.add(index)
            waiting += steps[index].inputs
    return needed


def _complete_scopes(program: Program) -> None:
    """Restores the outer scopes of operations that JAX moved out of a loop.

    When JAX moves an operation, it drops the names of the scopes around the loop. The names are
    restored if exactly one full path in the program ends with the remaining scopes.
    """
    whole = {step.scopes for step in program.steps if step.scopes and not _is_inner(step.scopes)}
    for step in program.steps:
        lost = step.scopes
        if not lost or not _is_inner(lost):
            continue
        found = [each for each in whole if each[-len(lost) :] == lost]
        if len(found) == 1:
            missing = found[0][: -len(lost)]
            step.scopes = found[0]
            step.groups = (*missing, *step.groups)
            step.operation = dataclasses.replace(step.operation, layer=path_of(found[0]))


def _is_inner(scopes: tuple[str, ...]) -> bool:
    """Returns True if the scopes start with an attribute or item: then outer scopes are missing."""
    return scopes[0][0] in ".["


class _Flattener:
    def __init__(self, program: Program):
        self._program = program
        self._constants: dict[int, int] = {}

    def run(self, closed: Any, inputs: Sequence[Origin], position: _Position) -> list[Origin]:
        """Records the operations of an inner program and returns the origins of its outputs."""
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = map(self._constant, getattr(closed, "consts", None) or ())
        known: dict[Any, Origin] = dict(zip(jaxpr.constvars, consts, strict=False))
        known.update(zip(jaxpr.invars, inputs, strict=False))

        def origin(variable: Any) -> Origin:
            if isinstance(variable, Literal):
                value = variable.val if is_hashable(variable.val) else str(variable.val)
                return "literal", (value, type_of(variable.aval))
            return known.get(variable, ("unknown", id(variable)))

        for equation in jaxpr.eqns:
            inputs = [origin(each) for each in equation.invars]
            outputs = self._equation(equation, inputs, position)
            known.update(zip(equation.outvars, outputs, strict=False))
        return [origin(each) for each in jaxpr.outvars]

    def _constant(self, array: Any) -> Origin:
        index = self._constants.setdefault(id(array), len(self._program.constants))
        if index == len(self._program.constants):
            self._program.constants.append(array)
        return "constant", index

    def _equation(self, equation: Any, inputs: list[Origin], position: _Position) -> list[Origin]:
        stack = str(equation.source_info.name_stack)
        scopes = scopes_in(stack)
        if position.repeated and scopes[: len(position.repeated)] == position.repeated:
            scopes = scopes[len(position.repeated) :]
        backward = position.is_backward or "transpose(" in stack
        name, params = equation.primitive.name, equation.params
        here = dataclasses.replace(
            position,
            scopes=position.scopes + scopes,
            groups=position.groups + (("backward",) * (backward > position.is_backward)) + scopes,
            is_backward=backward,
            # The name stack of an inner program starts empty. But in custom derivative rules, jax
            # 0.12.0.1 repeats the outer scopes, so `_equation` removes them.
            repeated=scopes if name.startswith("custom_") else (),
        )
        flatten = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
        if flatten is not None:
            return flatten(params, inputs, here)
        inner = _inner_programs(params)
        if name == "shard_map":
            # Each device runs the program on its shard, so multiply `times` by the number of
            # devices.
            sizes, axes = params["mesh"].shape, params["newly_manual_axes"]
            times = here.times * math.prod(sizes[axis] for axis in axes)
            here = dataclasses.replace(here, times=times)
        if len(inner) == 1:
            parameters = getattr(inner[0], "jaxpr", inner[0]).invars
            if name == "shard_map" or _shapes_of(parameters) == _shapes_of(equation.invars):
                return self.run(inner[0], inputs, here)[: len(equation.outvars)]
        return self._operation(equation, inputs, here)

    def _scan(self, params: Any, inputs: list[Origin], position: _Position) -> list[Origin]:
        length, (num_consts, _) = params["length"], scan_counts(params)
        inside = position.inside(f"scan, {length} iterations", times=position.times * length)
        carry = position.passed_on(inputs[num_consts:], "scan")
        outputs = self.run(params["jaxpr"], [*inputs[:num_consts], *carry], inside)
        return position.passed_on(outputs, "scan")

    def _while(self, params: Any, inputs: list[Origin], position: _Position) -> list[Origin]:
        inside = position.inside("while", is_in_while=True)
        num_cond = params["cond_nconsts"]
        consts = num_cond + params["body_nconsts"]
        # The initial carry is needed, because a loop without iterations returns it.
        self._program.decisions += inputs[consts:]
        carry = position.passed_on(inputs[consts:], "while")
        self.run(params["cond_jaxpr"], [*inputs[:num_cond], *carry], inside)
        outputs = self.run(params["body_jaxpr"], [*inputs[num_cond:consts], *carry], inside)
        return position.passed_on(outputs, "while")

    def _cond(self, params: Any, inputs: list[Origin], position: _Position) -> list[Origin]:
        steps, spans, outputs = self._program.steps, [], []
        for number, branch in enumerate(params["branches"]):
            start = len(steps)
            outputs.append(self.run(branch, inputs[1:], position.inside(f"branch {number}")))
            spans.append(steps[start:])
        costs = [sum(step.operation.work for step in span) for span in spans]
        costliest = costs.index(max(costs))
        for step in (step for span in spans if span is not spans[costliest] for step in span):
            step.operation = dataclasses.replace(step.operation, times=0)
        self._program.decisions += [inputs[0], *(each for branch in outputs for each in branch)]
        return position.passed_on(outputs[costliest], "cond")

    def _operation(self, equation: Any, inputs: list[Origin], position: _Position) -> list[Origin]:
        outputs = [each.aval for each in equation.outvars]
        moved = [*outputs, *(each.aval for each in equation.invars)]
        flops, transcendentals = cost_of(equation) or (None, None)
        operation = Operation(
            layer=path_of(position.scopes),
            kind=equation.primitive.name,
            is_backward=position.is_backward,
            times=position.times,
            is_in_while=position.is_in_while,
            flops=flops,
            transcendentals=transcendentals,
            num_bytes=sum(map(num_bytes_of, moved)),
            output=type_of(outputs[0]) if outputs else "()",
            source=line_of(equation.source_info),
        )
        params = tuple(equation.params.items())
        index = len(self._program.steps)
        self._program.steps.append(
            PlacedOperation(
                operation,
                position.scopes,
                position.groups,
                tuple(inputs),
                params if is_hashable(params) else object(),
                bool(equation.effects),
                position.is_inner,
            )
        )
        return [("operation", (index, output)) for output in range(len(outputs))]


def _inner_programs(params: dict[str, Any]) -> list[Any]:
    """The closed jaxprs among an equation's parameters. Without closed jaxprs, the open jaxprs."""
    closed = [
        each for each in params.values() if hasattr(each, "jaxpr") and hasattr(each, "consts")
    ]
    return closed or list(jaxprs_in_params(params))


def _shapes_of(variables: Iterable[Any]) -> list[Any]:
    return [getattr(each.aval, "shape", None) for each in variables]


def line_of(source: Any) -> str:
    """The source line of an operation, from JAX's `source_info`."""
    line = source_info_util.summarize(source)
    # A line inside this package, such as the implementation of a callback, does not help the user.
    # Find the line in the user's code that called this package.
    frame = None if is_of_user_or_layer(line) else frame_of_user(source, is_of_user_or_layer)
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})" if frame else line


def num_bytes_of(aval: Any) -> int:
    """Size in bytes of an array of this type."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return math.prod(size for size in aval.shape if isinstance(size, int)) * dtype.itemsize


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def type_of(aval: Any) -> str:
    """The dtype and shape of an array, such as `f32[5,3]`."""
    if not hasattr(aval, "shape"):
        return str(aval)
    name = str(aval.dtype)
    letters = name.rstrip("0123456789")
    short = _SHORT[letters] + name[len(letters) :] if letters in _SHORT else name
    return f"{short}[{','.join(map(str, aval.shape))}]"


# --- The path of a layer, from JAX's name stack ---


_TOKEN = re.compile(r"([^/()]+)(\(?)")
_JAX_SCOPES = frozenset({"checkpoint", "rematted_computation"})
# `jnp.einsum` uses the subscripts as the name of a scope.
_EINSUM_SUBSCRIPTS = re.compile(r"[\w.,]*->[\w.]*")


def scopes_in(stack: str) -> tuple[str, ...]:
    """The name scopes in JAX's name stack, outermost first, without names of transformations.

    >>> scopes_in("transpose(jvp(model))/vmap(.layers[0])")
    ('model', '.layers[0]')
    """
    return tuple(
        name
        for name, opens in _TOKEN.findall(stack)
        if not opens and name not in _JAX_SCOPES and _EINSUM_SUBSCRIPTS.fullmatch(name) is None
    )


def path_of(scopes: tuple[str, ...]) -> str:
    """Joins name scopes to the path of a layer.

    Attributes and items are joined without a separator, other scopes with a slash.

    >>> path_of(("model", ".layers[0]", "mask"))
    'model.layers[0]/mask'
    """
    path = ""
    for scope in scopes:
        path += scope if scope[0] in ".[" or not path else f"/{scope}"
    return path
