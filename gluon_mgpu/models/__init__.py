"""Networks that the training programs use."""

from .resnet import Residual, resnet18
from .seq2seq.network import Seq2Seq
from .seq2seq.loss import SequenceLoss

__all__ = ["Residual", "Seq2Seq", "SequenceLoss", "resnet18"]
