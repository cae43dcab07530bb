"""Samples: their journal, their index and their names."""
