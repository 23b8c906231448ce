"""What a Module is."""

from ._abstract import AbstractClassVar as AbstractClassVar
from ._abstract import AbstractVar as AbstractVar
from ._cached import INITIALISING as INITIALISING
from ._cached import can_stay_lazy as can_stay_lazy
from ._cached import get_cached as get_cached
from ._cached import set_cached as set_cached
from ._cached import stored_fields as stored_fields
from ._class import ClassRecord as ClassRecord
from ._class import Traits as Traits
from ._codec import is_incomplete as is_incomplete
from ._field import field as field
from ._field import static_field as static_field
from ._freeze import freeze_where as freeze_where
from ._metadata import METADATA as METADATA
from ._metadata import carries_metadata as carries_metadata
from ._metadata import has_metadata as has_metadata
from ._metadata import shown_by as shown_by
from ._module import BoundMethod as BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import Wrapper as Wrapper
from ._module import bind as bind
from ._observe import observe_calls as observe_calls
from ._partial import Partial as Partial
from ._strict import StrictConfig as StrictConfig
from ._wrap import module_update_wrapper as module_update_wrapper
