"""Modules: frozen dataclasses that are pytrees.

The files, in the order in which to read them. First, how a class and its instances are made:

- `_module`: `Module`, its metaclass, its bound methods, and `Partial`.
- `_class`: the record that the metaclass keeps for each class, and how a class is pickled by value.
- `_field`: `field`, and the values that a static field may have.
- `_dataclass`: making a class a dataclass, with a faster `__init__`.
- `_cached`: the storage of an instance: frozen fields, and the cached partition.
- `_codec`: the generated functions by which JAX flattens and unflattens instances.
- `_abstract`: `AbstractVar`, for attributes that subclasses must have.

Then parts that a first reading can skip:

- `_wrapper`: Modules that show the name and documentation of the callable that they wrap.
- `_strict`: the rules of classes with `strict=True`.
- `_naming`: the names of layers in a traced program.
- `_derived`: generated subclasses for frozen arrays, and for Modules that report their calls.
"""

from ._abstract import AbstractClassVar as AbstractClassVar
from ._abstract import AbstractVar as AbstractVar
from ._abstract import abstract_names as abstract_names
from ._cached import INITIALISING as INITIALISING
from ._cached import CachedPartition as CachedPartition
from ._cached import LazyPartition as LazyPartition
from ._cached import clear_slot as clear_slot
from ._cached import get_cached as get_cached
from ._cached import set_cached as set_cached
from ._cached import stored_fields as stored_fields
from ._class import Traits as Traits
from ._class import own_record as own_record
from ._codec import carries_metadata as carries_metadata
from ._codec import has_metadata as has_metadata
from ._codec import is_incomplete as is_incomplete
from ._dataclass import can_stay_lazy as can_stay_lazy
from ._derived import freeze_where as freeze_where
from ._derived import frozen_fields as frozen_fields
from ._derived import observe_calls as observe_calls
from ._field import field as field
from ._field import static_field as static_field
from ._module import METADATA as METADATA
from ._module import BoundMethod as BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import Partial as Partial
from ._module import Wrapper as Wrapper
from ._module import bind as bind
from ._naming import LayerCall as LayerCall
from ._naming import name_again as name_again
from ._naming import names_in as names_in
from ._naming import naming_layers as naming_layers
from ._strict import StrictConfig as StrictConfig
from ._strict import ignore_strict_rules as ignore_strict_rules
from ._wrapper import module_update_wrapper as module_update_wrapper
from ._wrapper import shown_by as shown_by
