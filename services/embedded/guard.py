"""A launcher that runs between the supervisor and a child: tie its life to ours, drop rights, become it.

Run as a script by a bare interpreter (`python -I -S guard.py PARENT SIGNAL UID GID -- COMMAND...`), so it imports
nothing of ours. It is a program of its own because `Popen(preexec_fn=...)` is not safe in a process that has threads.
UID and GID are -1 to stay who we are. Exit 125: the supervisor was gone before the child began.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, signal, uid, gid = (int(value) for value in arguments[:4])
    command = arguments[5:]
    libc = None
    if sys.platform == "linux":
        import ctypes  # before rights are dropped: the interpreter may lie where `nobody` cannot read

        libc = ctypes.CDLL(None, use_errno=True)
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    if libc is not None:
        # After setuid, which clears it; exec keeps it. Elsewhere the next start clears what a kill left behind.
        libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(125)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
