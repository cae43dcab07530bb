"""The protection against leftovers of a run: guardian, minder, teardown, `launch gc`."""
