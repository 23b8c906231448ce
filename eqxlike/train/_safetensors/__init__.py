"""Weights in and out: models in safetensors files, as PyTorch's tools write and read them.

In the order of reading:

- `_import_export`: the two functions.
- `_names`: the table from our names to those in the files, and the layout of each array there.
- `_files`: the files, shards and their index.
"""

from ._import_export import export_safetensors as export_safetensors
from ._import_export import import_safetensors as import_safetensors
from ._names import Stored as Stored
