"""What a supervisor and its ranks say to each other: small frozen values over an inherited socket.

Everything about a render carries its serial number, so an answer to one attempt is never taken for one to the next.
"""

from dataclasses import dataclass
from pathlib import Path

from rushes_core.contract import InferenceContract

from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pixels import PixelFormat


@dataclass(frozen=True, slots=True)
class Boot:
    """The first command: what a rank is to be."""

    rank: int
    sp: int
    epoch: int
    device: str
    """`cpu`, or `cuda:N` among the devices that the group sees."""
    pipeline: str
    """`module:callable`, a `PipelineFactory`."""
    options: tuple[str, ...]
    checkpoint: Path
    rendezvous: str
    """URL by which the ranks of this epoch find each other: `file://` on one node, `tcp://` between two."""
    token: str
    """Of this epoch alone: ranks of another one that came upon the same address would not meet these."""
    listener: int | None
    """Descriptor of the socket that listens at a `tcp://` rendezvous; rank 0 has it."""
    collective_timeout_seconds: float
    log_level: str
    log_json: bool
    contract: InferenceContract | None = None
    """By which the worker serves jobs, since it started; None: whatever the checkpoint says."""


@dataclass(frozen=True, slots=True)
class Render:
    """Every rank renders `request` and leaves its raw files in `directory`."""

    serial: int
    request: RenderRequest
    directory: Path
    behind: int = 0
    """The render that the ranks were at when this was said; 0: none. It is void on a rank where that one failed before
    all its work was queued: the ranks may be out of step then, and whoever knows better says it again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give render `serial` up at the next boundary; said to rank 0, which tells the others there."""

    serial: int


Command = Render | Stop


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the rank is on the way to `Ready`."""

    stage: str
    """What it does now, for people."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Weights of the whole model that are dealt with, and all there are; both 0 where nothing is read."""
    bytes_per_second: float | None = None
    """Of this rank's own share, lately."""
    seconds_left: float | None = None
    """Until all weights are loaded, at that rate."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The pipeline is loaded."""

    device: str
    """What the rank runs on, for people."""
    memory_used_bytes: int
    memory_total_bytes: int
    """Of the GPU, or of the process and the machine where there is none."""
    precision: str
    """What the pipeline computes in, for people."""
    seconds: tuple[tuple[str, float], ...] = ()
    """What each stage of the start took, in order."""


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """After a render."""

    used_bytes: int
    """As `Ready` says it."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """The pipeline can never be loaded as asked: a checkpoint that must not be served, a device that is missing, a
    kernel that does not compile."""

    message: str


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The rank ends before it is ready, and another one may become so."""

    message: str
    at: float
    """Unix seconds: of several ranks, the others may have failed for want of the first."""
    is_unreadable: bool = False
    """The checkpoint's file system failed."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """The render entered `phase`, finished a denoise step of it, or reached a boundary (`phase` is None)."""

    serial: int
    phase: str | None = None
    completed_steps: int = 0


@dataclass(frozen=True, slots=True)
class UnitReady:
    """Raw frames of one temporal unit, one after another."""

    serial: int
    unit: int
    path: Path
    num_frames: int
    pixels: PixelFormat = PixelFormat.RGB24


@dataclass(frozen=True, slots=True)
class AudioReady:
    """The soundtrack, a `.npy` of float32 [2, N]."""

    serial: int
    path: Path


@dataclass(frozen=True, slots=True)
class Idled:
    """Told before `Done`, if another render was done before this one."""

    serial: int
    seconds: float
    """That the device had nothing to do between the last work of that one and the first denoise step of this one."""


@dataclass(frozen=True, slots=True)
class Done:
    serial: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The rank gave the render up at a boundary, as it was told to."""

    serial: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request itself is wrong; nothing about the rank is. A render that was said behind this one is void."""

    serial: int
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The render raised `kind`."""

    serial: int
    kind: str
    code: str
    message: str
    """For a client."""
    stage: str | None
    traceback: str
    intact: bool
    """The rank is back in step and can go on; otherwise its group must end."""
    is_late: bool = False
    """All work was queued, and what failed was to hand it over: a render that was said behind this one stands."""


Outcome = Done | Stopped | Refused | Failed
Report = Loading | Ready | Unfit | NotLoaded | MemoryUsed | Advanced | UnitReady | AudioReady | Idled | Outcome
