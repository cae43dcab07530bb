"""The page to watch a run on: its data as small pieces of JSON, and the whole as a folder to keep."""
