"""Networks in formats that other programs read: ONNX, MXNet's symbol files, PyTorch."""

from ..runtime import loaded as loaded
