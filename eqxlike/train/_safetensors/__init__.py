"""Import and export of weights in safetensors files, which PyTorch's tools read and write.

In reading order:

- `_import_export`: the two public functions.
- `_names`: the table from model names to file names, and the layout of stored arrays.
- `_reader`: finds and reads arrays. `_parts`: assembles arrays to write.
- `_files`: files, shards and their index.
"""

from ._import_export import export_safetensors as export_safetensors
from ._import_export import import_safetensors as import_safetensors
from ._names import Stored as Stored
