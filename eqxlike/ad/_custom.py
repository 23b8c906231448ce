"""Functions with a custom derivative: `differentiate_with` and the mode `Checkpointed`."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from .._compat import cpu_merges_recomputation, scan_counts
from .._module import field
from .._programs import bind, interpret
from .._transforms._derivatives._grad import advised, check_mode
from .._transforms._derivatives._linear_call import (
    batch_first,
    fill,
    has_tangent,
    is_inexact,
    linear_call,
    select,
    zero_tangent,
)
from .._transforms._flat_call import FlatCall
from .._transforms._signatures import Output, Params, TransformedFunction, check_callable
from ._modes import Arrays, Mode, OfArrays, Pullback, Reverse, ValueAndGrad

OfList = Callable[[Arrays], Arrays]


class Differentiated(TransformedFunction):
    """The function that `ad.differentiate_with` returns."""

    _mode: Mode

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = FlatCall(self._function, args, kwargs, "a function with a mode")
        closed = jax.make_jaxpr(call.of_arrays)(call.arrays)
        num_consts = len(closed.consts)

        # Closed-over arrays become arguments, because the caller may differentiate with respect to
        # closed-over arrays.
        def of_all(arrays: list[Array]) -> list[Array]:
            consts, arrays = arrays[:num_consts], arrays[num_consts:]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

        name = getattr(self, "__name__", type(self._function).__name__)
        run = differentiated_by(self._mode, of_all, name)
        return call.output(run([*closed.consts, *call.arrays]))


def differentiate_with(function: Callable[Params, Output], mode: Mode) -> Callable[Params, Output]:
    """Wraps a function or Module so that it is always differentiated with `mode`.

    Callers may use any mode. If a caller uses reverse mode, `mode` computes the vector-Jacobian
    products of the function. If a caller uses forward mode, `mode` computes the Jacobian-vector
    products of the function. For example, one layer of a model can recompute its intermediate
    values, or contain a callback that JAX cannot differentiate.

    **Arguments:**

    - `function`: a callable Module, or a function of any arguments that returns any pytree. It is
      differentiated with respect to the floating-point and complex arrays in its arguments, in its
      own leaves, and in its closure.
    - `mode`: the mode of differentiation.

    **Returns:** a Module with the signature of `function`. Its attribute `__wrapped__` is
    `function`. If `function` is a pytree, its arrays are leaves of the Module.

    **Raises:** `TypeError` if `function` is not callable, or `mode` is not a mode.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> from eqxlike import ad
        >>> def sine(x):  # computed by NumPy, which JAX cannot differentiate
        ...     return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)
        >>> sine = ad.differentiate_with(sine, ad.FiniteDifference(order=4))
        >>> gradient = eqx.filter_grad(lambda x: sine(x) ** 2)(jnp.array(0.5))
        >>> print(bool(jnp.allclose(gradient, jnp.sin(1.0), atol=1e-3)))
        True
    """
    check_callable(function, "ad.differentiate_with")
    check_mode(mode, "ad.differentiate_with")
    return Differentiated(function, mode)


def differentiated_by(mode: Mode, function: OfList, name: str | None) -> OfList:
    """Gives `function` a custom derivative: `mode.jvp` as its JVP, and `mode.vjp` as its VJP.

    Both methods get only the arrays with respect to which the caller differentiates.

    **Arguments:**

    - `function`: takes a list of arrays and returns a list of arrays. It must not close over a
      tracer.
    - `name`: the name of the function in error messages. `None` if a caller adds the name.
    """

    @jax.custom_jvp
    @batch_first
    def run(arrays: Arrays) -> Arrays:
        return function(arrays)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> tuple[Arrays, list[Any]]:
        arrays, dots = (list(map(_as_array, each)) for (each,) in (primals, tangents))
        is_differentiated = list(map(has_tangent, dots))
        # `run` has this derivative rule, and `function` does not. A mode that only evaluates the
        # function gets `run`. Then the rule also applies when the derivative is differentiated.
        within = run if mode.only_evaluates else function
        inexact_flags: list[bool] = []

        def restrict(arrays: Arrays) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
            def restricted(values: Arrays) -> tuple[Arrays, Arrays]:
                inputs = fill(values, arrays, is_differentiated)
                outputs = list(map(_as_array, within(inputs)))
                inexact_flags[:] = map(is_inexact, outputs)
                others = [each for each in outputs if not is_inexact(each)]
                return select(outputs, inexact_flags), others

            return restricted

        with advised(mode, name):
            inexact_outputs, pullback, others = mode.vjp(
                restrict(arrays), select(arrays, is_differentiated)
            )
            if not inexact_outputs:
                return others, list(map(zero_tangent, others))
            # Trace the pullback, so that all arrays that it closes over become residuals.
            closed = jax.make_jaxpr(pullback)(inexact_outputs)

        def forward(residuals: Arrays, directions: Arrays) -> Arrays:
            arrays = residuals[: len(is_differentiated)]
            selected = select(arrays, is_differentiated)
            with advised(mode, name):
                return mode.jvp(restrict(arrays), selected, directions)

        def transpose(residuals: Arrays, cotangents: Arrays, _: Any) -> Arrays:
            consts = residuals[len(is_differentiated) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*cotangents)

        found = linear_call(
            forward,
            transpose,
            [*arrays, *closed.consts],
            select(dots, is_differentiated),
            like=inexact_outputs,
            # With this flag, reverse mode of a batch does not call `forward`. The mode may not
            # support `forward`.
            is_of_members=True,
        )
        values, rest = iter(inexact_outputs), iter(others)
        outputs = [next(values if each else rest) for each in inexact_flags]
        return outputs, fill(found, map(zero_tangent, outputs), inexact_flags)

    return run


def _as_array(value: Any) -> Any:
    """Returns `value` as an array. A user may differentiate with respect to a Python number."""
    is_array = hasattr(value, "shape") or isinstance(value, SymbolicZero)
    return value if is_array else jnp.asarray(value)


# --- Gradient checkpointing ---


class Checkpointed(Mode):
    """Reverse mode that saves few values of the forward pass, and recomputes all others.

    A function of `n` operations is cut into about `sqrt(n)` segments, so that few values pass from
    one segment to the next. Only these values are saved. The backward pass computes each segment
    again (Chen et al., 2016, arXiv:1604.06174). The steps of a `jax.lax.scan` are cut into segments
    in the same way. A network of `n` layers needs memory for about `2 sqrt(n)` layers, and the
    function is evaluated twice.

    - `policy`: one of `jax.checkpoint_policies`. It chooses further values to save inside the
      segments. `None` saves no further values.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def deep(x):
        ...     for _ in range(64):
        ...         x = jnp.sin(x)
        ...     return x
        >>> print(eqx.filter_grad(deep, mode=ad.Checkpointed())(jnp.array(0.0)))
        1.0
    """

    policy: Callable[..., bool] | None = field(static=True, default=None)

    def __check_init__(self):
        if self.policy is not None and not callable(self.policy):
            raise TypeError(
                "Checkpointed: policy must be one of `jax.checkpoint_policies`, or None; got "
                f"{self.policy!r}."
            )

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        return Reverse().value_and_grad(in_segments(function, arrays, self.policy), arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        return Reverse().vjp(in_segments(function, arrays, self.policy), arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        return Reverse().jvp(function, arrays, tangents)


# --- Division of a function into segments that the backward pass recomputes ---


Policy = Callable[..., bool] | None


def in_segments(
    function: Callable[[Arrays], Any], arrays: Arrays, policy: Policy
) -> Callable[[Arrays], Any]:
    """Traces `function` and cuts it into segments, which the backward pass recomputes."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(arrays)
    program = _Program()
    inputs = [program.new_name(each.aval) for each in closed.jaxpr.invars]
    # Closed-over arrays become inputs, because they may be tracers.
    consts = [program.new_name(each.aval) for each in closed.jaxpr.constvars]
    outputs = program.inline(closed.jaxpr, consts, inputs)
    segments, treedef = program.segments(outputs), jtu.tree_structure(output)

    def run(arrays: Arrays) -> Any:
        values = dict(zip([*inputs, *consts], [*arrays, *closed.consts], strict=True))
        for segment in segments:
            run_segment = segment.run
            if not any(step.equation.effects for step in segment.steps):
                run_segment = recomputed(lambda values, s=segment: s.run(values, policy), policy)
            found = run_segment([values[name] for name in segment.inputs])
            values.update(zip(segment.outputs, found, strict=True))
        # An output may be a literal of the program. A literal is not an array.
        return jtu.tree_unflatten(treedef, [jnp.asarray(_read(values, each)) for each in outputs])

    return run


