"""CUDA C++ without a compiler on the machine: NVRTC from torch's own packages, launches through the driver.

Compiled kernels are kept on disk under a name that covers source, options, architecture, compiler and driver. Processes
that compile the same kernel at once do so independently and put the same file in place; a damaged file is compiled
anew; where the directory cannot be written the kernel is used all the same and compiled again by the next process.
The directory is `rushes/kernels` in the user's cache: below `$XDG_CACHE_HOME`, by default `~/.cache`.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_MAX_DYNAMIC_SHARED_MEMORY = 8
_SHARED_MEMORY_WITHOUT_ASKING = 48 << 10
_UNFIT_BINARY = (200, 209, 218, 222, 300)
"""What the driver says of the code itself: invalid image, none for this device, PTX it cannot or will not read."""


class KernelError(RuntimeError):
    """The compiler or the driver refused; the message holds what it said."""


class DriverError(KernelError):
    """The driver refused a call: for the state of the device, perhaps, and not for the kernel."""


def cache_directory() -> Path:
    """Where compiled kernels are kept. A user without a home directory gets one below the working directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "rushes" / "kernels"
    except RuntimeError:
        return Path(".cache", "rushes", "kernels")


class Module:
    """The kernels of one source on one device.

    Args:
        macros: definitions, `NAME=VALUE`.
        preludes: sources that are put in front.
        one_generation: also allow instructions that only the device's own generation has.
        directory: where compiled kernels are kept, if not in the user's cache.

    Raises:
        KernelError: the source does not compile, or NVRTC or the driver cannot be found.
    """

    def __init__(
        self,
        source: Path,
        device: torch.device,
        *,
        macros: Sequence[str] = (),
        preludes: Sequence[Path] = (),
        one_generation: bool = False,
        directory: Path | None = None,
    ) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}{'a' if one_generation else ''}"
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{macro}" for macro in macros)]
        self._device = device
        self._handle = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._shared_memory: dict[str, int] = {}
        text = source.read_bytes()
        for prelude, following in reversed(list(pairwise([*preludes, source]))):
            text = prelude.read_bytes() + b'#line 1 "' + following.name.encode() + b'"\n' + text
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            binary = cached(
                source.stem,
                [text, *(option.encode() for option in options), repr(_versions()).encode()],
                lambda: compile_source(text, source.name, options),
                directory=cache_directory() if directory is None else directory,
                accept=self._load,
            )
        self.binary_bytes = len(binary)

    def launch(
        self,
        name: str,
        arguments: Sequence[ctypes._SimpleCData | ctypes.Structure],
        *,
        blocks: int | tuple[int, ...],
        threads: int,
        shared_memory: int = 0,
    ) -> None:
        """Queue one launch on the device's current stream."""
        grid = blocks if isinstance(blocks, tuple) else (blocks,)
        grid += (1,) * (3 - len(grid))
        with torch.cuda.device(self._device):
            function = self._function(name, shared_memory)
            pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_memory, stream, pointers, None)

    def _load(self, binary: bytes) -> bool:
        """Whether the driver takes `binary`.

        Raises:
            DriverError: it does not say, for the state of the device.
        """
        status = _driver().cuModuleLoadData(ctypes.byref(self._handle), ctypes.c_char_p(binary))
        if status and status not in _UNFIT_BINARY:
            raise _refusal("cuModuleLoadData", status)
        return not status

    def _function(self, name: str, shared_memory: int) -> ctypes.c_void_p:
        if name not in self._functions:
            function = ctypes.c_void_p()
            _call("cuModuleGetFunction", ctypes.byref(function), self._handle, name.encode())
            self._functions[name] = function
        if shared_memory > self._shared_memory.get(name, _SHARED_MEMORY_WITHOUT_ASKING):
            _call("cuFuncSetAttribute", self._functions[name], _MAX_DYNAMIC_SHARED_MEMORY, shared_memory)
            self._shared_memory[name] = shared_memory
        return self._functions[name]


