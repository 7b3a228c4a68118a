"""NVIDIA's GPUs: what the driver says of them, which of them MXNet's gpu(i) is, and which are free."""
