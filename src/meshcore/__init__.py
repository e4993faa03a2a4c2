"""Distributed training memory for PyTorch and JAX: meshes, chunks, exact accounting."""
