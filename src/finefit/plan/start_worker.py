"""Starts the planning process (`plan.worker`) without garbage collections while it imports torch and transformers: they
would find nothing, and take a fifth of the time. What is imported is then left out of all later collections."""

import gc


def main() -> None:
    gc.disable()
    from finefit.plan import worker

    gc.freeze()
    gc.enable()
    worker.main()


if __name__ == "__main__":
    main()
