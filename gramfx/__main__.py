"""``python -m gramfx``."""

from gramfx.cli import main

if __name__ == "__main__":
    main(prog_name="gramfx")
