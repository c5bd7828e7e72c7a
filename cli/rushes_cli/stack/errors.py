"""What goes wrong with processes that this command line starts."""

from rushes_core.errors import RushesError


class StackError(RushesError):
    """A server or a part of Rushes could not be started, or ended on its own; says which and shows its last lines."""

    code = "stack_error"
