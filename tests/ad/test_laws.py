"""Laws of every mode: its derivatives equal JAX's derivatives in float64."""

import copy
import functools
import importlib.util
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import ad, loops, nn
from tests.ad.modes import MODES, tolerance
from tests.nn.arrays import filled

W = np.linspace(-0.9, 1.1, 6).reshape(2, 3)
X = np.array([0.4, -1.2, 0.7])


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


BATCHED = [
    "Checkpointed",
    "Forward, chunks that do not fit",
    "FiniteDifference, order 2",
]


@pytest.fixture(params=[name for name in MODES if name in (BATCHED[0], BATCHED[-1], "Enzyme")])
def compiled_mode(request):
    return MODES[request.param]


@pytest.fixture(params=BATCHED)
def batched_mode(request):
    """A mode other than Enzyme, which supports neither batches nor second derivatives."""
    return MODES[request.param]


def parameters():
    return {
        "w": jnp.asarray(W),
        "b": jnp.asarray(np.array([0.3, -0.2])),
        "power": 2,
        "name": "tanh",
    }


def layer(p, x):
    return jnp.tanh(p["w"] @ x + p["b"]) ** p["power"]


def loss(p, x):
    return jnp.sum(layer(p, x) * jnp.array([1.0, -2.0]))


def assert_close(found, expected, mode, order=1):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=scale * tolerance(mode, order))


# Derivatives by JAX are computed once for all modes.
@functools.cache
def of_jax(transform, function, *args):
    with jax.enable_x64(True):
        return eqx.filter_jit(transform(function))(*[each() for each in args])


def x():
    return jnp.asarray(X)


def test_registry_has_every_mode():
    public = {each for each in vars(ad).values() if isinstance(each, type)}
    modes = {each for each in public if issubclass(each, ad.Mode)} - {ad.Mode}
    missing = modes - {type(each) for each in MODES.values()}
    is_there = importlib.util.find_spec("enzyme_ad") is not None
    assert missing == (set() if is_there else {ad.Enzyme})


def of_part(scale, mode):
    """Closes over `scale`, which is differentiated too."""
    part = ad.differentiate_with(lambda x: jnp.sin(scale * x), mode)
    return jnp.sum(part(jnp.asarray(X)))


def test_value_gradient_and_jacobian_equal_jax(mode):
    @eqx.filter_jit
    def found(p, x):
        with_value = eqx.filter_value_and_grad(loss, mode=mode)(p, x)
        return with_value, ad.jacobian(layer, mode)(p, x), eqx.filter_grad(of_part)(x, mode)

    (value, gradient), jacobian, through_part = found(parameters(), x())
    expected, expected_gradient = of_jax(eqx.filter_value_and_grad, loss, parameters, x)
    np.testing.assert_allclose(value, expected, rtol=1e-14)
    assert value.dtype == expected.dtype
    assert_close(gradient, expected_gradient, mode)
    assert_close(jacobian, of_jax(eqx.filter_jacfwd, layer, parameters, x), mode)
    assert_close(through_part, X * np.cos(X * X), mode)


def of_jitted_part(p, x):
    part = eqx.filter_jit(layer)
    return jnp.sum(part(p, x) * part(p, 2 * x))


@functools.cache
def tree():
    linear = filled(nn.Linear, 3, 4, key=jax.random.key(0))
    model = nn.Sequential([linear, nn.Lambda(jnp.tanh)])
    return nn.freeze(model, lambda model: model[0].bias), jnp.arange(3), "text"


def of_tree(tree, x):
    return jnp.sum(tree[0](x) * tree[1].sum().astype(x.dtype))


def of_complex(z):
    return jnp.sum(jnp.real(z**3 * jnp.array([1.0 + 0j, 2.0j])) + jnp.abs(z) ** 2)


def z():
    return jnp.array([0.5 + 1.0j, -0.3 + 0.2j])


