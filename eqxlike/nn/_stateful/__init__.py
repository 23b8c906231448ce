"""Layers that carry a state from call to call, and the state of a model."""

from ._state import State as State
from ._state import make_with_state as make_with_state
from ._state_index import StateIndex as StateIndex
from ._state_index import delete_init_state as delete_init_state
from ._state_index import find_indices as find_indices
from ._state_index import has_place_in_a_state as has_place_in_a_state
from ._state_index import with_array_states as with_array_states
from ._stateful_layer import NO_STATE as NO_STATE
from ._stateful_layer import StatefulLayer as StatefulLayer
from ._stateful_layer import is_stateful as is_stateful
