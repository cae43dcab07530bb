"""The program that `launch bench` starts, and what it uses."""
