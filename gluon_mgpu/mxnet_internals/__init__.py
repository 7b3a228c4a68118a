"""What this package knows of MXNet's inside: private attributes, the C interface, names that Python and NumPy have dropped.

No other room touches them. Each function says why it needs them; where MXNet 2 differs, `versions.py` says how.
"""
