"""The records of a run: its state, its lives, its lease, its endpoint, its teardown lock."""
