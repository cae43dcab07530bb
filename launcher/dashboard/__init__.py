"""The page to watch a run on: what it shows, as small pieces of JSON, and as a folder to keep."""
