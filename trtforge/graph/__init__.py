"""A model file in, a checked `Graph` out: what it reads and gives, which operators it uses, what its inputs mean."""
