"""A canvas small enough for a few dozen clips a minute, known to every process that imports this."""

from rushes_core.canvas import BY_SIZE, Canvas

SIZE = "64x64"
BY_SIZE[SIZE] = Canvas("1:1", 64, 64, 64)
