"""What a run takes of its GPUs' memory, by arithmetic: predicted, planned, refused where it cannot fit."""
