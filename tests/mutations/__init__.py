"""Patches that break the code on purpose, one per known way to be silently wrong."""
