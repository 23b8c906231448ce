"""The guard of a static value lets pass what has the key of that value, and nothing else."""

import pytest
from hypothesis import given

from eqxlike._codegen import compile_function
from eqxlike._partition import GuardWriter, StaticKey, flatten
from tests.partition.statics import (
    BY_IDENTITY,
    CHANGING,
    INTERCHANGEABLE,
    TOLD_APART,
    describe,
    nests,
)


def guard_of(value):
    """Whether a value may stand for `value`, as the fast path asks."""
    writer = GuardWriter(flatten, (), False)
    writer.miss_if_static_differs("other", value)
    lines = ["def passes(other):", "    try:", *(f"        {line}" for line in writer.lines)]
    lines += ["        return True", "    except Exception:", "        return False"]
    return compile_function(lines, writer.namespace, "guard")


VALUES = {
    **{f"{row}-{i}": value for row, values in TOLD_APART.items() for i, value in enumerate(values)},
    **{name: make() for name, make in INTERCHANGEABLE.items()},
    **{f"{name}-anew": make() for name, make in INTERCHANGEABLE.items()},
    **{f"{name}-by-identity": make() for name, (make, _) in BY_IDENTITY.items()},
    **{f"{name}-changing": make() for name, (make, _) in CHANGING.items()},
}


@pytest.mark.parametrize("name", VALUES)
def test_guard_lets_pass_just_the_values_of_equal_key(name):
    value = VALUES[name]
    passes, key = guard_of(value), StaticKey(value).key
    expected = [other for other, each in VALUES.items() if StaticKey(each).key == key]
    assert [other for other, each in VALUES.items() if passes(each)] == expected


@pytest.mark.parametrize("name", CHANGING)
def test_guard_lets_nothing_pass_that_was_changed_in_place(name):
    make, edit = CHANGING[name]
    value = make()
    passes = guard_of(value)
    assert passes(value)
    edit(value)
    assert not passes(value)


@pytest.mark.parametrize("name", CHANGING)
def test_guard_lets_nothing_pass_for_what_was_changed_itself(name):
    make, edit = CHANGING[name]
    value, equal = make(), make()
    passes = guard_of(value)
    edit(value)
    assert not passes(equal)


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_guard_lets_pass_what_hashes_by_identity_whatever_is_changed_in_place(name):
    make, edit = BY_IDENTITY[name]
    value = make()
    passes = guard_of(value)
    edit(value)
    assert passes(value)


@given(nests, nests)
def test_guard_lets_pass_just_what_is_indistinguishable(first, second):
    assert guard_of(first)(second) == (describe(first) == describe(second))
