"""The command gluon-mgpu."""

from ..interrupts import begin_imports

begin_imports()

from .main import main

__all__ = ["main"]