def of_scan(x, reverse=False):
    def step(carry, y):
        return jnp.sin(carry) * y + x, carry * y / 9

    carry, ys = jax.lax.scan(step, x, jnp.arange(7.0) / 7, reverse=reverse)
    return jnp.sum(carry) + jnp.sum(ys**2)


def of_scan_backwards(x):
    return of_scan(x, reverse=True)


def of_branches_and_custom_rules(x):
    y = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    return jnp.sum(jax.nn.relu(y) * jax.nn.softplus(x)) + jax.scipy.special.logsumexp(x)


def of_loop(x):
    return jnp.sum(
        loops.while_loop(
            lambda carry: jnp.sum(carry**2) < 2,
            lambda carry: jnp.sin(carry) * 2,
            x,
            max_steps=9,
            kind="checkpointed",
        )
    )


def pair():
    return jnp.array([0.1, 0.2])


def gradient_of_loop():
    x, slope = np.array([0.1, 0.2]), np.ones(2)
    while np.sum(x**2) < 2:
        x, slope = 2 * np.sin(x), slope * 2 * np.cos(x)
    return slope


FUNCTIONS = {loss: (parameters, x), of_tree: (tree, x), of_complex: (z,)}
# Not tested with finite differences, which only call the function.
FUNCTIONS_WITH_PARTS = {
    of_jitted_part: (parameters, x),
    of_scan: (x,),
    of_scan_backwards: (x,),
    of_branches_and_custom_rules: (x,),
    of_loop: (pair,),
}


@functools.cache
def gradients_of_jax():
    """The gradients of all functions. One program computes all except `of_loop`."""
    functions = {**FUNCTIONS, **FUNCTIONS_WITH_PARTS}
    del functions[of_loop]

    @eqx.filter_jit
    def gradients(args):
        return [eqx.filter_grad(each)(*own) for each, own in zip(functions, args, strict=True)]

    with jax.enable_x64(True):
        found = gradients([[make() for make in makers] for makers in functions.values()])
    return dict(zip(functions, found, strict=True)) | {of_loop: gradient_of_loop()}


def test_compiled_gradients_of_parts_loops_branches_and_modules_equal_jax(compiled_mode):
    mode = compiled_mode
    cases = dict(FUNCTIONS)
    if not isinstance(mode, ad.FiniteDifference):
        cases |= FUNCTIONS_WITH_PARTS
    if isinstance(mode, ad.Enzyme):
        # It has no rule for these.
        del cases[of_complex], cases[of_loop]
        with pytest.raises(ValueError, match="complex"):
            eqx.filter_grad(lambda z: jnp.abs(z), mode=mode)(jnp.array(1.0 + 2.0j))

    @eqx.filter_jit
    def gradients(args):
        # What the function closes over is traced.
        scale = jnp.sum(args[0][1]) / jnp.sum(X)
        closure = eqx.filter_grad(lambda x: jnp.sum(scale * x**2), mode=mode)(args[0][1])
        found = [
            eqx.filter_grad(each, mode=mode)(*own) for each, own in zip(cases, args, strict=True)
        ]
        return found, closure

    args = [[each() for each in makers] for makers in cases.values()]
    found, closure = gradients(args)
    assert_close(closure, jnp.asarray(2 * X), mode)
    for function, gradient in zip(cases, found, strict=True):
        assert_close(gradient, gradients_of_jax()[function], mode)
        if function is of_tree:
            assert (gradient[1], gradient[2]) == (None, None)


def test_aux_is_unchanged_and_gradient_without_arrays_is_empty(compiled_mode):
    mode = compiled_mode

    def with_aux(p, x):
        return loss(p, x), {"x": x * 2, "label": p["name"], "count": jnp.arange(2)}

    transformed = eqx.filter_value_and_grad(with_aux, has_aux=True, mode=mode)
    (_, aux), _ = eqx.filter_jit(transformed)(parameters(), X)
    np.testing.assert_array_equal(aux["x"], 2 * X)
    np.testing.assert_array_equal(aux["count"], [0, 1])
    assert aux["label"] == "tanh"
    value, gradient = eqx.filter_value_and_grad(lambda p: p["n"] * 2.0, mode=mode)({"n": 3})
    assert (float(value), gradient) == (6.0, {"n": None})


