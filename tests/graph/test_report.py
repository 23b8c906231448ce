"""The contents of a report on a program."""

import functools
import importlib.util
import inspect
import io
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import eqxlike as eqx
from eqxlike import graph, nn, train
from tests.graph.dense import X, loss, mlp


@functools.cache
def report_on_loss():
    return graph.report(loss, mlp(), X)


def paths(report):
    return [row.name for row in report.layers]


def test_rows_of_layers_include_inner_layers_and_kinds_add_up_to_the_total():
    found = report_on_loss()
    assert paths(found) == ["", "model", "model.layers[0]", "model.layers[1]"]
    whole, model, first, second = found.layers
    assert whole.operations == len(found.operations)
    assert model.flops == first.flops + second.flops + 5 * 4  # 5 * 4 for the activation
    assert first.flops == 2 * 5 * 3 * 4 + 5 * 4
    assert sum(row.flops for row in found.kinds) == found.flops
    assert sum(row.operations for row in found.kinds) == len(found.operations)
    model = mlp()
    before = jax.jit(lambda x: loss(model, x)).lower(X).cost_analysis()["flops"]
    assert found.flops == before


def test_time_of_a_trace_includes_the_function():
    def slow(x):
        time.sleep(0.02)
        return x

    assert graph.report(slow, X).trace_s >= 0.02


def test_compiled_operations_are_counted_before_and_after_optimisation_and_by_layer():
    found = report_on_loss()
    compiled = found.compiled
    assert compiled.before["dot"] == compiled.after["dot"] == 2
    assert compiled.stablehlo["dot_general"] == 2
    assert ("dot", 2, 2) in compiled.changes
    assert compiled.fused <= sum(compiled.after.values())
    whole, model, first, _ = found.layers
    assert whole.compiled == sum(compiled.after.values())
    assert 0 < first.compiled <= model.compiled <= whole.compiled
    assert len(found.jaxpr.jaxpr.invars) == 5
    assert found.stablehlo.startswith("module @jit_loss")
    assert found.hlo.startswith("HloModule jit_loss")


def test_text_tables_and_json_have_the_numbers():
    text = str(report_on_loss())
    assert text.startswith("loss: 10 operations traced, 270 FLOPs, 0 transcendentals; ")
    assert "model.layers[1]           3     3     90" in text
    assert "Arguments donated: none" in text
    console = rich.console.Console(width=200, file=io.StringIO())
    console.print(report_on_loss())
    shown = console.file.getvalue()
    assert "model.layers[1]" in shown
    assert "By layer" in shown
    found = json.loads(report_on_loss().to_json())
    assert found["layers"][2]["name"] == "model.layers[0]"
    assert found["layers"][2]["flops"] == 140
    assert found["compiled"]["after"]["dot"] == 2
    assert found["redundant"] == {"unused": 0, "common": 0, "constant": 0}


def test_callables_of_any_form_have_their_layers():
    for function, args, name in [
        (mlp(), (X[0],), "MLP.layers[0]"),
        (eqx.filter_jit(mlp()), (X[0],), "MLP.layers[0]"),
        (eqx.filter_vmap(mlp()), (X,), "MLP.layers[0]"),
        (eqx.filter_jit(loss), (mlp(), X), "model.layers[0]"),
        (functools.partial(loss, mlp()), (X,), "MLP.layers[0]"),
        (eqx.filter_checkpoint(loss), (mlp(), X), "model.layers[0]"),
        (lambda models, x: loss(models["a"], x), ({"a": mlp()}, X), "models['a'].layers[0]"),
    ]:
        assert name in paths(graph.report(function, *args))


def test_scopes_of_the_user_count_as_layers():
    def function(model, x):
        with jax.named_scope("encode"):
            return model(x)

    assert paths(graph.report(function, nn.Linear(3, 2, key=jax.random.key(0)), X[0])) == [
        "",
        "encode",
        "encode/model",
    ]
    found = graph.report(lambda x: jnp.einsum("ij,kj->ik", x, x), X)
    assert paths(found) == [""]
    # JAX's compilation cache does not distinguish programs that only differ in names.
    for name in ("one", "two"):
        row = graph.report(eval(f"lambda {name}, x: {name}(x)"), mlp(), X[0]).layers[1]
        assert (row.name, row.compiled > 0) == (name, True)


