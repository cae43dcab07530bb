"""What was sampled, and where it is written down."""
