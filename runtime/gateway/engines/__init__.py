"""The engines as the gateway sees them: calling them, proving that they hold a version."""
