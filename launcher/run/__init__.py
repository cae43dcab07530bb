"""The life of one run, from its command line to its end."""
