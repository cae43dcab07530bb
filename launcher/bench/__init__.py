"""What `launch bench` measures on this computer."""
