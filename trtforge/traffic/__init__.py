"""From what requests really look like to optimization profiles."""
