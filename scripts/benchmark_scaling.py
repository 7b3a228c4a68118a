"""Compare sums over processes, and training with them, ours and PyTorch's: python scripts/benchmark_scaling.py --processes 2,4

The same as `gluon-mgpu bench scaling`; what is compared is in gluon_mgpu/benchmark/scaling.py.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "scaling", *sys.argv[1:]], prog_name="gluon-mgpu")
