"""Parts that the processes of the runtime share: configuration, files, checkpoints, batches."""
