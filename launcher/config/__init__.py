"""The request: every setting with its source, its validation, and its price."""
