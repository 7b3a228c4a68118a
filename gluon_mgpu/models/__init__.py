"""Networks that the training programs use.

```
images       resnet18, Residual
translation  load_translator, translate, Translator, Translation, plot_attention, exact_match
training     Seq2Seq, SequenceLoss, unigram_log_p
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
