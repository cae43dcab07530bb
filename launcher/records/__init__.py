"""What is written down about a run: its record, its lives, its lease, its endpoint, who takes it down."""
