"""Files that are written whole or not at all. It lies on the lowest floor so that every floor can use it."""

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one step, in UTF-8, its folders made: a reader sees the old text or the new one.

    Raises OSError that names this file, not the draft beside it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp's files are readable by their owner alone
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
