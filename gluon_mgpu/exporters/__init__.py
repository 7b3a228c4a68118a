"""Networks in formats that other programs read: ONNX, MXNet's symbol files."""

from ..runtime import loaded as loaded
