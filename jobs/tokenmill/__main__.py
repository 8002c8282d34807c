"""`python -m tokenmill`: the console script without an installation."""

from tokenmill.cli import main

if __name__ == "__main__":
    main()
