"""The rows of the table of what users do to an optimizer, a file for each thing they do it with."""
