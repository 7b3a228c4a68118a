"""One batch on all devices: split, transfer, forward, backward, gather."""
