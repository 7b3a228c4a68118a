"""A network and the state of its training, saved and restored."""

from ..runtime import loaded as loaded
from .save_and_load import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
