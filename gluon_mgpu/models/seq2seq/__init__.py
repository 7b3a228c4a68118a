"""The attention seq2seq: network, loss, search, translator and its callbacks."""

from .loss import SequenceLoss
from .network import Seq2Seq

__all__ = ["Seq2Seq", "SequenceLoss"]
