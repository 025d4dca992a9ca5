"""What runs an artifact on a device without Python: a small C program with TVM's runtime beside it."""
