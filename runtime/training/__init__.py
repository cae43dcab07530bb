"""Training the policy: batches, losses, packing, the model, checkpoints, the queue of steps."""
