"""From table rows to the documents msProbe users know: dump.json, stack.json, construct.json.

`leaves` turns rows into entries, `statistics` knows which number is printed for which dtype,
`documents` puts the entries into records and the records in order. Nothing here touches a file.
"""

from .columns import split
from .documents import Header, render

__all__ = ["Header", "render", "split"]
