"""python -m gluon_mgpu: the command gluon-mgpu."""

from gluon_mgpu_startup.command import main

if __name__ == "__main__":
    main()