def test_holomorphic_functions_empty_arrays_and_half_precision(batched_mode):
    grad = functools.partial(eqx.filter_grad, mode=batched_mode)

    @eqx.filter_jit
    def gradients(z, tree, x):
        of_tree = grad(lambda t: t["none"].sum() + t["x"] ** 2)(tree)
        return grad(jnp.sin, holomorphic=True)(z), of_tree, grad(lambda x: jnp.sum(x * x))(x)

    z = np.array(0.5 + 1.0j)
    tree = {"none": np.zeros((0, 3)), "x": np.array(2.0)}
    found, of_tree, gradient = gradients(z, tree, np.ones(3, jnp.bfloat16))
    assert_close(found, np.cos(z), batched_mode)
    assert of_tree["none"].shape == (0, 3)
    np.testing.assert_allclose(of_tree["x"], 4.0, rtol=1e-6)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(float), 2.0, rtol=0.2)


def test_given_step_works_for_complex_numbers():
    z, mode = np.array(0.5 + 1.0j), MODES["FiniteDifference, step"]
    gradient = eqx.filter_jit(eqx.filter_grad(jnp.sin, mode=mode, holomorphic=True))
    assert_close(gradient(z), np.cos(z), mode)


def xs():
    return jnp.asarray(np.stack([X, 2 * X]))


def of_each(function, mode=None):
    return eqx.filter_vmap(eqx.filter_grad(function, mode=mode), in_axes=(None, 0))


def descended(mode, x):
    gradient = eqx.filter_grad(lambda x: jnp.sum(jnp.cos(x)), mode=mode)
    return jax.lax.scan(lambda x, _: (x - 0.1 * gradient(x), None), x, length=3)[0]


def test_gradients_in_a_batch_a_scan_and_a_derivative_equal_jax(batched_mode):
    inner = lambda x: jnp.sum(eqx.filter_grad(lambda x: jnp.sum(x**4), mode=batched_mode)(x))

    @eqx.filter_jit
    def all_of_them(p, xs, x):
        mapped = of_each(loss, batched_mode)(p, xs)
        return mapped, descended(batched_mode, x), eqx.filter_grad(inner)(x)

    mapped, scanned, second = all_of_them(parameters(), xs(), x())
    assert_close(mapped, of_jax(of_each, loss, parameters, xs), batched_mode)
    assert_close(scanned, descended(ad.Reverse(), x()), batched_mode)
    assert_close(second, jnp.asarray(12 * X**2), batched_mode, order=2)


# --- Jacobians and Hessians ---------------------------------------------------------------------


def test_jacobian_of_a_tree_with_aux(batched_mode):
    def function(p, x):
        return {
            "y": layer(p, x),
            "z": jax.lax.complex(jnp.sum(p["b"]), 2 * jnp.sum(p["b"])),
            "text": "a",
        }, p["name"]

    jacobian = eqx.filter_jit(ad.jacobian(function, batched_mode, has_aux=True))
    found, aux = jacobian(parameters(), jnp.asarray(X))
    assert aux == "tanh"
    assert found["text"] is None
    np.testing.assert_allclose(found["z"]["b"], np.full(2, 1 + 2j), rtol=1e-6)
    expected = of_jax(eqx.filter_jacfwd, layer, parameters, x)
    assert_close(found["y"], expected, batched_mode)


@pytest.mark.parametrize("mode", [ad.Reverse(), ad.Forward(), ad.Auto()])
def test_jacobian_of_a_constant_is_zero_and_without_arrays_is_empty(mode):
    functions = (lambda x: {"constant": jnp.array(3.0), "text": "a"}), (lambda x: {"text": "a"})
    found, of_nothing = eqx.filter_jit(lambda x: [ad.jacobian(f, mode)(x) for f in functions])(X)
    np.testing.assert_array_equal(found["constant"], np.zeros(3))
    assert of_nothing == {"text": None}


