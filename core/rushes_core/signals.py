"""The signals that ask a process to end."""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those that this process is to heed: a hangup only where it is not ignored, as it is under `nohup`."""
    return [one for one in ENDING if one is not signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
