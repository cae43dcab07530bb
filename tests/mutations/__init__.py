"""Mutants that break the code on purpose, one or more for each known way to be silently wrong."""
