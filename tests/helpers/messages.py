"""Error messages."""


def message_of(function, *arguments):
    """Returns the message of the error that ``function`` raises, or "finished"."""
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    return "finished"
