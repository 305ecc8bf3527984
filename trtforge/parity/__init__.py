"""Parity: whether a transformed model still computes what the one before it computed, and by how much it does not."""
