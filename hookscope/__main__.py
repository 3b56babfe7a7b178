"""`python -m hookscope`."""

from hookscope.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
