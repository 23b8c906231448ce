"""The cost of a program, and of each call in it."""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.interpreters import partial_eval

from ..._dtypes import is_key


@dataclasses.dataclass
class Cost:
    """The cost of a program, or of a part of one.

    - `flops`: floating-point operations; `nan` if XLA does not tell of some part.
    - `flops_of`: those of each call, and of what is called inside of it.
    - `times_of`: how often each call is run.
    """

    flops: float = 0.0
    flops_of: dict[int, float] = dataclasses.field(default_factory=dict)
    times_of: dict[int, int] = dataclasses.field(default_factory=dict)

    def add(self, part: "Cost", times: int = 1) -> None:
        """Adds what is run `times` times."""
        self.flops += times * part.flops
        for call, flops in part.flops_of.items():
            self.flops_of[call] = self.flops_of.get(call, 0.0) + times * flops
        for call, runs in part.times_of.items():
            self.times_of[call] = self.times_of.get(call, 0) + times * runs


def scope_of(call: int) -> Any:
    """A context in which all that is traced belongs to this call, wherever JAX moves it: what a
    `vmap` or a gradient makes of it, too.
    """
    return jax.named_scope(f"{_SCOPE}{call}")


_SCOPE = "eqxlike-call-"
_IN_SCOPE = re.compile(rf"{_SCOPE}(\d+)")


def cost_of(program: Jaxpr) -> Cost:
    """The cost of a program whose calls were traced in their scopes.

    Each equation that the output depends on counts as XLA counts it, before it optimises: once for
    each turn of a `scan`, and once in a `while_loop`, whose turns are known to the run alone. Of
    the branches of a `cond` the largest counts.
    """
    needed, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return _Counter().program(needed)


class _Counter:
    def __init__(self):
        self._known: dict[Any, float] = {}

    def program(self, jaxpr: Jaxpr) -> Cost:
        # What stands in the same scopes is counted in one go: XLA takes 6 ms to say what a program
        # of one equation costs, and 9 ms for one of twenty.
        primitives: dict[tuple[frozenset[int], bool], list[Any]] = {}
        parts: list[tuple[frozenset[int], Cost]] = []
        for equation in jaxpr.eqns:
            calls = frozenset(map(int, _IN_SCOPE.findall(str(equation.source_info.name_stack))))
            inner = self._inner(equation)
            if inner is None:
                primitives.setdefault((calls, _is_on_keys(equation)), []).append(equation)
            else:
                parts.append((calls, inner))
        for (calls, is_on_keys), equations in primitives.items():
            parts.append((calls, Cost(self._primitives(equations, is_on_keys))))
        cost = Cost()
        for calls, part in parts:
            cost.add(part)
            # Inside of a nested program scopes begin anew: no call counts there once more.
            cost.flops_of |= {call: cost.flops_of.get(call, 0.0) + part.flops for call in calls}
        for call in frozenset().union(*(calls for calls, _ in parts)):
            cost.times_of[call] = cost.times_of.get(call, 0) + 1
        return cost

    def _inner(self, equation: Any) -> Cost | None:
        """The cost of the programs inside of an equation; `None` if it is a primitive operation."""
        name, inner = equation.primitive.name, list(jaxprs_in_params(equation.params))
        cost = Cost()
        if name == "cond":
            branches = [self.program(branch) for branch in inner]
            for branch in branches:
                cost.add(branch)
            cost.flops = max((branch.flops for branch in branches), key=_unknown_first)
        elif name in ("scan", "while") or _is_call(equation, inner):
            turns = equation.params["length"] if name == "scan" else 1
            for each in inner:
                cost.add(self.program(each), turns)
        # What returns nothing is there for its effect: it prints, say. And what Python computes on
        # the host, as where a check has failed, is no part of the program.
        elif equation.outvars and not name.endswith("callback"):
            return None
        return cost

    def _primitives(self, equations: list[Any], are_on_keys: bool) -> float:
        try:
            key = tuple(map(_key_of, equations))
            hash(key)
        except TypeError:  # An array among the parameters, say.
            return _flops(equations, are_on_keys)
        if key not in self._known:
            self._known[key] = _flops(equations, are_on_keys)
        return self._known[key]


def _is_call(equation: Any, inner: list[Jaxpr]) -> bool:
    """Whether an equation runs one program on what it is given, as that of a jitted function."""
    if len(inner) != 1:
        return False
    shapes = [
        [getattr(variable.aval, "shape", None) for variable in variables]
        for variables in (inner[0].invars, equation.invars)
    ]
    return shapes[0] == shapes[1]


def _is_on_keys(equation: Any) -> bool:
    return any(is_key(each.aval) for each in (*equation.invars, *equation.outvars))


def _key_of(equation: Any) -> Any:
    """The parts of an equation on which its cost depends."""
    return equation.primitive, tuple(equation.params.items()), tuple(_inputs(equation))


def _inputs(equation: Any) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        for aval in (variable.aval for variable in equation.invars)
    ]


def _flops(equations: list[Any], are_on_keys: bool) -> float:
    def run(inputs: list[list[Any]]) -> list[Any]:
        pairs = zip(equations, inputs, strict=True)
        return [equation.primitive.bind(*arrays, **equation.params) for equation, arrays in pairs]

    try:
        analysis = jax.jit(run).lower(list(map(_inputs, equations))).cost_analysis()
    # The equations were sound where they stood. By themselves they need not be: they may use an
    # axis of a `pmap` around them; nor has every platform an analysis.
    except Exception:
        return math.nan
    if not isinstance(analysis, dict):
        return math.nan
    # XLA does not know what foreign code costs. It counts -1 for each call of it, as FLOPs and as
    # seconds, of which there are no others before it optimises. With keys such a call is no more
    # than a note on how they lie in memory.
    num_foreign = -analysis.get("optimal_seconds", 0.0)
    if num_foreign > 0 and not are_on_keys:
        return math.nan
    return analysis.get("flops", 0.0) + num_foreign


def _unknown_first(flops: float) -> float:
    return math.inf if math.isnan(flops) else flops
