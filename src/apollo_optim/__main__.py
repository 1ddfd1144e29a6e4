"""`python -m apollo_optim` is the command `apollo`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
