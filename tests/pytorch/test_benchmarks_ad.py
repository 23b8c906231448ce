import numpy as np
import pytest

from benchmarks import zoo
from benchmarks.zoo import in_torch
from benchmarks.zoo.problem import by_path, in_all_spaces
from eqxlike import filter_jit, filter_value_and_grad

PROBLEMS = [
    problem
    for each in zoo.PROBLEMS
    if each.name in in_torch.FUNCTIONS
    for problem in in_all_spaces(each)
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: f"{each.name}, {each.space}")
def test_gradient_equals_gradient_of_pytorch(problem):
    _, gradient = in_torch.calls(problem, compiles=False)
    value, gradients = gradient()
    expected = filter_jit(filter_value_and_grad(problem.function))(*problem.start())
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for path, leaf in by_path(expected[1]).items():
        atol = 1e-5 * np.max(np.abs(leaf))
        np.testing.assert_allclose(gradients[path], leaf, rtol=0, atol=atol, err_msg=path)
