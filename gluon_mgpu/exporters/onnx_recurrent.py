"""MXNet's recurrent operator: its one array of parameters, divided into the layers of ONNX's operators."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np

from ..errors import TrainerError

_NUM_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_ONNX_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # MXNet has i f c o and r z n; ONNX i o f c and z r n

Arrays = Tuple[np.ndarray, ...]  # W, R and B of one layer, by its directions


def onnx_layers(attributes: Dict[str, Any], parameters: np.ndarray) -> Tuple[str, Dict[str, Any], List[Arrays]]:
    """Return ONNX's operator for a recurrent one of MXNet, its options, and its arrays layer by layer.

    MXNet keeps the weights of all layers and directions, then their biases; of each, the part for the input comes first.
    """
    odd = [name for name in ("projection_size", "lstm_state_clip_min", "use_sequence_length") if attributes.get(name)]
    if odd:
        raise TrainerError(
            f"export: got a recurrent layer with {', '.join(odd)}; expected one without, for which ONNX has a counterpart. "
            "Leave the option out, or export with a symbol prefix."
        )
    mode, size = str(attributes["mode"]), int(attributes["state_size"])
    num_layers, directions = int(attributes.get("num_layers", 1)), 2 if attributes.get("bidirectional") else 1
    width = _NUM_GATES[mode] * size
    weights, biases = np.split(parameters, [len(parameters) - num_layers * directions * 2 * width])
    inner = (num_layers - 1) * directions * width * (directions * size + size)  # of the layers above the first
    columns = (len(weights) - inner) // (directions * width) - size
    kind, _, activation = mode.upper().partition("_")
    options: Dict[str, Any] = {"hidden_size": size, "direction": "bidirectional" if directions == 2 else "forward"}
    if activation:
        options["activations"] = [activation.capitalize()] * directions
    elif mode == "gru":
        options["linear_before_reset"] = 1

    def ordered(array: np.ndarray) -> np.ndarray:
        gates = np.split(array, _NUM_GATES[mode])
        return np.concatenate([gates[i] for i in _ONNX_ORDER.get(mode, (0,))])

    layers: List[Arrays] = []
    for _ in range(num_layers):
        parts = []
        for _ in range(directions):
            i2h, h2h, weights = np.split(weights, [width * columns, width * (columns + size)])
            both, biases = np.split(biases, [2 * width])
            bias = np.concatenate([ordered(part) for part in np.split(both, 2)])
            parts.append((ordered(i2h.reshape(width, columns)), ordered(h2h.reshape(width, size)), bias))
        layers.append(tuple(map(np.stack, zip(*parts))))
        columns = directions * size
    return kind, options, layers
