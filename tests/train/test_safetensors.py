"""Models in safetensors files: other tools read our files, and we read their files."""

import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_safetensors_reads_an_export_and_the_import_is_its_inverse(path, getkey):
    frozen = lambda model: nn.freeze(model, lambda model: model.layers[0])
    model = frozen(nn.MLP(2, 3, 4, 1, key=getkey()))
    train.export_safetensors(model, path, metadata={"author": "ä"})
    found = load_file(path)
    expected = ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
    assert sorted(found) == expected
    np.testing.assert_array_equal(found["layers.1.weight"], model.layers[1].weight)
    with safe_open(path, framework="np") as file:
        # The metadata that other tools require.
        assert file.metadata() == {"format": "pt", "author": "ä"}
    like = eqx.filter_eval_shape(lambda key: frozen(nn.MLP(2, 3, 4, 1, key=key)), jr.key(0))
    assert eqx.tree_equal(train.import_safetensors(like, path), model)
    # Leaves that are not arrays are not exported, and unchanged by the import.
    train.export_safetensors({"w": zeros(1), "rate": 0.1, "f": jnp.sin, "none": None}, path)
    assert list(load_file(path)) == ["w"]
    like = {"w": zeros(1), "rate": 0.2, "f": jnp.cos, "none": None}
    found = train.import_safetensors(like, path)
    assert (found["rate"], found["f"]) == (0.2, jnp.cos)


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "bfloat16", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


def test_every_dtype_and_order_of_bytes_or_axes_is_restored(path):
    names = [getattr(ml_dtypes, name, name) for name in DTYPES]
    for shape in [(2, 3), (), (0, 3)]:
        model = {str(np.dtype(name)): np.ones(shape, name) * np.ones((), name) for name in names}
        train.export_safetensors(model, path)
        # The data are aligned for all dtypes.
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path)
        assert sorted(model) == sorted(DTYPES)
        for name, array in model.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, shape)
            assert found[name].tobytes() == array.tobytes()
    model = {"big": np.arange(3, dtype=">f4"), "fortran": np.asfortranarray(np.eye(2, 3))}
    train.export_safetensors(model, path)
    assert load_file(path)["big"].tolist() == [0, 1, 2]
    found = train.import_safetensors(jax.tree.map(np.zeros_like, model), path)
    assert found["big"].dtype == ">f4"
    assert found["big"].tolist() == [0, 1, 2]
    assert found["fortran"].tolist() == np.eye(2, 3).tolist()


def refusal(*arguments, error=ValueError, **options):
    with pytest.raises(error) as caught:
        train.import_safetensors(*arguments, **options)
    return str(caught.value)


def test_all_mismatches_are_named_at_once(path):
    save_file({"a": zeros(2), "b": zeros(2), "d": zeros(1), "x": zeros(1), "y": zeros(1)}, path)
    like = {"a": zeros(3), "b": zeros(2, dtype=np.int32), "c": zeros(1), "d": zeros(1)}
    assert refusal(like, path) == (
        f"{path} does not fit `model_like`: a (a in model.safetensors) is float32 of shape (2,), "
        "but float32 of shape (3,) is expected; b (b in model.safetensors) is float32 of shape "
        "(2,), but int32 of shape (2,) is expected; c is missing; x is in the file, but not in the "
        "model; y is in the file, but not in the model. Make a model of these sizes, or describe "
        "the layout with `train.Stored`. Convert arrays with `train.Stored(name, load=function)`. "
        "If the file uses other names, pass a table of `names`."
    )
    assert refusal({"ours": zeros(2)}, path, {"ours": "other"}).endswith(
        "x is in the file, but not in the model; y is in the file, but not in the model. Add names "
        "that may be missing or unused to `ignore`."
    )
    save_file({"w": zeros(2, 3)}, path)
    message = "is expected. Read transposed weights with `train.Stored(name, transpose=True)`."
    assert refusal({"w": zeros(3, 2)}, path).endswith(message)
    save_file({"w": zeros(2, dtype=np.float64)}, path)
    like = {"w": jax.ShapeDtypeStruct((2,), np.float64)}
    assert "must be float64, which JAX supports only with `jax.config." in refusal(like, path)


def test_only_ignored_names_may_be_missing_or_unused(path):
    save_file({"a": np.ones(2, np.float32), "h.0.mask": zeros(1), "h.1.mask": zeros(1)}, path)
    like = {"a": zeros(2), "b": np.full(2, 7)}
    for options in ({"ignore": ("b", "h.*.mask")}, {"ignore": "b", "strict": False}):
        found = train.import_safetensors(like, path, **options)
        assert (found["a"].tolist(), found["b"].tolist()) == ([1, 1], [7, 7])
    for given, names, options, message in [
        (like, None, {"strict": False}, "b is missing."),
        ({"a": zeros(2)}, {"a": "h.2.mask"}, {"strict": False}, "is missing, nearest: h."),
        ({"a": zeros(2)}, None, {"ignore": "h.0.*"}, "h.1.mask is in the file, but not"),
        ({"a": zeros(3)}, None, {"ignore": "*"}, "of shape (2,), but float32 of shape (3,)"),
        ({"b": jax.ShapeDtypeStruct((2,), np.float32)}, None, {"ignore": "*"}, "b is missing"),
    ]:
        assert message in refusal(given, path, names, **options)


