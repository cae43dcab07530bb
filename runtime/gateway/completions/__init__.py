"""One completion request, from its route to an engine and back."""
