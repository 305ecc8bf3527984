"""`python -m trtforge`."""

from trtforge.cli.app import main

if __name__ == "__main__":
    main()
