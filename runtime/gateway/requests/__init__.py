"""What a request may ask of an engine."""
