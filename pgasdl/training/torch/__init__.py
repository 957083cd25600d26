"""Gradient exchange inside PyTorch: the implementation of ``pgasdl.torch``."""
