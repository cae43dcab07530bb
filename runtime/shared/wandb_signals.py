"""Two files in the run's folder, by which a Weights & Biases run is ended before the trainer ends.

OPEN is there while that run is not ended; who wants it ended leaves CLOSE. What is buffered is written at
its end only, and offline runs are copied while the trainer is still there. Neighbours: `wandb_log.py` has the
run; the launcher's machines leave CLOSE before the last pull.
"""

OPEN, CLOSE = "wandb.open", "wandb.close"
