"""Compare training translators, ours and others': python scripts/benchmark_seq2seq.py --contenders ours,torch

The same as `gluon-mgpu bench seq2seq`; what is compared is in gluon_mgpu/benchmark/.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "seq2seq", *sys.argv[1:]], prog_name="gluon-mgpu")