def test_dtypes_are_cast_on_request_if_no_integer_is_lost(path):
    arrays = {"half": jnp.array([0.5, 1.0], jnp.bfloat16), "count": np.array([3, 7])}
    train.export_safetensors(arrays, path)
    like = {"half": jnp.zeros(2), "count": jnp.zeros(2, jnp.int32)}
    message = refusal(like, path)
    assert "is bfloat16 of shape (2,), but float32 of shape (2,) is expected" in message
    assert message.endswith(' is expected. Pass `dtype="like"` to cast.')
    found = train.import_safetensors(like, path, dtype="like")
    assert found["half"].tolist() == [0.5, 1.0]
    assert (found["half"].dtype, found["count"].dtype) == (jnp.float32, jnp.int32)
    message = refusal({**like, "count": jnp.zeros(2)}, path, dtype="like")
    assert "is int64 of shape (2,), but float32 of" in message
    train.export_safetensors({**arrays, "count": np.array([3, 2**40])}, path)
    message = refusal(like, path, dtype="like")
    assert "model.safetensors) has integers that int32 cannot represent" in message
    assert "dtype must be None" in refusal(like, path, dtype="float32")


def test_names_may_be_pairs_of_a_name_in_the_file_and_a_function(path):
    save_file({"theirs": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    like = {"w": zeros(3, 2)}
    for names in ({"w": ("theirs", np.transpose)}, lambda name: ("theirs", np.transpose)):
        found = train.import_safetensors(like, path, names)
        assert found["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    found = train.import_safetensors({"w": zeros(2, 3)}, path, lambda name: "theirs")
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    halve = lambda array: array.T.astype(np.float16)
    ours, expected = "w (theirs in model.safetensors) is ", "float32 of shape (3, 2)"
    for function, found in [
        (np.ravel, "float32 of shape (6,)"),
        (halve, "float16 of shape (3, 2)"),
    ]:
        message = refusal(like, path, {"w": ("theirs", function)})
        assert f"{ours}{found}, but {expected}" in message
    with pytest.raises(ValueError, match="equal division") as caught:
        train.import_safetensors(like, path, {"w": ("theirs", lambda array: np.split(array, 5))})
    raised = "The function in `names` raised this for w (theirs in model.safetensors)."
    assert caught.value.__notes__ == [raised]
    for names, error, message in [
        ({"typo": "a"}, ValueError, "no array of the model has that name; nearest: w."),
        (["a"], TypeError, "`names` must be a mapping or a function, got ['a']."),
        (lambda name: 1, TypeError, "for w it is 1."),
        (lambda name: ("a", "b"), TypeError, "for w it is ('a', 'b')."),
        (lambda name: ("a",), TypeError, "for w it is ('a',)."),
    ]:
        assert refusal(like, path, names, error=error).endswith(message)


def test_arrays_that_a_function_returns_are_copied(path):
    save_file({"w": zeros(256)}, path)
    memory = zeros(256 + 16)
    # JAX only aliases memory whose address is a multiple of 64 bytes.
    start = -memory.ctypes.data % 64 // 4
    kept = memory[start : start + 256]
    found = train.import_safetensors({"w": jnp.ones(256)}, path, {"w": ("w", lambda _: kept)})
    kept[:] = 5
    assert not found["w"].any()


def test_models_that_cannot_be_exported_are_refused(path):
    model = {"a.b": zeros(1), "a": {"b": zeros(1)}}
    for call in (train.export_safetensors, train.import_safetensors):
        with pytest.raises(ValueError, match=r"several arrays have the same name: a\.b\. Rename"):
            call(model, path)
    deleted = jnp.ones(2)
    deleted.delete()
    unsupported = r"safetensors does not support .* model\['w'\]\. Cast the"
    for array, error, message in [
        (jr.key(0), TypeError, unsupported),
        (zeros(1, dtype=np.complex128), TypeError, unsupported),
        (jnp.zeros(1, "int4"), TypeError, unsupported),
        (np.array([None]), TypeError, unsupported),
        (deleted, RuntimeError, r"deleted: model\['w'\]"),
    ]:
        with pytest.raises(error, match=message):
            train.export_safetensors({"w": array}, path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match=str(path)):
        train.import_safetensors({"a": zeros(1)}, path)


def test_a_damaged_file_is_refused(path):
    save_file({"a": np.arange(4.0)}, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:-1], whole + b"x", b"x" * 100):
        path.write_bytes(damaged)
        message = refusal({"a": zeros(4)}, path)
        assert message.startswith(f"{path} is damaged or not a safetensors file: ")


def test_error_without_safetensors_names_the_package_to_install(path, monkeypatch):
    train.export_safetensors({"a": zeros(1)}, path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[train\]'"):
        train.import_safetensors({"a": zeros(1)}, path)
