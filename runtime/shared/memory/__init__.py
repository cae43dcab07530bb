"""The GPU memory of a run, by arithmetic: predicted, planned, and refused if it cannot fit."""
