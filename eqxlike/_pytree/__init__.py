"""What one may do to any pytree."""

from ._equal import tree_equal as tree_equal
from ._filters import combine as combine
from ._filters import filter as filter
from ._filters import is_array as is_array
from ._filters import is_array_like as is_array_like
from ._filters import is_inexact_array as is_inexact_array
from ._filters import is_inexact_array_like as is_inexact_array_like
from ._filters import partition as partition
from ._print import tree_pformat as tree_pformat
from ._tree_at import tree_at as tree_at
from ._updates import apply_updates as apply_updates
