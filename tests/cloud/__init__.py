"""A cloud to test against, on one computer: real SkyPilot, EC2's API by moto, machines made of namespaces.

`rig.py` is what tests use; start reading there.
"""
