# SPDX-License-Identifier: Apache-2.0
"""Becomes a command as a container would run it: root file system read only, another user, no capabilities.

Run as root by `unshare --mount --propagation private python -I confine.py SPECIFICATION`, a JSON object:
    root      an empty folder to build the file system in
    visible   paths that are the image's, beside the system's own folders
    volumes   path -> folder of this machine, writable
    memory    path -> bytes, an empty folder in memory, writable
    uid       user and group
    command, environment, folder    what runs, with what, where
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
KERNEL = ("/proc", "/sys", "/dev")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def build(specification: dict[str, Any]) -> Path:
    """Mounts the container's file system, with this machine's system folders as its image."""
    root = Path(specification["root"])
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    for name in KERNEL:
        (root / name.lstrip("/")).mkdir()
        mount("--rbind", name, str(root / name.lstrip("/")))
    # Before what is visible: a checkout may lie below /tmp, which is one of these.
    for name, size in specification["memory"].items():
        (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(root / name.lstrip("/")))
    for name in (*SYSTEM, *specification["visible"]):
        place = root / name.lstrip("/")
        if Path(name).is_symlink() and name in SYSTEM:
            place.symlink_to(os.readlink(name))
        elif Path(name).exists():
            place.mkdir(parents=True, exist_ok=True)
            mount("--bind", name, str(place))
            mount("-o", "remount,bind,ro", str(place))
    for name, source in specification["volumes"].items():
        (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("--bind", source, str(root / name.lstrip("/")))
    mount("-o", "remount,bind,ro", str(root))
    return root


def main() -> None:
    specification = json.loads(Path(sys.argv[1]).read_text())
    os.chroot(build(specification))
    os.chdir(specification["folder"])
    uid = str(specification["uid"])
    user = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs"]
    # Who becomes another user loses what die_with_parent() asked for: it is asked for again.
    powers = ["--bounding-set", "-all", "--inh-caps", "-all", "--pdeathsig", "KILL", "--"]
    os.execvpe("setpriv", [*user, *powers, *specification["command"]], specification["environment"])


if __name__ == "__main__":
    main()
