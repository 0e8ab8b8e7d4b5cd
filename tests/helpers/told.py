"""Texts of errors."""


def message_of(function, *arguments):
    """Returns the text of the RuntimeError in which ``function`` ends, or "none"."""
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "none"