class TensorMap(ctypes.Structure):
    """A view of a bf16, fp16 or e4m3 tensor in tiles, that the copy engine swizzles into shared memory."""

    _align_ = 64
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]

    # before Python 3.13, ctypes does not know `_align_`
    @classmethod
    def of(cls, x: Tensor) -> "TensorMap":
        """Tiles of 64 rows x 128 channels, as two panels of 64 channels: a row of one is as long as the swizzle."""
        return cls._encoded(x, (64, x.numel() // 128, 2), (256, 128), (64, 64, 2))

    @classmethod
    def of_heads(cls, x_BNHD: Tensor, tile_rows: int) -> "TensorMap":
        """Tiles of `tile_rows` tokens of one head of 64 channels; tokens past the last one are read as zeros."""
        B, N, H, D = x_BNHD.shape
        return cls._encoded(x_BNHD, (D, H, N, B), (2 * D, 2 * H * D, 2 * N * H * D), (D, 1, tile_rows, 1))

    @classmethod
    def of_rows(cls, x_SC: Tensor, tile_rows: int) -> "TensorMap":
        """Tiles of `tile_rows` rows x 128 bytes; rows past the last one are read as zeros and not written."""
        (S, C), size = x_SC.shape, x_SC.dtype.itemsize
        return cls._encoded(x_SC, (C, S), (size * C,), (128 // size, tile_rows))

    @classmethod
    def _encoded(
        cls, x: Tensor, sizes: tuple[int, ...], byte_strides: tuple[int, ...], box: tuple[int, ...]
    ) -> "TensorMap":
        storage = (ctypes.c_char * (ctypes.sizeof(cls) + 64))()
        tensor_map = cls.from_buffer(storage, -ctypes.addressof(storage) % 64)
        types = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
        swizzle_128, promote_256 = 3, 3
        u64, u32, rank = ctypes.c_uint64, ctypes.c_uint32, len(sizes)
        _call(
            "cuTensorMapEncodeTiled", ctypes.byref(tensor_map), types[x.dtype], rank, ctypes.c_void_p(x.data_ptr()),
            (u64 * rank)(*sizes), (u64 * (rank - 1))(*byte_strides), (u32 * rank)(*box), (u32 * rank)(*[1] * rank),
            0, swizzle_128, promote_256, 0,
        )  # fmt: skip
        return tensor_map


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Argument of a launch: the address of a tensor, or null."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def compile_source(text: bytes, name: str, options: Sequence[str]) -> bytes:
    """Machine code of a CUDA C++ source.

    Raises:
        KernelError: with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), ctypes.c_char_p(text), name.encode(), 0, None, None):
        raise KernelError(f"NVRTC cannot take {name}")
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            raise KernelError(
                f"NVRTC cannot compile {name}:\n{_output(nvrtc, program, 'ProgramLog').decode().strip(chr(0))}"
            )
        return _output(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cached(
    name: str,
    key: Sequence[bytes],
    make: Callable[[], bytes],
    *,
    directory: Path,
    accept: Callable[[bytes], bool],
) -> bytes:
    """What `make` returns, from `directory` if an earlier call with the same key left it there and `accept` takes it.

    Raises:
        KernelError: `accept` refuses what `make` has just made.
    """
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in key)).hexdigest()
    path = directory / f"{name}-{digest[:32]}.cubin"
    with suppress(OSError):
        stored = path.read_bytes()
        seal, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == seal and accept(content):
            return content
        log.warning("compiled kernel %s is damaged; compiling it again", path)
    content = make()
    if not accept(content):
        raise KernelError(f"the driver cannot load the compiled kernel {name}")
    try:
        _write(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        log.warning("compiled kernel cannot be kept in %s: %s", directory, error.strerror)
    return content


def _write(path: Path, content: bytes) -> None:
    """Put a file in place as a whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(path for root in roots for path in root.glob(f"*/lib/{name}"))
    try:
        return ctypes.CDLL(str(found[0]) if found else name)
    except OSError as error:
        raise KernelError(f"{name}, which compiles kernels and comes with torch, cannot be loaded: {error}") from None


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"the CUDA driver cannot be loaded: {error}") from None


def _call(name: str, *arguments: object) -> None:
    """Call the driver.

    Raises:
        DriverError: with the driver's name for the error.
    """
    if status := getattr(_driver(), name)(*arguments):
        raise _refusal(name, status)


def _refusal(name: str, status: int) -> DriverError:
    said = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(said))
    return DriverError(f"{name} failed: {(said.value or b'unknown error').decode()}")


def _versions() -> tuple[int, int, int]:
    """Compiler (major, minor) and driver."""
    major, minor, driver = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    _call("cuDriverGetVersion", ctypes.byref(driver))
    return major.value, minor.value, driver.value
