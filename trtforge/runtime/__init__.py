"""Runs engines on the GPU: a session for Python, and what `trtforge bench` measures with."""
