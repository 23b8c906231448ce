"""Modules that `import eqxlike` loads immediately, and modules that it loads on first use."""

import json
import pickle
import subprocess
import sys
from typing import Any

import jax
import pytest

import eqxlike

PARTS = ("bayes", "debug", "loops", "nn", "train")


IMPORTS = f"""
import json
import pickle
import sys

import jax.extend.core, wadler_lindig
from jaxtyping import PyTree

beneath = {{*sys.modules}}
import eqxlike

found = {{"imported": [*{{*sys.modules}} - beneath], "dir": dir(eqxlike)}}
found["unpickled"] = repr(pickle.loads({pickle.dumps(eqxlike.nn.Identity())!r}))
found["parts"] = [getattr(eqxlike, part).__name__ for part in {PARTS}]
from eqxlike import {", ".join(PARTS)}, tree_inference

found["from"] = [part.__name__ for part in ({", ".join(PARTS)})]
exec("from eqxlike import *", starred := {{}})
found["star"] = [starred["nn"].__name__, starred["tree_inference"] is tree_inference]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The names and modules of eqxlike in a new process."""
    command = [sys.executable, "-c", IMPORTS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_import_loads_only_the_core_and_other_parts_on_first_use(found):
    packages = {name.split(".")[0] for name in found["imported"]}
    assert packages - sys.stdlib_module_names == {"eqxlike"}
    assert {f"eqxlike.{part}" for part in PARTS} & {*found["imported"]} == set()
    assert found["parts"] == found["from"] == [f"eqxlike.{part}" for part in PARTS]
    assert {*PARTS, "tree_inference", "filter_jit"} <= {*found["dir"]}
    assert found["star"] == ["eqxlike.nn", True]


def test_layer_is_unpickled_before_its_module_is_imported(found):
    assert found["unpickled"] == "Identity()"


def test_old_pickle_of_the_default_finish_of_a_mean_is_read():
    finish = eqxlike.train.metrics.mean(jax.numpy.zeros(1)).finish
    assert pickle.loads(b"ceqxlike.train.metrics\n_itself\n.") is finish


def test_unknown_name_is_an_attribute_error_with_name_and_object():
    with pytest.raises(AttributeError, match="module 'eqxlike' has no attribute 'trein'") as caught:
        _ = eqxlike.trein  # pyright: ignore[reportAttributeAccessIssue]
    assert caught.value.name == "trein"
    assert caught.value.obj is eqxlike
