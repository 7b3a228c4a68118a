"""Data sets of the training programs, loaders of batches, and sentence pairs.

```
images          load_digits, load_mnist, load_fashion_mnist, load_idx_folder, ImageData
batches         ArrayLoader; in a job: ShardedSampler, JoinedBatches; prefetch is in gluon_mgpu
sentence pairs  read_pairs, read_tsv, korean_numbers, SentencePairs, filter_pairs, split_pairs
tokens          build_vocabulary, load_vocabulary, Vocabulary, PAD, BOS, EOS, UNK; encode_pairs, PairLoader
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
