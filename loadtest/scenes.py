"""Pictures with the statistics of photographs, without any: noise whose spectrum falls as 1/f, in layers that move."""

from collections.abc import Callable

import numpy as np

WIDTH, HEIGHT = 1344, 768
_MARGIN = 512


def _texture(seed: int, falloff: float) -> np.ndarray:
    """[H + margin, W + margin, 3] float32 of mean 0 and deviation 1."""
    height, width = HEIGHT + _MARGIN, WIDTH + _MARGIN
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    shape = (*frequency.shape, 3)
    # most of a photograph's detail is the same in all colours
    noise = rng.normal(size=(*shape[:2], 1)) + 0.25 * rng.normal(size=shape) + 0j
    noise *= np.exp(2j * np.pi * rng.random(shape[:2]))[..., None]
    picture = np.fft.irfft2(noise * frequency[..., None] ** -falloff, s=(height, width), axes=(0, 1))
    picture -= picture.mean((0, 1))
    return (picture / picture.std()).astype(np.float32)


def _window(texture: np.ndarray, y: float, x: float) -> np.ndarray:
    top, left = round(y) % _MARGIN, round(x) % _MARGIN
    return texture[top : top + HEIGHT, left : left + WIDTH]


def drift(num_frames: int) -> np.ndarray:
    """[F, H, W, 3] uint8: a foreground that moves fast before a background that moves slowly."""
    near, far, mask = _texture(1, 1.2), _texture(2, 1.4), _texture(3, 2.2)[..., :1]
    frames = np.empty((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for i in range(num_frames):
        share = np.clip(0.5 + 2 * _window(mask, 0.4 * i, 1.5 * i), 0, 1)
        picture = share * _window(near, 0.7 * i, 2.6 * i) + (1 - share) * _window(far, 0.2 * i, 0.5 * i)
        frames[i] = np.clip(120 + 45 * picture, 0, 255)
    return frames


def grain(num_frames: int) -> np.ndarray:
    """`drift` with the grain of film: what encoders find hardest."""
    rng = np.random.default_rng(4)
    frames = drift(num_frames)
    for frame in frames:
        noise = rng.normal(scale=2.5, size=(HEIGHT, WIDTH, 1))
        frame[:] = np.clip(frame + noise, 0, 255)
    return frames


def calm(num_frames: int) -> np.ndarray:
    """A smooth picture that hardly moves, and a cut in its middle."""
    first, second = _texture(5, 2.0), _texture(6, 1.8)
    frames = np.empty((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for i in range(num_frames):
        texture = first if i < num_frames // 2 else second
        frames[i] = np.clip(110 + 40 * _window(texture, 0.1 * i, 0.25 * i), 0, 255)
    return frames


SCENES: dict[str, Callable[[int], np.ndarray]] = {"drift": drift, "grain": grain, "calm": calm}
