"""Two files in the run's folder, by which a Weights & Biases run is ended before the trainer ends.

OPEN is there while that run is not ended; a process that wants it ended creates CLOSE. wandb writes its
buffer at the end only, and offline runs are copied while the trainer is still there. Neighbours:
`wandb_log.py` has the run; the launcher's machines create CLOSE before the last pull.
"""

OPEN, CLOSE = "wandb.open", "wandb.close"
