"""What `import eqxlike` brings into a process, and what waits for its first use."""

import pickle
import subprocess
import sys

import pytest

import eqxlike

PARTS = ("bayes", "debug", "loops", "nn", "train")


def run(source: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def modules_after(source: str) -> set[str]:
    """The names of the modules that a fresh interpreter has after running `source`."""
    return set(run(f"import sys\n{source}\nprint(*sys.modules)"))


@pytest.fixture(scope="module")
def imported():
    """The modules that `import eqxlike` brings in, beside those that it is built on."""
    beneath = "import jax.extend.core, wadler_lindig; from jaxtyping import PyTree"
    return modules_after("import eqxlike") - modules_after(beneath)


def test_import_brings_in_no_other_library(imported):
    packages = {name.split(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"eqxlike"}


def test_import_brings_in_the_core_alone(imported):
    assert {f"eqxlike.{part}" for part in PARTS} & imported == set()


def test_part_is_there_when_it_is_first_looked_up():
    source = "".join(f"print(eqxlike.{part}.__name__)\n" for part in PARTS)
    assert run(f"import eqxlike\n{source}") == [f"eqxlike.{part}" for part in PARTS]


def test_part_can_be_imported_from_the_package():
    source = f"from eqxlike import {', '.join(PARTS)}, tree_inference\n"
    names = "".join(f"print({part}.__name__)\n" for part in PARTS)
    assert run(source + names) == [f"eqxlike.{part}" for part in PARTS]


def test_star_import_and_dir_have_what_waits():
    waiting = "import eqxlike\nprint(*dir(eqxlike))\n"
    names = "from eqxlike import *\nprint(nn.__name__, tree_inference.__name__)"
    *waiting, part, function = run(waiting + names)
    assert {*PARTS, "tree_inference", "filter_jit"} <= set(waiting)
    assert [part, function] == ["eqxlike.nn", eqxlike.tree_inference.__name__]


def test_layer_is_unpickled_where_nothing_was_imported():
    data = pickle.dumps(eqxlike.nn.Identity())
    assert run(f"import pickle\nprint(pickle.loads({data!r}))") == ["Identity()"]


def test_unknown_name_is_an_attribute_error_that_knows_the_names():
    with pytest.raises(AttributeError, match="module 'eqxlike' has no attribute 'trein'") as caught:
        _ = eqxlike.trein  # pyright: ignore[reportAttributeAccessIssue]
    assert caught.value.name == "trein"
    assert caught.value.obj is eqxlike
