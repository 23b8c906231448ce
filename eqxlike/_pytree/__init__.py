"""What one may do to any pytree."""

from ._check import tree_check as tree_check
from ._equal import tree_equal as tree_equal
from ._filters import combine as combine
from ._filters import filter as filter
from ._filters import flag_leaves as flag_leaves
from ._filters import is_array as is_array
from ._filters import is_array_like as is_array_like
from ._filters import is_inexact_array as is_inexact_array
from ._filters import is_inexact_array_like as is_inexact_array_like
from ._filters import partition as partition
from ._frozen import Frozen as Frozen
from ._frozen import flag_frozen as flag_frozen
from ._frozen import is_frozen as is_frozen
from ._leaf_format import default_deserialise_filter_spec as default_deserialise_filter_spec
from ._leaf_format import default_serialise_filter_spec as default_serialise_filter_spec
from ._levels import children_with_keys as children_with_keys
from ._levels import tree_flatten_one_level as tree_flatten_one_level
from ._print import tree_pformat as tree_pformat
from ._print import tree_pprint as tree_pprint
from ._references import is_array_or_traced_reference as is_array_or_traced_reference
from ._references import is_reference as is_reference
from ._references import is_traced_reference as is_traced_reference
from ._serialise import tree_deserialise_leaves as tree_deserialise_leaves
from ._serialise import tree_serialise_leaves as tree_serialise_leaves
from ._tree_at import tree_at as tree_at
from ._updates import apply_updates as apply_updates
