"""The embedded model: its phrase grammar, its chat format, the script that makes it, the weights."""
