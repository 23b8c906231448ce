"""Generated functions and their source lines."""

import collections
import gc
import linecache
import traceback

import pytest

from eqxlike import _traceback
from eqxlike._traceback import compile_function

ADD = ["def add(x, y=2):", "    return x + y + offset"]


def test_function_has_a_copy_of_the_namespace():
    namespace = {"offset": 10}
    add = compile_function(ADD, namespace, "test")
    namespace["offset"] = 20
    assert (add.__name__, add(1)) == ("add", 13)


def test_file_name_has_the_purpose_and_is_unique():
    one, other = (compile_function(ADD, {}, "pytree of a.b.C") for _ in range(2))
    assert one.__code__.co_filename.startswith("<eqxlike pytree of a.b.C")
    assert one.__code__.co_filename != other.__code__.co_filename
    with pytest.raises(SyntaxError) as caught:
        compile_function(["def add(:"], {}, "test")
    assert caught.value.filename.startswith("<eqxlike test")


def test_traceback_shows_the_line_after_a_check_of_the_line_cache():
    add = compile_function(ADD, {"offset": "text"}, "test")
    linecache.checkcache()
    with pytest.raises(TypeError) as caught:
        add(1)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "return x + y + offset"
    assert linecache.getline(add.__code__.co_filename, 1) == ADD[0] + "\n"


def test_source_is_deleted_after_the_function():
    add = compile_function(ADD, {}, "test")
    filename = add.__code__.co_filename
    assert filename in linecache.cache
    before = len(linecache.cache)
    # Garbage collection must not change the line cache during an iteration over it.
    for _ in linecache.cache:
        del add
        gc.collect()
        break
    assert len(linecache.cache) == before
    compile_function(ADD, {}, "another")
    assert filename not in linecache.cache


class _EmptiedByAnotherThread(collections.deque):
    """A deque that another thread empties directly after a check that it is not empty."""

    def __bool__(self):
        was_there = len(self) > 0
        self.clear()
        return was_there


def test_two_threads_may_delete_sources_at_once(monkeypatch):
    monkeypatch.setattr(_traceback, "_collected", _EmptiedByAnotherThread(["<eqxlike gone>"]))
    assert compile_function(ADD, {"offset": 10}, "test")(1) == 13
