"""The program that `launch bench` starts, and its modules."""
