"""Data that the training programs use, and batches of arrays at the speed of memory."""

from .batching import ArrayLoader
from .idx import load_idx_folder, read_idx
from .images import ImageData, load_digits, load_fashion_mnist, load_mnist

__all__ = ["ArrayLoader", "ImageData", "load_digits", "load_fashion_mnist", "load_idx_folder", "load_mnist", "read_idx"]
