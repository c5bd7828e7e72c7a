"""What decoded frames are on their way from a rank to the encoder."""

from enum import StrEnum


class PixelFormat(StrEnum):
    """Bytes of a frame, under FFmpeg's names."""

    RGB24 = "rgb24"
    """Three bytes a pixel; the encoder converts them."""
    YUV420P = "yuv420p"
    """What H.264 holds: BT.709 in limited range, all of Y, then U and V at half the size."""

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one frame as uint8, for even sizes."""
        return (height, width, 3) if self is PixelFormat.RGB24 else (height * 3 // 2, width)
