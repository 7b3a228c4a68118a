"""python -m gluon_mgpu: the command gluon-mgpu."""

from .cli.main import run

if __name__ == "__main__":
    run()