Name = int
Atom = Any  # a Name or a Literal


def _read(values: dict[Name, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One operation of the program."""

    equation: Any
    inputs: list[Atom]
    outputs: list[Name]

    def run(self, values: list[Any], policy: Policy) -> Sequence[Any]:
        equation = self.equation
        if equation.primitive.name == "scan" and not equation.effects:
            return _scan_in_blocks(equation.params, values, policy)
        return bind(equation, values)


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Consecutive steps of the program.

    - `inputs`: the values that earlier segments compute.
    - `outputs`: the values that later segments need.
    """

    steps: list[_Step]
    inputs: list[Name]
    outputs: list[Name]

    def run(self, values: Arrays, policy: Policy = None) -> Arrays:
        named = dict(zip(self.inputs, values, strict=True))
        for step in self.steps:
            found = step.run([_read(named, each) for each in step.inputs], policy)
            named.update(zip(step.outputs, found, strict=True))
        return [named[name] for name in self.outputs]


class _Program:
    """The operations of a function in one list, with inner `jit` calls inlined."""

    def __init__(self):
        self.steps: list[_Step] = []
        self.sizes: list[int] = []  # the bytes of each value, indexed by its name

    def new_name(self, aval: Any) -> Name:
        num_bytes = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.sizes.append(math.prod(getattr(aval, "shape", ())) * num_bytes)
        return len(self.sizes) - 1

    def inline(self, jaxpr: Any, consts: list[Atom], inputs: list[Atom]) -> list[Atom]:
        """Appends the operations of `jaxpr`, and returns its outputs."""

        def append(equation: Any, inputs: list[Atom]) -> list[Atom]:
            inner = equation.params.get("jaxpr")
            if equation.primitive.name == "jit" and not inner.consts:
                return self.inline(getattr(inner, "jaxpr", inner), [], inputs)
            outputs = [self.new_name(each.aval) for each in equation.outvars]
            self.steps.append(_Step(equation, inputs, outputs))
            return outputs

        return interpret(jaxpr, consts, inputs, append, lambda literal: literal)

    def segments(self, outputs: list[Atom]) -> list[_Segment]:
        """Divides the program into segments. `outputs` are the outputs of the whole program."""
        last_use = {name: len(self.steps) for name in outputs if not isinstance(name, Literal)}
        for number in reversed(range(len(self.steps))):
            for name in self.steps[number].inputs:
                if not isinstance(name, Literal):
                    last_use.setdefault(name, number)
        segments, start = [], 0
        for end in [*self._cuts(last_use), len(self.steps)]:
            steps = self.steps[start:end]
            made = {name for step in steps for name in step.outputs}
            used = {name for step in steps for name in step.inputs if not isinstance(name, Literal)}
            inputs = sorted(used - made)
            needed = sorted(name for name in made if last_use.get(name, -1) >= end)
            segments.append(_Segment(steps, inputs, needed))
            start = end
        return segments

    def _cuts(self, last_use: dict[Name, int]) -> list[int]:
        """The indices of the steps at which a new segment starts."""
        made = [sum(self.sizes[name] for name in step.outputs) for step in self.steps]
        total = sum(made)
        # `kept[i]`: the bytes to store for a cut before step `i`, that is, the size of all values
        # that are computed before the cut and used after the cut.
        changes = [0] * (len(self.steps) + 2)
        for number, step in enumerate(self.steps):
            for name in step.outputs:
                if last_use.get(name, -1) > number:
                    changes[number + 1] += self.sizes[name]
                    changes[last_use[name] + 1] -= self.sizes[name]
        kept = list(itertools.accumulate(changes))[: len(self.steps)]
        if len(self.steps) < 4 or not total:
            return []
        # k segments need `k * typical + total / k` bytes. `num_segments` minimises this number.
        typical = max(sorted(kept[1:])[len(kept[1:]) // 4], 1)
        num_segments = min(max(round(math.sqrt(total / typical)), 1), len(self.steps) // 2)
        ends = list(itertools.accumulate(made))
        cuts: set[int] = set()
        for turn in range(1, num_segments):
            around = [
                bisect.bisect_left(ends, total * (turn + shift) / num_segments) + 1
                for shift in (-0.4, 0.4)
            ]
            places = range(max(around[0], 1), min(around[1], len(self.steps) - 1) + 1)
            if places:
                cuts.add(min(places, key=lambda place: kept[place]))
        return sorted(cuts)


def _scan_in_blocks(params: Any, values: list[Any], policy: Policy) -> list[Array]:
    """Runs a `scan` in about `sqrt(length)` blocks. The backward pass recomputes each block."""
    num_consts, num_carry = scan_counts(params)
    body = jaxpr_as_fun(params["jaxpr"])
    length, reverse = params["length"], params["reverse"]
    size = math.isqrt(max(length - 1, 0)) + 1
    num_blocks = length // size if size else 0

    def over(consts: Arrays, carry: Arrays, xs: Arrays, length: int) -> tuple[Arrays, Arrays]:
        def step(carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            found = body(*consts, *carry, *x)
            return found[:num_carry], found[num_carry:]

        return jax.lax.scan(step, carry, xs, length, reverse=reverse, unroll=params["unroll"])

    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    xs = values[num_consts + num_carry :]
    if num_blocks < 2:
        carry, ys = over(consts, carry, xs, length)
        return [*carry, *ys]

    # The remaining steps, which do not fill a block, run last.
    whole = num_blocks * size
    in_blocks = slice(length - whole, None) if reverse else slice(whole)
    others = slice(length - whole) if reverse else slice(whole, None)
    blocks = [each[in_blocks].reshape(num_blocks, size, *each.shape[1:]) for each in xs]

    def block(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return over(consts, carry, xs, size)

    block_again = jax.checkpoint(block, prevent_cse=False, policy=policy)
    carry, ys = jax.lax.scan(block_again, carry, blocks, num_blocks, reverse=reverse)
    ys = [each.reshape(whole, *each.shape[2:]) for each in ys]
    if whole < length:
        carry, rest = over(consts, carry, [each[others] for each in xs], length - whole)
        ends = zip(rest, ys, strict=True) if reverse else zip(ys, rest, strict=True)
        ys = [jnp.concatenate(pair) for pair in ends]
    return [*carry, *ys]


# --- Functions that the backward pass recomputes ---


def recomputed(function: OfList, policy: Callable[..., bool] | None) -> OfList:
    """Makes reverse mode save only the arguments of `function` and values that `policy` chooses."""
    if policy is None and cpu_merges_recomputation():
        return differentiated_by(_InBranch(), function, None)
    return jax.checkpoint(function, policy=policy)


class _InBranch(Reverse):
    """Reverse mode that recomputes the function inside a `cond` of the backward pass.

    Because the recomputed operations are in a branch of the `cond`, XLA does not merge them with
    the same operations of the forward pass. XLA starts the branch only when the cotangents have
    been computed.
    """

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            # `is_taken` is always true. XLA cannot know this, so XLA keeps the `cond`.
            is_taken = jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), ()) < 2
            return jax.lax.cond(
                is_taken,
                lambda arrays, cotangents: Reverse.vjp(self, function, arrays)[1](cotangents),
                lambda arrays, _: list(map(jnp.zeros_like, arrays)),
                arrays,
                cotangents,
            )

        return outputs, pull_back, aux