def test_layers_under_any_key_have_rows_with_compiled_operations():
    keys = ["a", 'it\'s "b"', "en->de", "é"]

    def function(models, x):
        for key in keys:
            x = models[key](x)
        return x

    models = {key: nn.Linear(3, 3, key=jax.random.key(0)) for key in keys}
    _, *rows = graph.report(function, models, X[0]).layers
    assert [row.name for row in rows] == [f"models[{key!r}]" for key in keys]
    assert all(row.compiled for row in rows)


def test_layers_of_a_scan_run_once_in_each_iteration():
    stack = nn.ScanStack(lambda key: nn.Linear(3, 3, key=key), depth=4, key=jax.random.key(0))
    row = next(row for row in graph.report(stack, X[0]).layers if row.name == "ScanStack.layers")
    assert (row.operations, row.runs, row.flops) == (2, 8, 4 * (18 + 3))


def test_training_step_has_layers_and_donates_its_buffers():
    optimiser = optax.sgd(0.1)
    state = train.TrainState.create(mlp(), optimiser, key=jax.random.key(1))
    step = train.make_step(lambda model, x, key: loss(model, x), optimiser)
    found = graph.report(step, state, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert "state.model.layers[0]" in paths(found)
    assert "state.model.layers[0].weight" in found.donated
    assert (0, "state.model.layers[0].weight") in found.aliased
    assert not state.model.layers[0].weight.is_deleted()


def test_function_of_jax_jit_keeps_its_options():
    def scale(x, y):
        return 2 * x

    found = graph.report(jax.jit(scale, donate_argnums=0), X, y=X)
    assert (found.donated, found.aliased) == (("x",), ((0, "x"),))


def test_arguments_of_a_jitted_function_have_the_paths_of_a_call():
    def function(first, *rest, scale):
        return first.sum(), {key: scale * each for key, each in rest[0].items()}

    jitted = jax.jit(function, donate_argnums=1)
    found = graph.report(jitted, X, {"a": X}, scale=X)
    assert (found.donated, found.aliased) == (("rest[0]['a']",), ((1, "rest[0]['a']"),))


def test_report_does_not_count_as_a_trace():
    function = eqx.filter_jit(loss, on_retrace="error")
    function(mlp(), X)
    graph.report(function, mlp(), X[:2])
    assert len(function.traces) == 1


def test_structs_may_replace_arrays_and_keywords_are_passed_to_the_function():
    model = eqx.filter_eval_shape(nn.Linear, 3, 2, key=jax.random.key(0))
    assert graph.report(model, jax.ShapeDtypeStruct((3,), jnp.float32)).flops == 2 * 6 + 2
    assert graph.report(lambda x, *, factor: x * factor, X, factor=X).flops == X.size


def test_redundant_operations_are_counted():
    def function(x):
        jnp.cos(x)  # unused
        constant = jax.lax.exp(np.float32(1.0))
        return jax.lax.sin(x) + jax.lax.sin(x) * constant

    assert graph.report(function, X).redundant == (1, 1, 1)


def passed_on_by_a_branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x, y: y, lambda x, y: jnp.exp(x), x, jnp.sin(x))


def passed_on_by_no_turn(x):
    def body(carry):
        return carry[0] + 1, jnp.exp(x)

    return jax.lax.while_loop(lambda carry: carry[0] < x[0, 0], body, (0, jnp.sin(x)))


def chosen_constant(x):
    return jnp.sin(jax.lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0))


def after_a_loop(x):
    def body(carry, each):
        following = jnp.sin(carry) * each
        return following, jnp.cos(following)

    last, rows = jax.lax.scan(body, x[0], x)
    return jnp.cos(last)[None] + rows


def test_operations_that_depend_on_data_are_not_redundant():
    for function in (
        passed_on_by_a_branch,
        passed_on_by_no_turn,
        chosen_constant,
        after_a_loop,
    ):
        found = graph.report(function, X)
        assert found.redundant == (0, 0, 0)
        branches = [row.transcendentals for row in found.kinds if row.name == "sin"]
        assert all(branches)


def test_memory_includes_arguments_and_outputs():
    memory = graph.report(lambda x: 2 * x, X).memory
    assert (memory.arguments, memory.outputs, memory.aliased) == (60, 60, 0)
    assert memory.peak == 120 + memory.temporaries


def test_large_constant_is_a_warning_that_names_its_line():
    large = jnp.ones((512, 512))

    def function(x):
        return large @ x

    found = graph.report(function, jax.ShapeDtypeStruct((512,), jnp.float32))
    line = inspect.getsourcelines(function)[1] + 1
    assert [each.num_bytes for each in found.constants] == [2**20]
    assert found.constants[0].type == "f32[512,512]"
    assert f"test_report.py:{line}" in found.constants[0].source
    assert "Warning: A constant of 1,048,576 bytes, f32[512,512], is baked in" in str(found)


