"""Trajectories and groups of them: an agent's program gathers, rewards and trains these."""
