"""Training steps: taken in, their samples chosen, recorded, queued for the trainer."""
