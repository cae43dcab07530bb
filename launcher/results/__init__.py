"""A run's results at home: checkpoints, durable copies, journals, what was said."""
