"""Train a translator on Korean numbers, or on text of your own: python scripts/train_seq2seq.py --devices 'cpu*2'

The same as `gluon-mgpu train seq2seq`; the program is in gluon_mgpu/cli/train_seq2seq.py, and is short enough to copy.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["train", "seq2seq", *sys.argv[1:]], prog_name="gluon-mgpu")
