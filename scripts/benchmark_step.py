"""Compare what a step costs the host, ours and others': python scripts/benchmark_step.py --num-devices 1,2,4

The same as `gluon-mgpu bench step`; what is compared is in gluon_mgpu/benchmark/.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "step", *sys.argv[1:]], prog_name="gluon-mgpu")
