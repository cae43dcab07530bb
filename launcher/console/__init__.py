"""What is shown to a person, and what a person is asked."""
