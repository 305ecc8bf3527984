"""The user's own data: files, images and Python, read one sample at a time and checked against the model."""
