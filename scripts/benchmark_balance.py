"""Compare an even split with one by measured speed, one of two cores being busy: python scripts/benchmark_balance.py --rounds 9

The same as `gluon-mgpu bench balance`; what is compared is in gluon_mgpu/benchmark/balance.py.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["bench", "balance", *sys.argv[1:]], prog_name="gluon-mgpu")
