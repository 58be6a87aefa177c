# SPDX-License-Identifier: Apache-2.0
"""Python imports this at start when its folder is on PYTHONPATH: every process of an engine gets the interpreter."""

import os
import traceback

import interpreter_backend

try:
    interpreter_backend.install()
except BaseException:
    # Python only notes an error here and goes on, and the tests would meet another runner than they think.
    traceback.print_exc()
    os._exit(70)
