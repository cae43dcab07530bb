"""One completion request, from the door to an engine and back."""
