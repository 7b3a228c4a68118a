"""The attention seq2seq: network, loss, search, translator and its callbacks."""

from .network import Seq2Seq
from .sequence_loss import SequenceLoss

__all__ = ["Seq2Seq", "SequenceLoss"]
