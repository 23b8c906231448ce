"""What a Module is."""

from ._codec import is_incomplete as is_incomplete
from ._field import field as field
from ._kept import INITIALISING as INITIALISING
from ._kept import can_stay_unread as can_stay_unread
from ._kept import get_kept as get_kept
from ._kept import set_kept as set_kept
from ._kept import stored_fields as stored_fields
from ._module import METADATA as METADATA
from ._module import BoundMethod as BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import Wrapper as Wrapper
from ._module import bind as bind
