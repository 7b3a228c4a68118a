"""Compare the update of few large parameters and of many small ones: python scripts/benchmark_size.py --num-params 10,1000

The same as `gluon-mgpu bench size`; what is compared is in gluon_mgpu/benchmark/.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "size", *sys.argv[1:]], prog_name="gluon-mgpu")
