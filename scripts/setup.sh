#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make .venv (see scripts/environment.py). PYTHON names another interpreter than python3.
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "setup: $python is not on the PATH; Python 3.11 or newer is needed (name one with: make setup PYTHON=...)." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed (make setup PYTHON=python3.11)." >&2
    exit 1
fi
exec "$python" "$(dirname "$0")/environment.py" "$@"
