# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_dflash.engine [FOLDER]`: each seam against a vLLM, or the `vllm` folder of an unpacked wheel."""

import importlib.util
import sys
from pathlib import Path

from vllm_dflash.engine import seams
from vllm_dflash.engine.inspection_seams import SEAMS as INSPECTION


def main() -> int:
    if len(sys.argv) > 1:
        root = Path(sys.argv[1])
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            print("No vLLM is installed. Name the vllm folder of an unpacked wheel.")
            return 2
        root = Path(spec.origin).parent
    results = seams.check(root, (*seams.SEAMS, *INSPECTION))
    width = max(len(str(seam)) for seam in results)
    for seam, problem in results.items():
        print(f"{seam!s:{width}}  {problem or 'holds'}")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
