# SPDX-License-Identifier: Apache-2.0
"""Python imports this at start when its folder is on PYTHONPATH: every process of an engine gets the interpreter."""

import interpreter_backend

interpreter_backend.install()
