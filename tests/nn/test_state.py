"""`State`: the values of stateful layers, outside of the model."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.cases import Counter
from tests.nn.mistakes import each_mistake


class Pair(eqx.Module):
    first: Counter
    second: Counter

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.second(x, state)


def pair():
    return nn.make_with_state(Pair)(Counter(), Counter(10))


def values(state):
    return [leaf.tolist() for leaf in jax.tree.leaves(state)]


def test_each_path_in_a_model_has_its_own_value():
    counter = Counter()
    model, state = nn.make_with_state(Pair)(counter, counter)
    assert jax.tree.leaves(model) == []
    _, state = model.first(0, state)
    assert (state.get(model.first.index), state.get(model.second.index)) == (1, 0)
    # An index without a path has a unique name, which copies keep.
    one, other = Counter(), Counter()
    _, state = one(0, nn.State([one, other]))
    assert (state.get(copy.deepcopy(one).index), state.get(other.index)) == (1, 0)


def test_state_and_index_name_the_path_in_the_model():
    model, state = pair()
    assert repr(state) == "State(Pair.first.index=i32[], Pair.second.index=i32[])"
    assert repr(model.first.index) == "StateIndex(marker='Pair.first.index', init=DeletedValue())"


def test_equal_models_share_a_compiled_function():
    traces = []

    @eqx.filter_jit
    def step(model, state):
        traces.append(None)
        return model(0, state)

    for _ in range(2):
        model, state = pair()
        for _ in range(3):
            x, state = step(model, state)
    assert len(traces) == 1
    assert (x, values(state)) == (16, [3, 13])


def test_copies_of_a_state_stay_valid_after_an_update():
    for make_copy in (copy.copy, copy.deepcopy):
        model, state = pair()
        kept = make_copy(state)
        _, state = model(0, state)
        assert (values(kept), values(state)) == ([0, 10], [1, 11])
    model, state = pickle.loads(pickle.dumps(pair()))
    assert model(0, state)[0] == 12


USES = {
    "get": lambda state, index: state.get(index),
    "set": lambda state, index: state.set(index, 0),
    "substate": lambda state, index: state.substate(index),
    "update": lambda state, index: state.update(nn.State(())),
    "leaves": lambda state, index: jax.tree.leaves(state),
    "jit": lambda state, index: eqx.filter_jit(lambda state: 0)(state),
    "update of another": lambda state, index: nn.State(Counter()).update(state),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_replaced_state_is_refused(use):
    counter = Counter()
    state = nn.State(counter)
    # Also after a warm call, whose cache must not hide the replaced state.
    eqx.filter_jit(lambda state: 0)(state)
    state.set(counter.index, 1)
    with pytest.raises(ValueError, match=r"(?s)This State is out of date.*should be state2"):
        use(state, counter.index)
    assert repr(state) == "State(<out of date>)"


def test_replaced_state_inside_a_module_is_refused():
    class Holder(eqx.Module):
        state: nn.State

    @eqx.filter_jit
    def count(holder):
        return holder

    counter = Counter()
    holder = Holder(nn.State(counter))
    for each in (holder, count(holder)):
        count(each)
        each.state.set(counter.index, 1)
        with pytest.raises(ValueError, match="out of date"):
            count(each)


def test_values_are_strong_in_type_and_take_the_dtype_of_the_initial_value():
    state = nn.State([nn.StateIndex(1), nn.StateIndex(jnp.asarray(2.0))])
    assert [leaf.weak_type for leaf in jax.tree.leaves(state)] == [False, False]
    index = nn.StateIndex(jnp.zeros((), jnp.int32))
    for value in (3, jnp.asarray(3), np.int32(3)):
        new = nn.State(index).set(index, value).get(index)
        assert (new.dtype, new.weak_type, int(new)) == (jnp.int32, False, 3)


def test_update_replaces_the_state_and_substate_does_not():
    model, state = pair()
    substate = state.substate(model.second)
    _, substate = model.second(0, substate)
    new = state.update(substate)
    assert values(new) == [0, 11]
    with pytest.raises(ValueError, match="out of date"):
        state.get(model.first.index)


def test_make_with_state_passes_arguments_and_keeps_the_name():
    assert repr(nn.make_with_state(nn.Identity)()[1]) == "State()"
    make = nn.make_with_state(Counter)
    assert make(start=3)[1] == make(3)[1]
    assert make.__name__ == "Counter"


INDEX, OTHER = nn.StateIndex(jnp.zeros(2), marker="mean"), nn.StateIndex(jnp.zeros(2), marker="sum")


def set_to(value):
    return lambda state: state.set(INDEX, value)


MISTAKES = {
    ValueError: {
        r"at mean must keep .* the old value is .* \(2,\) .* the new value is .* \(3,\) and": (
            set_to(jnp.zeros(3))
        ),
        r"the old value is .* dtype float32, and the new value is .* dtype float16\.": (
            set_to(jnp.zeros(2, jnp.float16))
        ),
        r"the old value is an array .*, and the new value is 'a'\.": set_to("a"),
        "by a StateIndex, got str": lambda state: state.get("mean"),
        "has mean; got a State that also has sum": lambda state: state.update(nn.State(OTHER)),
        "a State, .* got int": lambda state: state.update(3),
        r"StateIndex at list\[0\] has no initial": lambda _: nn.State(
            [nn.delete_init_state(INDEX)]
        ),
    },
    KeyError: {"StateIndex sum is not in this State, which has mean": lambda s: s.get(OTHER)},
    AttributeError: {"'State' object has no attribute 'values'": lambda state: state.values},
    TypeError: {
        r"StateIndex at list\[0\] expected .* got a leaf of type str: 'a'": (
            lambda _: nn.State([nn.StateIndex("a")])
        )
    },
}


@each_mistake(MISTAKES)
def test_state_stays_valid_after_a_mistake(error, words, call):
    state = nn.State(INDEX)
    with pytest.raises(error, match=words):
        call(state)
    assert state.get(INDEX).tolist() == [0, 0]
