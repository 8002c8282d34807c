"""`python -m tokenmill`: the console script without an installation."""

from tokenmill.cli import console

if __name__ == "__main__":
    console()
