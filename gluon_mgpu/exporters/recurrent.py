"""MXNet's recurrent operator: its one array of parameters, divided into layers and directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import numpy as np

from ..errors import TrainerError

_NUM_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_ONNX_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # MXNet has i f c o and r z n; ONNX i o f c and z r n


@dataclass(frozen=True)
class Cell:
    """One layer in one direction.

    Attributes
    ----------
    mode : str
        `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`.
    layer, direction : int
    i2h_weight, h2h_weight : numpy.ndarray, shapes (gates * hidden, inputs) and (gates * hidden, hidden)
    i2h_bias, h2h_bias : numpy.ndarray, shape (gates * hidden,)
    """

    mode: str
    layer: int
    direction: int
    i2h_weight: np.ndarray
    h2h_weight: np.ndarray
    i2h_bias: np.ndarray
    h2h_bias: np.ndarray

    @property
    def hidden_size(self) -> int:
        return int(self.h2h_weight.shape[1])

    def for_onnx(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return W, R and B with ONNX's order of the gates."""
        biases = np.concatenate([self._ordered(self.i2h_bias), self._ordered(self.h2h_bias)])
        return self._ordered(self.i2h_weight), self._ordered(self.h2h_weight), biases

    def onnx_operator(self, num_directions: int) -> Tuple[str, Dict[str, Any]]:
        """Return the operator, and its attributes except the size."""
        direction = {"direction": "bidirectional" if num_directions == 2 else "forward"}
        if self.mode == "lstm":
            return "LSTM", direction
        if self.mode == "gru":
            return "GRU", {**direction, "linear_before_reset": 1}
        return "RNN", {**direction, "activations": [self.mode[len("rnn_") :].capitalize()] * num_directions}

    def _ordered(self, array: np.ndarray) -> np.ndarray:
        gates = np.split(array, _NUM_GATES[self.mode])
        return np.concatenate([gates[i] for i in _ONNX_ORDER.get(self.mode, (0,))])


def cells_of(attributes: Dict[str, Any], parameters: np.ndarray) -> List[Cell]:
    """Return the layers and directions of a recurrent operator, in MXNet's order.

    MXNet keeps the weights of all cells, then their biases; of each, the part for the input comes first.

    Raises
    ------
    TrainerError
        The operator does what neither ONNX's nor PyTorch's does.
    """
    odd = [name for name in ("projection_size", "lstm_state_clip_min") if attributes.get(name, "None") != "None"]
    odd += ["use_sequence_length"] if attributes.get("use_sequence_length", "False") in ("True", "1") else []
    if odd:
        raise TrainerError(
            f"export: got a recurrent layer with {', '.join(odd)}; expected one without, for which other formats have a "
            "counterpart. Leave the option out, or export with a symbol prefix."
        )
    mode, size = str(attributes["mode"]), int(attributes["state_size"])
    layers, directions = int(attributes.get("num_layers", 1)), 2 if attributes.get("bidirectional") in ("True", "1") else 1
    width = _NUM_GATES[mode] * size
    biases = layers * directions * 2 * width
    weights = len(parameters) - biases
    inner = (layers - 1) * directions * width * (directions * size + size)  # of the layers above the first
    input_size = (weights - inner) // (directions * width) - size
    cells, at, bias_at = [], 0, weights
    for layer in range(layers):
        for direction in range(directions):
            columns = directions * size if layer else input_size
            middle, end = at + width * columns, at + width * (columns + size)
            i2h, h2h = parameters[at:middle].reshape(width, columns), parameters[middle:end].reshape(width, size)
            both = parameters[bias_at : bias_at + 2 * width]
            at, bias_at = end, bias_at + 2 * width
            cells.append(Cell(mode, layer, direction, i2h, h2h, both[:width], both[width:]))
    return cells
