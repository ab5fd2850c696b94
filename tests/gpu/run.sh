#!/usr/bin/env bash
# What only a CUDA device can show, in under 5 minutes on one card, with the `python3` of the environment as it is:
# sweeper's dependencies and pytest must be installed. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
# Commands and workers run in other folders: they are to import this checkout, whether it is installed or not.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

python3 - <<'EOP'
import sys

import torch

print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}")
if not torch.cuda.is_available():
    sys.exit("There is no CUDA device that this torch can use: nothing was tested.")
print(f"{torch.cuda.get_device_name(0)}, cuDNN {torch.backends.cudnn.version()}")
EOP

exec python3 -m pytest -m gpu tests/gpu "$@"
