"""Networks in formats that other programs read: ONNX, MXNet's symbol files, PyTorch."""

from .export import Exported, export

__all__ = ["Exported", "export"]
