"""Compare evaluating on many small batches, ours and others': python scripts/benchmark_evaluate.py --network resnet18

The same as `gluon-mgpu bench evaluate`; what is compared is in gluon_mgpu/benchmark/.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "evaluate", *sys.argv[1:]], prog_name="gluon-mgpu")
