"""Optimization profiles: read from the spec, filled with generated inputs, and tried before any builder sees them."""
