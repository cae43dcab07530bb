"""A run's results on this computer: checkpoints, durable copies, journals, rollout texts."""
