"""Numbers as people read them; GiB appear here and nowhere below."""


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
