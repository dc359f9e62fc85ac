"""Text that came from outside, made fit for one line of a terminal."""


def one_line(text: str, limit: int | None = None) -> str:
    """Escape line breaks and whatever else a terminal would obey instead of print; cut to ``limit`` characters."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return line if limit is None or len(line) <= limit else f"{line[:limit]}..."
