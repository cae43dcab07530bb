"""What `launch bench` measures on this computer, and the comparison with another trainer."""
