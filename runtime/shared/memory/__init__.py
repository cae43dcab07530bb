"""What a run takes of its GPUs' memory, by arithmetic: predicted, planned, and refused where it cannot fit."""
