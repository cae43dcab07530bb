"""Everything that runs on the laptop: the `launch` CLI, the life of a run, the client a program imports.

`import launcher` is light: no torch, vLLM, SkyPilot or DSPy until something needs them.
"""
