"""Trajectories and groups of them: what an agent's program gathers, rewards and trains."""
