"""The life of one run, from what was typed to its end."""
