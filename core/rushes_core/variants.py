"""What is stored of a finished job: the clip, and beside it what is made from the same frames and sound."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of object. All those of an attempt lie side by side."""

    name: str
    filename: str
    content_type: str

    @property
    def extension(self) -> str:
        """With its dot."""
        return self.filename[self.filename.index(".") :]


VIDEO = Variant("video", "video.mp4", "video/mp4")
THUMBNAIL = Variant("thumbnail", "thumbnail.jpg", "image/jpeg")
SPRITESHEET = Variant("spritesheet", "spritesheet.jpg", "image/jpeg")
AUDIO = Variant("audio", "audio.m4a", "audio/mp4")

PICTURES = (THUMBNAIL, SPRITESHEET)
BY_PRODUCTS = (*PICTURES, AUDIO)
VARIANTS = {variant.name: variant for variant in (VIDEO, *BY_PRODUCTS)}
