"""python -m gluon_mgpu: the command gluon-mgpu."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="gluon-mgpu")
