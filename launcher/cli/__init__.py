"""The command line: its options, its verbs, its help."""
