"""Formulas that lose digits: which formulas are found, and their stable replacements."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from benchmarks import stable_maths
from benchmarks.stable_formulas import FORMULAS
from eqxlike import graph, nn, train
from eqxlike.graph._stable._rewrite import StableProgram
from tests.bayes import test_posterior
from tests.graph.spellings import LOG, SPELLINGS
from tests.nn import test_laws

FAR = jnp.array([-300.0, -100.0, -20.0, -1.0, 0.5, 3.0, 90.0, 300.0])
NEAR = jnp.array([-4.0, -2.5, -1.0, -0.3, 0.2, 0.9, 2.0, 3.5])


def names_in(function, *args, rules=graph.rules.RULES):
    return [each.name for each in graph.unstable(function, *args, rules=rules)]


def test_each_formula_is_found_and_not_found_again_after_rewriting():
    for name, function in SPELLINGS:
        program = StableProgram(jax.make_jaxpr(function)(FAR), graph.rules.RULES)
        assert name in [match.rule.name for match in program.matches], inspect.getsource(function)
        again = StableProgram(program.rewritten(), graph.rules.RULES)
        assert not again.is_rewritten, inspect.getsource(function)


def test_values_and_gradients_do_not_change_if_no_digits_are_lost():
    is_wide = [name not in ("sum in low precision", "cast to float16") for name, _ in SPELLINGS]
    functions = [f for (_, f), wide in zip(SPELLINGS, is_wide, strict=True) if wide][::4]

    def run(x, functions):
        totals = [lambda x, f=f: jnp.sum(f(x)) for f in functions]
        return [jax.value_and_grad(total)(x) for total in totals]

    # One program for all formulas, because most are short.
    found, right = (
        jax.jit(functools.partial(run, functions=each))(NEAR)
        for each in (list(map(graph.stabilise, functions)), functions)
    )
    for function, ours, theirs in zip(functions, found, right, strict=True):
        for mine, naive in zip(ours, theirs, strict=True):
            # If the naive value is infinite, its gradient is zero.
            is_known = np.isfinite(naive) & np.isfinite(theirs[0])
            text = inspect.getsource(function)
            np.testing.assert_allclose(
                np.where(is_known, mine, 0), np.where(is_known, naive, 0), 1e-3, 2e-5, err_msg=text
            )


def softplus(x):
    return jnp.log(1 + jnp.exp(x))


@jax.custom_jvp
def with_own_derivative(x):
    return softplus(x)


@with_own_derivative.defjvp
def _(primals, tangents):
    return with_own_derivative(*primals), 3 * tangents[0]


@jax.custom_vjp
def with_own_gradient(x):
    return softplus(x)


with_own_gradient.defvjp(lambda x: (with_own_gradient(x), None), lambda _, g: (3 * g,))

INSIDE = {
    "while_loop": lambda x: lax.while_loop(
        lambda c: jnp.all(softplus(c[1]) < 1e30) & (c[0] < 1),
        lambda c: (c[0] + 1, softplus(c[1])),
        (0, x),
    )[1],
    "scan of vmap": lambda x: lax.scan(lambda c, x: (c, jax.vmap(softplus)(x)), 0.0, x[None])[1][0],
    "switch": lambda x: lax.switch(1, (jnp.sin, softplus), x),
    "cond of a traced condition": lambda x: lax.cond(x[0] < 0, softplus, jnp.sin, x),
    "fori_loop": lambda x: lax.fori_loop(0, 1, lambda i, x: softplus(x), x),
    "donated jit": lambda x: jax.jit(softplus, donate_argnums=0)(x + 0),
    "sharded jit": lambda x: jax.jit(
        softplus, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )(x),
    "checkpoint": jax.checkpoint(softplus),
    "filter_checkpoint": eqx.filter_checkpoint(softplus),
    "filter_vmap": eqx.filter_vmap(softplus),
    "filter_jit": eqx.filter_jit(softplus),
    "custom_jvp": with_own_derivative,
    "custom_vjp": with_own_gradient,
    "stabilise": lambda x: graph.stabilise(softplus)(x),
}


def test_programs_inside_of_a_program_are_rewritten():
    found = eqx.filter_jit(lambda x: {name: graph.stabilise(f)(x) for name, f in INSIDE.items()})(
        FAR
    )
    for name, y in found.items():
        assert (name == "stabilise") != (LOG in names_in(INSIDE[name], FAR)), name
        np.testing.assert_allclose(y, jax.nn.softplus(FAR), 1e-5, err_msg=name)


def test_custom_derivatives_are_kept():
    for function in (with_own_derivative, with_own_gradient):
        stable = graph.stabilise(function)
        assert jax.grad(stable)(300.0) == jax.vjp(stable, 300.0)[1](1.0)[0] == 3


def test_stopped_gradient_stays_stopped():
    stopped = lambda x: jnp.log(lax.stop_gradient(jnp.exp(x)))
    straight_through = lambda x: 1 - (jnp.tanh(x) + lax.stop_gradient(jnp.sign(x) - jnp.tanh(x)))
    for function in (stopped, straight_through):
        assert jax.grad(graph.stabilise(function))(0.5) == jax.grad(function)(0.5)
    assert graph.stabilise(straight_through)(0.5) == straight_through(0.5)


def test_effects_happen_once_and_in_their_order(capfd):
    @jax.jit
    def function(x):
        jax.debug.print("first {}", x, ordered=True)
        y = softplus(x)
        jax.debug.print("second {}", y, ordered=True)
        return lax.fori_loop(
            0, 2, lambda i, y: jax.debug.print("{}", i, ordered=True) or softplus(y), y
        )

    eqx.filter_jit(graph.stabilise(function))(jnp.float32(300))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "300.0", "second", "300.0", "0", "1"]


def test_refs_and_random_numbers_keep_their_bits():
    def function(x, key, other):
        ref = jax.new_ref(jnp.zeros(8))
        ref[...] = jax.random.normal(key, 8)
        before = ref[...]
        ref[...] += softplus(x)
        return before, ref[...] - jax.nn.softplus(x), jnp.sin(x) * before, jax.random.split(other)

    def args():
        return NEAR, jax.random.key(3), jax.random.key(4)

    found, right = (eqx.filter_jit(each)(*args()) for each in (graph.stabilise(function), function))
    np.testing.assert_allclose(found[1], right[1], atol=1e-5)
    assert names_in(function, *args()) == [LOG]
    for mine, theirs in zip(found[::2], right[::2], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert jnp.all(jax.random.key_data(found[3]) == jax.random.key_data(right[3]))


def test_types_stay():
    def function(x, y, i):
        return softplus(x), softplus(2.0 * y), i + 1, jnp.exp(x) - 1, jnp.sqrt(jnp.sum(x**2)), i

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        args = jnp.ones((2, 3), dtype), 1.0, 2
        found, right = (jax.make_jaxpr(f)(*args) for f in (graph.stabilise(function), function))
        assert found.out_avals == right.out_avals
        assert [each.weak_type for each in found.out_avals] == [
            each.weak_type for each in right.out_avals
        ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_no_formula_gets_worse(dtype):
    with jax.enable_x64(dtype == "float64"):
        found = list(stable_maths.errors(FORMULAS, dtype, 30))
    for name, of, before, after, ratio in found:
        assert after <= max(before, 4), f"{name}: {of}, {before} ulp before, {after} after"
        # The same holds at each input. An error below 4 ulp may be luck and may grow to 64 ulp.
        assert ratio < 16, f"{name}: {of}, {ratio} times the error at an input"


class Classifier(eqx.Module):
    layer: nn.Linear
    temperature: float = eqx.field(static=True)
    activation: object = jnp.sin

    def __call__(self, x, *, label):
        return -jnp.log(jax.nn.softmax(self.activation(self.layer(x)) / self.temperature)[label])


def test_models_and_static_arguments_pass_through_and_gradients_are_stable():
    model = Classifier(nn.Linear(8, 3, key=jax.random.key(0)), 1e-3)
    loss = graph.stabilise(lambda model, x, *, label, name: model(x, label=label))
    slopes = eqx.filter_jit(eqx.filter_grad(loss))(model, NEAR, label=1, name="static")
    assert slopes.temperature == 1e-3
    assert jnp.all(jnp.isfinite(slopes.layer.weight))
    assert jnp.any(slopes.layer.weight)
    (found,) = graph.unstable(model, NEAR, label=1)
    assert (found.name, found.layer, found.is_rewritten) == (LOG, "Classifier", True)
    assert "Loses digits" in str(graph.report(model, NEAR, label=1))


def test_maps_over_devices_are_not_rewritten():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(x):
        total = lambda x: lax.psum(softplus(x), "devices") / lax.axis_size("devices")
        return jax.shard_map(total, mesh=mesh, in_specs=P("devices"), out_specs=P())(x)

    def mapped(x):
        return jax.vmap(lambda x: lax.psum(softplus(x), "batch"), axis_name="batch")(x)

    for function in (sharded, jax.pmap(softplus), mapped):
        x = NEAR.reshape(2, 4)
        np.testing.assert_allclose(graph.stabilise(function)(x), function(x), 1e-5)


def test_shardings_that_are_types_stay():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(FAR, jax.NamedSharding(mesh, P("devices")))
        for function in (softplus, jax.checkpoint(softplus), jnp.tanh):
            found, right = (jax.eval_shape(f, x) for f in (graph.stabilise(function), function))
            assert found.sharding == right.sharding


def test_custom_rule_is_applied():
    """The example of `graph.rules.Rule` rewrites a difference of roots."""
    match = lambda step: graph.rules.Rewrite(step.inputs, jnp.cos)
    rule = graph.rules.Rule("a sine", ("sin",), match, "never", "a cosine")
    rules = (*graph.rules.RULES, rule)
    assert names_in(jnp.sin, NEAR) == []
    assert names_in(jnp.sin, NEAR, rules=rules) == [rule.name]
    np.testing.assert_array_equal(graph.stabilise(jnp.sin, rules=rules)(NEAR), jnp.cos(NEAR))


def test_object_that_is_not_callable_is_refused():
    with pytest.raises(
        TypeError, match=r"graph.stabilise expects a function; it got 3, of type int"
    ):
        graph.stabilise(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"graph.unstable expects a function, followed by its arguments"
    ):
        graph.unstable(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"expects `rules` to be a sequence of graph.rules.Rule"):
        graph.stabilise(softplus, rules=softplus)  # pyright: ignore[reportArgumentType]


def test_error_of_tracing_names_the_argument():
    stable = graph.stabilise(lambda model, *, y: 1 if y["b"] > 0 else 2)
    for function in (stable, eqx.filter_jit(stable)):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            function((1.0, NEAR), y={"a": NEAR, "b": jnp.array(1.0)})
        assert (
            "In the arguments of <lambda>, arrays[2] is kwargs['y']['b']." in caught.value.__notes__
        )


def welford(x):
    def step(carry, x):
        count, mean, total = carry
        mean_after = mean + (x - mean) / (count + 1)
        return (count + 1, mean_after, total + (x - mean) * (x - mean_after)), None

    (count, _, total), _ = lax.scan(step, (0.0, 0.0, 0.0), x)
    return total / count


def log1mexp(x):
    is_near = x > -0.693
    near = jnp.log(-jnp.expm1(jnp.where(is_near, x, -1)))
    return jnp.where(is_near, near, jnp.log1p(-jnp.exp(jnp.where(is_near, -1, x))))


def shifted_logsumexp(x):
    large = jnp.max(x)
    return large + jnp.log(jnp.sum(jnp.exp(x - large)))


STABLE = (
    shifted_logsumexp,
    lambda x: x - shifted_logsumexp(x),
    lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))),
    log1mexp,
    lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0),
    lambda x: jnp.where(x == 0, 0, x * jnp.log(jnp.where(x == 0, 1, x))),
    welford,
    lambda x: jnp.mean((x - jnp.mean(x)) ** 2),
    lambda x: jnp.sqrt(x**2 + 1e-6),
    lambda x: 1 / (1 + x**2),
    lambda x: jnp.exp(-(x**2) / 2) / jnp.sqrt(2 * jnp.pi),
    lambda x: x * jnp.log(jnp.arange(1.0, 9)),
    lambda x: jnp.where(x > 0, x, 0.01 * x),
    lambda x: jnp.tanh(x) ** 2 + 1,
    jax.nn.log_softmax,
    jax.nn.softplus,
    jax.nn.gelu,
    jax.nn.logsumexp,
    jax.scipy.special.xlogy,
)


def test_stable_formulas_have_no_report():
    for function in STABLE:
        args = (FAR,) * (2 if function is jax.scipy.special.xlogy else 1)
        assert not graph.unstable(function, *args), inspect.getsource(function)


def cross_entropy(model, batch, key):
    x, labels = batch
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_training_step_has_no_report():
    model = nn.MLP(8, 3, 9, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    state = train.TrainState.create(model, optax.adamw(1e-3), key=jax.random.key(0))
    step = train.make_step(cross_entropy, optax.adamw(1e-3))
    assert not graph.unstable(step, state, (jnp.ones((2, 8)), jnp.array([0, 2])))


def test_only_weight_norm_has_a_report_among_layers():
    def call_of(case):
        return lambda layer, key, *xs: test_laws.call(case, layer, xs, key)

    said = {
        name: names_in(
            call_of(case), test_laws.blank(case), jax.random.key(0), *test_laws.inputs(case)
        )
        for name, case in test_laws.CASES.items()
    }
    # A zero weight has no direction, as in PyTorch.
    assert said.pop("WeightNorm") == ["norm at zero"]
    assert not any(said.values()), said


ERRORS = (TypeError, ValueError, IndexError, AssertionError, NotImplementedError)


def said_by(functions):
    """The rules that match each function, with the first arguments that it accepts."""
    found = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name, function, choices in functions:
            for args in choices:
                try:
                    found[name] = set(names_in(function, *args))
                    break
                except ERRORS:
                    continue
    return len(found), {name: rules for name, rules in found.items() if rules}


def test_only_kl_divergences_of_optax_have_a_report():
    y, label = jnp.full(8, 0.5), jnp.array([1])
    choices = [
        *((FAR, y), (FAR[None], label), (jnp.ones((4, 8)), jnp.array([0, 0, 1, 1])), (FAR,)),
        *((FAR, FAR, y), (FAR[None, :, None], jnp.zeros((1, 8)), label[None], jnp.zeros((1, 1)))),
    ]
    losses = inspect.getmembers(optax.losses, inspect.isfunction)
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
        num_losses, said = said_by((name, loss, choices) for name, loss in losses)
    assert num_losses > 30
    # where(target == 0, 0, target * (log(target) - ...)): a NaN in the gradient at zero.
    assert said.keys() == {f"{kind}kl_divergence" for kind in ("", "convex_", "generalized_")}
    assert set.union(*said.values()) == {"branch that is not taken"}


def densities():
    """Densities of all distributions whose arguments have defaults or constraints."""
    for name, kind in inspect.getmembers(dist, inspect.isclass):
        signature = inspect.signature(kind).parameters
        constraints = getattr(kind, "arg_constraints", {})
        needed = {key for key, each in signature.items() if each.default is each.empty}
        if not constraints or not constraints.keys() >= needed:
            continue
        given = {key for key in constraints if signature[key].default is not None}

        def density(x, kind=kind, given=given, constraints=constraints):
            args = {key: constraints[key].feasible_like(x) for key in given}
            density: dist.Distribution = kind(**args)
            half = jnp.full(density.batch_shape + density.event_shape, x.mean())
            return density.log_prob(density.support.feasible_like(half))

        yield name, density, [(jax.ShapeDtypeStruct(shape, "float32"),) for shape in ((), (3,))]


def test_only_three_densities_of_numpyro_have_a_report():
    num_densities, said = said_by(densities())
    assert num_densities > 50
    assert said == {
        "ProjectedNormal": {"difference from one"},  # 1 + erf(x)
        "VonMises": {"difference from one"},  # cos(x) - 1
        "ZeroInflatedPoisson": {LOG},  # log(gate + exp(log_prob))
    }


@jax.enable_x64(True)
def test_posteriors_have_no_report():
    for name, (likelihood, out_size, y, _) in test_posterior.LIKELIHOODS.items():
        model = test_posterior.network(out_size)
        posterior = test_posterior.posterior(likelihood=likelihood, y=y, model=model)
        start = eqx.filter_eval_shape(posterior.initial, key=jax.random.key(0))
        assert not graph.unstable(posterior.log_density, start), name


def repeated(step, times=40):
    def function(x):
        for _ in range(times):
            x = step(x)
        return jnp.log(1 + jnp.exp(x))

    return function


def softmax(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x))


# Each formula once had a wrong value, a NaN or an error, or took too long.
ATTACKS = (
    lambda x: jnp.log(x * (x - 1) * jnp.exp(x)),  # both may be negative
    lambda x: jnp.log((1 - jnp.exp(x)) ** 2 * (1 - x) * (1 - 2 * x)),
    lambda x: jnp.log(jnp.prod(x) ** 2 * (jnp.exp(x) - jnp.exp(2 * x)) ** 2),
    lambda x: jnp.log(jnp.sum(x * jnp.exp(x)) / jnp.sum(x)) + jnp.log((x @ jnp.exp(x)) ** 2),
    lambda x: jnp.log(jnp.linalg.det(jnp.diag(x)) ** 2 / jnp.linalg.det(jnp.eye(3))),
    lambda x: jnp.log(jnp.max(jax.nn.sigmoid(x))),  # the maximum of a sum
    lambda x: jnp.log(jnp.take(jax.nn.softmax(x), 9, mode="fill", fill_value=0.5)) + x,
    lambda x: jnp.abs(jnp.log(jnp.exp(lax.complex(x, x)))),
    lambda x: jnp.log((x * 1e30) ** 20),  # 1e600 overflows a Python float
    lambda x: jnp.log(x / (0 * jnp.ones(4))) + (0.0 * x) ** 2 + 2 * x * x[0] + x[0] ** 2,
    lambda x: jnp.where(x > 0, softmax(x), 0),  # masked numbers are part of the sum
    lambda x: jnp.where(softmax(x) > 0.2, 1 / softmax(x), 0),
    lambda x: jnp.log(jnp.where(x > 0, 1 - jnp.exp(-x), jax.nn.sigmoid(x))),
    lambda x: jnp.sqrt(x**2 - 2 * x + 1 + 1e-6),
    lambda x: jnp.log(jnp.sum(jnp.exp(x[:, None][:, :0]), axis=1)),
    lambda x: jnp.exp(jnp.where(x > 0, jnp.nan, x) * jnp.log(jnp.abs(x))),
    lambda x: x / jnp.sqrt(jnp.sum((1e-30 * x) ** 2)),  # x is not zero, but its squares underflow
    lambda x: jnp.log(jnp.sum(jnp.where(x > 0, jnp.sqrt(x) * jnp.exp(x), 0))),
    lambda x: jnp.log(1 + jnp.sum(jnp.exp(jnp.where(x > 9, x, -jnp.inf)))) + x,
    lambda x: jnp.log(jnp.sum(jnp.array([1e30, 1, 1, 1e-10]) * jnp.exp(70 * x))),
    lambda x: jnp.sum(x * jnp.exp(jnp.where(x > 0.4, jnp.inf, x))) / jnp.sum(jnp.exp(x)),
    lambda x: jnp.log(jnp.linalg.det(jnp.diag(x[2:] * jnp.array([1e18, 1e-18])))) + x,
    lambda x: jnp.sqrt(x) ** 2 * jnp.exp(x) / (jnp.exp(x) + jnp.exp(2 * x)),
    lambda x: jnp.log((1 - jnp.exp(x[2] - x[2])) * (1 - x) / (1 - jnp.exp(x))),
    jax.grad(lambda x: jnp.sum(jnp.log(jax.scipy.stats.norm.cdf(x - 0.1)))),
    repeated(lambda x: x + x),  # 2⁴⁰ terms or factors
    repeated(lambda x: x * x),
    repeated(lambda x: x * jnp.sqrt(x)),
)


def test_difficult_formulas_keep_their_values():
    def run(x, functions):
        return [(f(x), jax.grad(lambda x, f=f: jnp.sum(f(x)))(x)) for f in functions]

    x = jnp.array([-1.0, -0.3, 0.1, 0.5])
    found, right = (
        jax.jit(functools.partial(run, functions=each))(x)
        for each in (list(map(graph.stabilise, ATTACKS)), ATTACKS)
    )
    for function, ours, theirs in zip(ATTACKS, found, right, strict=True):
        text = inspect.getsource(function)
        is_known = np.isfinite(theirs[0]) | np.isnan(theirs[0])
        np.testing.assert_allclose(
            np.where(is_known, ours[0], 0), np.where(is_known, theirs[0], 0), 1e-5, err_msg=text
        )
        is_known = np.isfinite(theirs[1])
        np.testing.assert_allclose(ours[1][is_known], theirs[1][is_known], 1e-4, err_msg=text)


def test_quotient_of_equal_terms_is_one_if_they_are_finite():
    quotient = jax.vmap(jax.value_and_grad(graph.stabilise(lambda x: x / x)))
    values, slopes = quotient(jnp.array([0.0, -3.0, jnp.inf, jnp.nan]))
    np.testing.assert_array_equal(values, [1, 1, np.nan, np.nan])
    assert not np.any(slopes)


REPAIRED = (
    # Functions of 100: a one-hot loss, masks, a guarded sum, Python numbers, sums in float32.
    (lambda x: -jnp.log(jnp.sum(jax.nn.softmax(x) * jax.nn.one_hot(2, 3))), 200.0),
    (lambda x: jnp.log(jnp.sum(jnp.exp(x), where=x > 0)), 100.0),
    (lambda x: jnp.log(1e-9 + jnp.sum(jnp.exp(x) * (x > 0).astype(x.dtype))), 100.0),
    (lambda x: jnp.sum(jnp.exp(x) / (jnp.sum(jnp.exp(x)) + 1e-9)), 1.0),
    (lambda x: jnp.log(jnp.exp(x[0]) / jnp.linalg.det(1e-20 * jnp.eye(2))), 192.10340),
    (lambda x: jnp.log(jnp.sqrt(jnp.linalg.det(1e-30 * jnp.eye(2)))) + 0 * x[0], -69.07755),
    (lambda x: -jnp.log(jnp.prod(jax.nn.sigmoid(-x[:1]))), 100.0),
    (lambda x: jnp.log(jnp.cumsum(jnp.exp(x)))[0], 100.0),
    (lambda x: jnp.log(jax.nn.sigmoid(x[0] + 1) - jax.nn.sigmoid(x[0])), -100.45868),
    (lambda x: -jnp.log((1 - jnp.tanh(x[0])) * (1 + jnp.tanh(x[0]))), 198.61371),
    (lambda x: jnp.log(jnp.einsum("bk,bk->b", jnp.exp(x[None]), jnp.ones((1, 3))))[0], 100.0),
    (lambda x: jnp.log(jnp.sum(jnp.exp(x.astype(jnp.bfloat16)))).astype(jnp.float32), 100.0),
    (lambda x: 1e9 * (jnp.sqrt(1 + (1e-6 * x[0]) ** 2) - 1), 5.0),
    (lambda x: 1e7 * jnp.log(jax.scipy.stats.norm.cdf(x[0] / 20)), -2.866516),
    (lambda x: jnp.log(1 + jnp.exp(100.0)) + 0 * x[0], 100.0),
    (lambda x: 1e30 / jnp.cosh(x[0] - 11.5), 7.344593e-9),
    (lambda x: 1e30 / (1 + jnp.exp(x[0] - 11.5)), 3.6722964e-9),
)


def test_formulas_that_lost_digits_are_repaired():
    def run(x):
        return [jax.value_and_grad(graph.stabilise(function))(x) for function, _ in REPAIRED]

    found = jax.jit(run)(jnp.array([100.0, -50.0, -100.0]))
    for (value, slope), (function, right) in zip(found, REPAIRED, strict=True):
        np.testing.assert_allclose(value, right, 1e-5, err_msg=inspect.getsource(function))
        assert np.all(np.isfinite(slope)), inspect.getsource(function)


@pytest.mark.parametrize(
    "match",
    [lambda step: True, lambda step: graph.rules.Rewrite(step.inputs, lambda x: jnp.ones(5))],
)
def test_error_of_a_custom_rule_names_the_rule(match):
    rule = graph.rules.Rule("of a sine", ("sin",), match, "never", "nothing")
    with pytest.raises((TypeError, ValueError)) as caught:
        graph.stabilise(jnp.sin, rules=(rule,))(NEAR)
    assert "From the rule 'of a sine', for sin" in caught.value.__notes__[0]
