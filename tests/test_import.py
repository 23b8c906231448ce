"""What `import eqxlike` brings into a process, and what waits for its first use."""

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
import sys

import jax.extend.core, wadler_lindig
from jaxtyping import PyTree

beneath = {{*sys.modules}}
import eqxlike

found = {{"imported": [*{{*sys.modules}} - beneath], "dir": dir(eqxlike)}}
found["parts"] = [getattr(eqxlike, part).__name__ for part in {PARTS}]
from eqxlike import {", ".join(PARTS)}, tree_inference

found["from"] = [part.__name__ for part in ({", ".join(PARTS)})]
exec("from eqxlike import *", starred := {{}})
found["star"] = [starred["nn"].__name__, starred["tree_inference"] is tree_inference]
print(json.dumps(found))
"""


def run(source: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process finds in eqxlike, beside what it is built on."""
    return json.loads(run(IMPORTS))


def test_import_brings_in_the_core_alone_and_parts_are_there_when_first_looked_up(found):
    packages = {name.split(".")[0] for name in found["imported"]}
    assert packages - sys.stdlib_module_names == {"eqxlike"}
    assert {f"eqxlike.{part}" for part in PARTS} & {*found["imported"]} == set()
    assert found["parts"] == found["from"] == [f"eqxlike.{part}" for part in PARTS]
    assert {*PARTS, "tree_inference", "filter_jit"} <= {*found["dir"]}
    assert found["star"] == ["eqxlike.nn", True]


def test_layer_is_unpickled_where_nothing_was_imported():
    data = pickle.dumps(eqxlike.nn.Identity())
    assert run(f"import pickle\nprint(pickle.loads({data!r}))") == "Identity()\n"


def test_pickle_that_names_the_default_finish_of_a_mean_is_read():
    finish = eqxlike.train.metrics.mean(jax.numpy.zeros(1)).finish
    assert pickle.loads(b"ceqxlike.train.metrics\n_itself\n.") is finish


def test_unknown_name_is_an_attribute_error_that_knows_the_names():
    with pytest.raises(AttributeError, match="module 'eqxlike' has no attribute 'trein'") as caught:
        _ = eqxlike.trein  # pyright: ignore[reportAttributeAccessIssue]
    assert caught.value.name == "trein"
    assert caught.value.obj is eqxlike
