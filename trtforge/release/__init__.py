"""What leaves the machine: the manifest, the bundle's atomic writing, and the check of a bundle against its manifest."""
