"""Images for a page: decoded as a model's are and written anew, so that a rater sees what the model was shown and a browser gets nothing else."""

import io

from finefit.data.cells import Fault
from finefit.data.images import decode
from finefit.data.rows import Image
from finefit.review.exhibits import Exhibit, Gone, content_of

_FAST = 1
"""Of zlib: the network is usually this machine's own."""


def picture_of(exhibit: Exhibit) -> bytes:
    """As PNG."""
    try:
        shown = decode(Image(path=exhibit.name), content=content_of(exhibit))
    except Fault as fault:
        raise Gone(str(fault)) from None
    written = io.BytesIO()
    shown.save(written, "PNG", compress_level=_FAST)
    return written.getvalue()
