"""Text for a terminal: what users of the cluster control is made harmless."""

from core.redact import redact

__all__ = ["one_line", "printable"]


def printable(text: str) -> str:
    r"""Return `text` with each character that is not printable escaped, such as `\x1b` or `\u202e`.

    Names, messages and Events of tenants' objects could otherwise move the cursor, change what was printed before, or
    reverse the direction of what follows.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(text: str) -> str:
    """Return a message as one printable line without secrets."""
    return printable(redact(" ".join(text.split())))
