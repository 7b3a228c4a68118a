#!/bin/sh
# Set everything up and train ResNet-18 on handwritten digits, on two CPU contexts: sh scripts/quickstart.sh
# Arguments are those of gluon-mgpu train resnet18: sh scripts/quickstart.sh --devices gpu --epochs 20
# VENV=/path/to/environment uses an environment that has MXNet and this project, such as one with MXNet 2.

. "$(dirname "$0")/environment.sh"
if [ -n "${VENV:-}" ]; then venv=$VENV; else install_project cpu,all; fi
exec "$venv/bin/python" scripts/train_resnet18.py --devices "cpu*2" "$@"