def test_constant_that_a_loop_reads_has_the_line_of_the_loop():
    rows = jnp.ones((512, 512))

    def function(x):
        return jax.lax.scan(lambda carry, row: (carry + row @ x, None), 0.0, rows)[0]

    (warning,) = graph.report(function, jax.ShapeDtypeStruct((512,), jnp.float32)).warnings
    assert re.search(r"It is read at \S*test_report\.py:\d+", warning)


def test_small_and_returned_constants_are_not_reported():
    large = jnp.ones((512, 512))
    (warning,) = graph.report(lambda x: (x, large), X).warnings
    assert warning.endswith("pass it as an argument.")
    small = np.ones((5, 3), np.float32)
    found = graph.report(lambda x: x + small, X)
    assert ([each.num_bytes for each in found.constants], found.warnings) == ([60], ())


def test_callbacks_are_named_with_layer_and_line():
    class Printing(eqx.Module):
        def __call__(self, x):
            jax.debug.print("{x}", x=x)
            return x

    found = graph.report(lambda layer, x: layer(x), Printing(), X)
    (effect,) = found.effects
    assert effect.layer == "layer"
    assert "test_report.py" in effect.source


def call_back(x):
    return eqx.filter_pure_callback(np.sin, x, result_shape_dtypes=x)


def check(x):
    return eqx.error_if(x, jnp.any(x < 0), "negative")


def test_callback_of_eqxlike_is_named_with_the_line_of_the_user():
    for function in (call_back, check):
        line = inspect.getsourcelines(function)[1] + 1
        sources = [effect.source for effect in graph.report(function, X).effects]
        assert sources
        assert all(f"test_report.py:{line} ({function.__name__})" in each for each in sources)


def test_collectives_are_read_from_the_compiled_program():
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones((4, 3)), sharding)
    assert [each.kind for each in graph.report(jnp.sum, x).collectives] == ["all-reduce"]


def test_unknown_cost_has_a_mark():
    text = str(
        graph.report(
            lambda x: jax.lax.while_loop(lambda x: x < 9.0, lambda x: x + x, x), 1.0 * X[0, 0]
        )
    )
    kinds = [row.name for row in graph.report(lambda x: (jax.lax.tanh(x[0, 0]), x.T), X).kinds]
    # Operations that compute come before operations that move data.
    assert kinds[0] == "tanh"
    assert "2+ FLOPs" in text
    assert "+ means at least" in text


def test_function_that_cannot_be_traced_is_refused_in_one_line():
    def broken(x):
        return x @ jnp.ones(7)

    for args, kwargs, error, message in [
        ((broken, X), {}, ValueError, r"^graph.report could not trace broken: TypeError: dot"),
        ((lambda x, y: x,), {"y": "1"}, ValueError, r"argument: 'x'\.$"),
        ((loss, mlp()), {}, ValueError, r"could not trace loss: TypeError: .*missing .* 'x'"),
        ((3, X), {}, TypeError, r"expects a function, followed by its arguments; it got 3, of"),
    ]:
        with pytest.raises(error, match=message) as caught:
            graph.report(*args, **kwargs)
        assert "\n" not in str(caught.value)


if importlib.util.find_spec("enzyme_ad"):

    def test_enzyme_removes_operations():
        found = graph.report(lambda x: jnp.sum((x + 0.0) * 1.0), X)
        kinds, seconds = found.by_enzyme()
        assert sum(kinds.values()) < sum(found.compiled.stablehlo.values())
        assert seconds > 0

else:

    def test_enzyme_says_how_to_install_it():
        with pytest.raises(ImportError, match=r"pip install 'eqxlike\[enzyme\]'"):
            report_on_loss().by_enzyme()


def test_costs_that_xla_does_not_report_are_missing_and_other_errors_are_raised(monkeypatch):
    def fail(self):
        raise ValueError("a fault")

    for method in ("cost_analysis", "memory_analysis"):
        with monkeypatch.context() as patch:
            patch.setattr(jax.stages.Compiled, method, lambda self: None)
            found = graph.report(jnp.sin, jnp.ones(3))
            assert (found.xla_flops if method == "cost_analysis" else found.memory) is None
            patch.setattr(jax.stages.Compiled, method, fail)
            with pytest.raises(ValueError, match="a fault"):
                graph.report(jnp.sin, jnp.ones(3))
