"""The programs that `launch bench` starts: ours beside a run, the other trainer's in its own environment."""
