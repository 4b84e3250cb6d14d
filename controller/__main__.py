"""`python -m controller` is `trimtab`."""

from controller.cli import main

if __name__ == "__main__":
    main()
