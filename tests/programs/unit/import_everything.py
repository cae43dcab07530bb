"""All that a program may import of the client, DSPy's part as well: `python import_everything.py`."""

from launcher import client

for name in client.__all__:
    getattr(client, name)
