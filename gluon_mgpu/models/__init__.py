"""Networks that the training programs use."""

from .resnet import Residual, resnet18
from .seq2seq import Seq2Seq
from .sequence_loss import SequenceLoss

__all__ = ["Residual", "Seq2Seq", "SequenceLoss", "resnet18"]
