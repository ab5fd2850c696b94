"""Work on the study of `test_resume.trial_spec` in a process that has not used CUDA before.

    python -m gpu.fresh_process FOLDER [METHOD:N] < arguments.json        (in the folder `tests`)

A process that has used CUDA cannot fork, as the tests on the CPU do to be killed. With METHOD:N the work is done by a
fork of this process, which SIGKILLs itself there (`test_resume.start`); this one then says whether it died so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from harness import run_spec
from test_resume import run_killed, trial_spec


def main() -> None:
    torch.set_num_threads(1)
    folder, places = Path(sys.argv[1]), sys.argv[2:]
    spec = trial_spec(**json.load(sys.stdin))
    if places:
        run_killed(spec, folder, *places)
    else:
        run_spec(spec, folder)


if __name__ == "__main__":
    main()
