"""Turns itself into another program that does not outlive the process that started it.

Run by path with `python -I -S guard.py PARENT DEATH_SIGNAL UID GID PROGRAM ARGUMENT...`; UID -1 keeps the user. It
drops privileges only after the interpreter is loaded, so that the target user need not be able to read the interpreter,
nor any module of ours: nothing is imported that is not the standard library's.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, death_signal, uid, gid = map(int, sys.argv[1:5])
    command = sys.argv[5:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # after the change of user: a change of credentials clears the death signal
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the starting process ended first")
    # what Python or a background shell ignores would stay ignored in the program
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(command[0], command)


main()
