"""Compare images/s of training ResNet-18, ours and others': python scripts/benchmark_train.py --contenders ours,gluon

The same as `gluon-mgpu bench train`; what is compared is in gluon_mgpu/benchmark/.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "train", *sys.argv[1:]], prog_name="gluon-mgpu")
