"""The measurements of `launch bench` on this computer."""