def of_parameters(p):
    return loss(p, jnp.asarray(X))


@pytest.mark.parametrize("name", BATCHED[1:])
def test_hessian_equals_jax(name):
    batched_mode = MODES[name]

    @eqx.filter_jit
    def both(p):
        pairs = (batched_mode, ad.Reverse()), (ad.Reverse(), batched_mode)
        return [ad.hessian(of_parameters, pair)(p) for pair in pairs]

    expected = of_jax(eqx.filter_hessian, of_parameters, parameters)
    for found in both(parameters()):
        assert_close(found, expected, batched_mode, order=2)


# --- parts with a mode of their own -------------------------------------------------------------


class Scaled(eqx.Module):
    scale: jax.Array
    label: str = eqx.field(static=True, default="scaled")

    def __call__(self, x):
        return jnp.tanh(self.scale * x), jnp.arange(2), self.label


def scaled():
    return Scaled(jnp.asarray(X))


def objective_with(part, x):
    y, whole, label = part(jnp.sin(x))
    assert label == "scaled"
    return jnp.sum(y**2) * whole.sum().astype(y.dtype)


CALLERS = {
    "reverse": eqx.filter_grad,
    "forward": lambda f: eqx.filter_grad(f, mode=ad.Forward()),
}


def test_part_with_a_mode_has_the_same_gradient_for_every_caller(compiled_mode):
    mode, callers = compiled_mode, dict(CALLERS)
    if isinstance(mode, ad.Enzyme):
        del callers["forward"]  # Forward mode maps over directions, which Enzyme does not support.
    part = ad.differentiate_with(scaled(), mode)

    @eqx.filter_jit
    def gradients(part, x):
        return [transform(objective_with)(part, x) for transform in callers.values()]

    expected = of_jax(eqx.filter_grad, objective_with, scaled, x)
    for found in gradients(part, x()):
        assert_close(found.__wrapped__, expected, mode)


def of_batches(part):
    step = lambda carry, x: (carry + eqx.filter_vmap(part)(x)[0], None)
    carry, _ = jax.lax.scan(step, jnp.zeros((2, 3)), jnp.arange(12.0).reshape(2, 2, 3) / 10)
    return jnp.sum(carry**2)


def of_tanh(x):
    return jnp.sum(jnp.tanh(jnp.asarray(X) * x) ** 2)


@pytest.mark.parametrize("name", ["Checkpointed", "FiniteDifference, order 2"])
def test_part_with_a_mode_in_a_batch_a_scan_and_a_hessian(name):
    batched_mode = MODES[name]

    @eqx.filter_jit
    def both(part, scale):
        tanh = ad.differentiate_with(lambda x: jnp.tanh(scale * x), batched_mode)
        hessian = jax.hessian(lambda x: jnp.sum(tanh(x) ** 2))(scale)
        return eqx.filter_grad(of_batches)(part), hessian

    found, hessian = both(ad.differentiate_with(scaled(), batched_mode), x())
    assert_close(found.__wrapped__, of_jax(eqx.filter_grad, of_batches, scaled), batched_mode)
    assert_close(hessian, of_jax(jax.hessian, of_tanh, x), batched_mode, order=2)


def test_part_that_returns_no_real_numbers_has_no_derivative(compiled_mode):
    is_positive = ad.differentiate_with(lambda x: x > 0, compiled_mode)
    found = eqx.filter_grad(lambda x: jnp.sum(x * is_positive(x).astype(x.dtype)))(jnp.asarray(X))
    np.testing.assert_array_equal(found, [1.0, 0.0, 1.0])


# --- modes as values ----------------------------------------------------------------------------


def test_modes_are_static_hashable_and_copied():
    for mode in MODES.values():
        assert jax.tree.leaves(mode) == []
        assert hash(mode) == hash(copy.deepcopy(mode))
        if getattr(mode, "policy", None) is None:  # a policy cannot be pickled
            assert pickle.loads(pickle.dumps(mode)) == mode
