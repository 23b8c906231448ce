"""Import and export of weights in safetensors files, which PyTorch's tools read and write.

In reading order:

- `_import_export`: the two public functions.
- `_names`: the table from model names to file names, and the layout of stored arrays.
- `_reader`: finds arrays in files and reads them.
- `_parts`: assembles the arrays to write.
- `_files`: files, shards and the index of shards.
"""

from ._import_export import export_safetensors as export_safetensors
from ._import_export import import_safetensors as import_safetensors
from ._names import Stored as Stored
