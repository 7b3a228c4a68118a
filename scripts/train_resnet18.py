"""Train ResNet-18 on images of digits or clothes, on several devices: python scripts/train_resnet18.py --devices 'cpu*2'

The same as `gluon-mgpu train resnet18`; the program is in gluon_mgpu/cli/train_resnet18.py, and is short enough to copy.
"""

import sys

from gluon_mgpu.cli import main

if __name__ == "__main__":
    main(["train", "resnet18", *sys.argv[1:]], prog_name="gluon-mgpu")
