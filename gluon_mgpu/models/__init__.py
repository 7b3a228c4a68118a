"""Networks that the training programs use."""

from .resnet import Residual, resnet18
from .seq2seq.loss import SequenceLoss
from .seq2seq.network import Seq2Seq

__all__ = ["Residual", "Seq2Seq", "SequenceLoss", "resnet18"]
