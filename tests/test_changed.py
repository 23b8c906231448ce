"""`--changed` selects the tests that a change can break."""

from tests.changed import folders_to_run


def test_change_of_a_part_runs_the_tests_of_the_parts_that_import_it():
    found = folders_to_run(["eqxlike/graph/_report.py", "README.md"])
    assert "graph" in found
    assert not {"nn", "train", "transforms"} & found
    assert {"bayes", "internal", "nn"} <= folders_to_run(["eqxlike/nn/_linear.py"])
    assert "ship" in folders_to_run(["eqxlike/_pytree/_updates.py"])


def test_change_of_tests_runs_their_folders_and_a_shared_file_runs_all():
    assert folders_to_run(["tests/nn/test_mlp.py", "tests/test_import.py"]) == {
        "nn",
        "test_import.py",
    }
    for file in ("tests/conftest.py", "tests/scripts.py", "pyproject.toml", "eqxlike/new.py"):
        assert folders_to_run([file]) is None
