"""The wire for programs written for ART: models by their names, groups of trajectories, a step for each."""
