"""Output for people, and questions to them."""
