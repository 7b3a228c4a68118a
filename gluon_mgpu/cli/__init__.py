"""The command gluon-mgpu."""

from .main import main

__all__ = ["main"]
