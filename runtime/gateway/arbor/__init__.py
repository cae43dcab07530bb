"""The wire for unmodified Arbor clients: jobs, rounds of groups given as text, and what becomes of them."""
