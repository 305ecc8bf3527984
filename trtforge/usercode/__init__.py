"""Runs Python that a spec names, in a process of its own."""
